# SPDX-License-Identifier: Apache-2.0
"""Chat messages and tools of the OpenAI API as the backend's chat template takes them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem_client.gateway.errors import invalid
from tandem_client.gateway.json_text import read_json

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check `messages` and bring them into the template's form. Raises ApiError 400 naming the place."""
    return [read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def read_message(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Check one message, which stands at `param`, and bring it into the template's form. Raises ApiError 400."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{param}.role", f"must be one of {', '.join(_ROLES)}, got {str(role)[:100]!r}")
    found: dict[str, Any] = {"role": _ROLES[role], "content": read_content(message.get("content"), f"{param}.content")}
    if role == "assistant":
        found |= _assistant_parts(message, param)
    elif found["content"] is None:
        raise invalid(f"{param}.content", "is required")
    for name in ("name", *(("tool_call_id",) if role == "tool" else ())):
        if message.get(name) is not None:
            found[name] = _text(message, name, param)
    return found


def _assistant_parts(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise invalid(f"{param}.{name}", "is not supported: send tool_calls and text")
    if message.get("refusal") is not None and message.get("content") is None:
        parts["content"] = _text(message, "refusal", param)
    if message.get("reasoning_content") is not None:
        parts["reasoning_content"] = _text(message, "reasoning_content", param)
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise invalid(f"{param}.tool_calls", "must be a list")
        parts["tool_calls"] = [_tool_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return parts


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise invalid(param, 'must be {"id", "type": "function", "function": {"name", "arguments"}}')
    name, arguments = _text(function, "name", f"{param}.function"), function.get("arguments")
    if not isinstance(arguments, dict):  # which is not the API's way, but means the same
        arguments = read_arguments(_text(function, "arguments", f"{param}.function"))
    call_id = None if call.get("id") is None else _text(call, "id", param)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(text: str) -> Any:
    """A call's arguments as an object, which templates expect; text that is none stays text."""
    try:
        value = json.loads(text) if isinstance(read_json(text), dict) else text  # json keeps integers of any length
    except ValueError:
        return text
    return value


def read_content(content: Any, param: str) -> str | None:
    """The text of a message's content: text, or a list of text parts. Raises ApiError 400."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(param, f"must be text or a list of parts, got {str(content)[:100]!r}")
    return "".join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise invalid(param, f"must be an object, got {str(part)[:100]!r}")
    kind = part.get("type")
    if kind == "refusal":
        return _text(part, "refusal", param)
    if kind not in _TEXT_PARTS:
        raise invalid(f"{param}.type", f"must be text: the model reads nothing else, got {str(kind)[:100]!r}")
    return _text(part, "text", param)


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check chat `tools`. Raises ApiError 400 naming the place."""
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise invalid(f"tools[{index}].type", f"must be function, got {str(tool.get('type'))[:100]!r}")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise invalid(f"tools[{index}].function", "must be an object with a name")
        _text(function, "name", f"tools[{index}].function")
    return [dict(tool) for tool in tools]


def _text(values: Mapping[str, Any], name: str, param: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise invalid(f"{param}.{name}", f"must be text, got {str(value)[:100]!r}")
    return value
