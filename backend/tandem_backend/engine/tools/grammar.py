# SPDX-License-Identifier: Apache-2.0
"""The Lark grammar of "this answer is a tool call", in the format of the chat template and by the tools' schemas."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem_backend.engine.tools.parser import CLOSE, OPEN, ToolFormat
from tandem_backend.engine.tools.spec import Tool
from tandem_backend.engine.tools.values import ALL_TYPES, json_types
from tandem_backend.errors import InvalidRequestError

# Of a text in XML nothing else can be enforced.
TEXT_KEYWORDS = frozenset(
    {"type", "enum", "const", "minLength", "maxLength", "title", "description", "default", "examples"}
)
NO_TAG = r"~/(?s:.*)<\/parameter>(?s:.*)/"


def tool_grammar(
    form: ToolFormat, tools: Sequence[Tool], *, parallel: bool, tags_are_tokens: bool, whitespace_pattern: str
) -> str:
    """One call of one of the tools, or with `parallel` one or more. Arguments are those that the schemas list.

    tags_are_tokens: the tokenizer has the outer tags as tokens of their own. Raises InvalidRequestError naming the tool
    and the schema's keyword that the format can't enforce.
    """
    opening, closing = (OPEN, CLOSE) if tags_are_tokens else (json.dumps(OPEN), json.dumps(CLOSE))
    rules = ['start: call ("\\n" call)*' if parallel else "start: call"]
    rules.append(f'call: {opening} "\\n" body "\\n" {closing}')
    rules.append("body: " + " | ".join(f"tool{n}" for n in range(len(tools))))
    write = _hermes if form is ToolFormat.HERMES else _qwen_xml
    for n, tool in enumerate(tools):
        rules += write(f"tool{n}", tool, whitespace_pattern)
    return "\n".join(rules) + "\n"


def object_schema(tool: Tool) -> Mapping[str, Any]:
    """The arguments' schema; arguments that it does not list are left out unless it speaks of them."""
    if tool.parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"tools: the parameters of {tool.name!r} must be of type object")
    closed = {} if "patternProperties" in tool.parameters else {"additionalProperties": False}
    return {"type": "object", **closed, **tool.parameters}


def _hermes(rule: str, tool: Tool, whitespace_pattern: str) -> list[str]:
    opening = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    return [
        f'{rule}: {opening} {rule}_arguments "}}"',
        f"{rule}_arguments: {_json(object_schema(tool), whitespace_pattern)}",
    ]


def _qwen_xml(rule: str, tool: Tool, whitespace_pattern: str) -> list[str]:
    schema = object_schema(tool)
    unsupported = schema.keys() - {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    unsupported -= {"title", "description", "$schema", "default", "examples"}
    if unsupported:
        raise InvalidRequestError(
            f"tools: the parameters of {tool.name!r} use {', '.join(sorted(unsupported))}, which the XML format of "
            "this model's template can't enforce"
        )
    required, properties = schema.get("required", []), schema.get("properties", {})
    keys = [*properties, *(key for key in required if key not in properties)]
    parts, rules = [], []
    for n, key in enumerate(keys):
        name = f"{rule}_p{n}"
        parts.append(name if key in required else f"{name}?")
        rules += _parameter(name, key, tool, whitespace_pattern)
    opening, closing = json.dumps(f"<function={tool.name}>\n"), json.dumps("</function>")
    return [f"{rule}: {' '.join([opening, *parts, closing])}", *rules]


def _parameter(name: str, key: str, tool: Tool, whitespace_pattern: str) -> list[str]:
    if not key or any(letter in "<>\n" for letter in key):
        raise InvalidRequestError(f"tools: the argument {key!r} of {tool.name!r} can't be written in the XML format")
    opening, closing = json.dumps(f"<parameter={key}>\n"), json.dumps("\n</parameter>\n")
    schema = tool.property_schema(key) or {}
    types = json_types(schema)
    if "string" not in types:
        return [
            f"{name}: {opening} {name}_value {closing}",
            f"{name}_value: {_json(schema, whitespace_pattern)}",
        ]
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None:
        literals = [json.dumps(c if isinstance(c, str) else json.dumps(c)) for c in choices]
        return [f"{name}: {opening} ({' | '.join(literals)}) {closing}"]
    unsupported = schema.keys() - TEXT_KEYWORDS - {"$defs", "definitions"}
    if unsupported and types != ALL_TYPES:
        raise InvalidRequestError(
            f"tools: the argument {key!r} of {tool.name!r} uses {', '.join(sorted(unsupported))}, which the XML format "
            "of this model's template can't enforce for text"
        )
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    terminal = name.upper()
    # One terminal with the end in it: where a value ends is decided by the whole of it.
    return [
        f"{name}: {opening} {terminal}",
        f"{terminal}: {terminal}_TEXT {closing}",
        f"{terminal}_TEXT: /(?s:.{{{least},{most}}})/ & {NO_TAG}",
    ]


def _json(schema: Mapping[str, Any], whitespace_pattern: str) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": whitespace_pattern}})
