# SPDX-License-Identifier: Apache-2.0
"""An argument that came as plain text, as the JSON value that its schema asks for."""

import ast
import json
from collections.abc import Mapping
from typing import Any

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
MAX_REFERENCES = 16
MAX_LITERAL_LEN = 1 << 16
WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None}


def json_types(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows, by its type, enum, const, anyOf, oneOf, allOf and local $ref."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return ALL_TYPES
    types = ALL_TYPES
    if "$ref" in schema:
        types &= json_types(_resolve(root, schema["$ref"]), root, depth + 1)
    if "type" in schema:
        named = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        types &= frozenset(named) | (frozenset({"integer"}) if "number" in named else frozenset())
    if "const" in schema:
        types &= _types_of([schema["const"]])
    if isinstance(schema.get("enum"), list):
        types &= _types_of(schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            types &= frozenset().union(*(json_types(branch, root, depth + 1) for branch in schema[keyword]))
    for branch in schema.get("allOf", ()):
        types &= json_types(branch, root, depth + 1)
    return types


def _resolve(root: Any, reference: Any) -> Any:
    """What `#/a/b` refers to; None where it can't be found."""
    place = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def _types_of(values: list[Any]) -> frozenset[str]:
    return frozenset().union(*(_json_type(value) for value in values))


def _json_type(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    names = {str: "string", float: "number", list: "array", dict: "object", type(None): "null"}
    return frozenset({names[type(value)]}) if type(value) in names else frozenset()


def typed_value(text: str, schema: Mapping[str, Any] | None) -> Any:
    """The JSON value that `text` stands for; the text itself where the schema allows or leaves nothing else.

    schema None: an argument that the tool doesn't have.
    """
    types = json_types(schema) if schema is not None else frozenset({"string"})
    if types == {"string"}:
        return text
    for value in _readings(text.strip()):
        found = _json_type(value)
        if found & types and not isinstance(value, str):
            return int(value) if isinstance(value, float) and types & found == {"integer"} else value
        if isinstance(value, str) and types == ALL_TYPES:
            return value
    return text


def _readings(text: str) -> list[Any]:
    """What the text may mean: JSON, a word in any case, a Python literal."""
    readings: list[Any] = []
    try:
        readings.append(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        if text.lower() in WORDS:
            readings.append(WORDS[text.lower()])
        elif text[:1] in ("[", "{") and len(text) <= MAX_LITERAL_LEN:
            readings += _python_literal(text)
    return readings


def _python_literal(text: str) -> list[Any]:
    try:
        value = ast.literal_eval(text)
        return [json.loads(json.dumps(value, allow_nan=False))] if isinstance(value, list | dict) else []
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
