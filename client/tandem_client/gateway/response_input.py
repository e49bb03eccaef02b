# SPDX-License-Identifier: Apache-2.0
"""/v1/responses: from its fields to a backend request."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem_client.gateway.errors import invalid
from tandem_client.gateway.fields import RESPONSES
from tandem_client.gateway.messages import read_arguments, read_content, read_message, read_tools
from tandem_client.gateway.options import GRACE_S, Caller, base_sampling
from tandem_client.payload import GenerateOptions

INCLUDE_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (INCLUDE_LOGPROBS, "reasoning.encrypted_content")


def response_options(values: Mapping[str, Any], caller: Caller) -> GenerateOptions:
    """The backend request of a response. Raises ApiError 400 naming the field."""
    sampling = base_sampling(RESPONSES, values, caller)
    sampling.setdefault("reasoning_format", "field")
    options = GenerateOptions(messages=read_input(values), sampling=sampling)
    if values.get("tools"):
        options["tools"] = read_tools([_nested_tool(tool) for tool in values["tools"]])
    if "tool_choice" in values:
        options["tool_choice"] = _tool_choice(values["tool_choice"])
    if "chat_template_kwargs" in values:
        options["chat_template_kwargs"] = values["chat_template_kwargs"]
    options["response_format"] = _response_format(values.get("text", {}))
    options["reasoning_effort"] = _effort(values.get("reasoning", {}))
    options["max_tokens"] = values.get("max_output_tokens")
    options["timeout_s"] = caller.timeout_s + GRACE_S
    if wants_logprobs(values):
        options["logprobs"] = values.get("top_logprobs", True)
        sampling["logprobs_bytes"] = True
    elif "top_logprobs" in values:
        raise invalid("top_logprobs", f"only with include: {INCLUDE_LOGPROBS}")
    return options


def wants_logprobs(values: Mapping[str, Any]) -> bool:
    """Raises ApiError 400 where `include` asks for what there is not."""
    included = values.get("include", [])
    for index, name in enumerate(included):
        if name not in _INCLUDED:
            raise invalid(f"include[{index}]", f"must be {' or '.join(_INCLUDED)}, got {name[:100]!r}")
    return INCLUDE_LOGPROBS in included


def read_input(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation as chat messages. Raises ApiError 400 naming the item."""
    messages: list[dict[str, Any]] = []
    if "instructions" in values:
        messages.append({"role": "system", "content": values["instructions"]})
    given = values["input"]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise invalid("input", "must not be empty")
    reasoning = ""
    for index, item in enumerate(given):
        param, kind = f"input[{index}]", item.get("type", "message")
        if kind == "reasoning":
            reasoning = _joined_text(item.get("content") or [], f"{param}.content")
            continue
        message = _message(item, kind, param)
        if message["role"] == "assistant" and reasoning:
            message["reasoning_content"] = reasoning
        reasoning = ""
        if kind == "function_call" and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    if not messages:
        raise invalid("input", "must have a message")
    return messages


def _message(item: Mapping[str, Any], kind: str, param: str) -> dict[str, Any]:
    if kind == "message":
        return read_message(item, param) if item.get("role") != "tool" else _no_such(param, "a message of tool")
    if kind == "function_call":
        name, arguments = _text(item, "name", param), _text(item, "arguments", param)
        function = {"name": name, "arguments": read_arguments(arguments)}
        call = {"id": _text(item, "call_id", param), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = read_content(item.get("output"), f"{param}.output")
        if content is None:
            raise invalid(f"{param}.output", "is required")
        return {"role": "tool", "tool_call_id": _text(item, "call_id", param), "content": content}
    return _no_such(f"{param}.type", str(kind)[:100])


def _no_such(param: str, what: str) -> dict[str, Any]:
    raise invalid(param, f"must be message, function_call, function_call_output or reasoning, got {what!r}")


def _joined_text(parts: Any, param: str) -> str:
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise invalid(param, "must be a list of parts")
    return "".join(_text(part, "text", param) for part in parts)


def _nested_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chats have it: there its function is an object of its own."""
    if tool.get("type") != "function":
        return {"type": tool.get("type")}
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    _only_known("text", text, ("format", "verbosity"))
    if text.get("verbosity") not in (None, "medium"):
        raise invalid("text.verbosity", "is not supported: the model knows no such thing", "unsupported_parameter")
    form = text.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise invalid("text.format", "must be an object with a type")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


def _effort(reasoning: Mapping[str, Any]) -> str | None:
    _only_known("reasoning", reasoning, ("effort", "summary", "generate_summary"))
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) not in (None, "auto"):
            raise invalid(f"reasoning.{name}", "is not supported: the reasoning itself is told")
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("reasoning.effort", f"must be text, got {str(effort)[:100]!r}")
    return effort


def _only_known(param: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in values:
        if name not in names:
            raise invalid(f"{param}.{name[:100]}", "is not known", "unknown_parameter")


def _text(values: Mapping[str, Any], name: str, param: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise invalid(f"{param}.{name}", f"must be text, got {str(value)[:100]!r}")
    return value
