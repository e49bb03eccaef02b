# SPDX-License-Identifier: Apache-2.0
"""An argument that came as plain text, as the JSON value that its schema asks for."""

import ast
import json
from collections.abc import Mapping
from typing import Any

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
MAX_DEPTH = 64
MAX_LITERAL_LEN = 1 << 16
WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None}


def json_types(
    schema: Any, root: Any = None, known: dict[int, frozenset[str]] | None = None, depth: int = 0
) -> frozenset[str]:
    """The JSON types that a schema allows, by its type, enum, const, anyOf, oneOf, allOf and local $ref.

    What is written in another way than JSON Schema allows everything. Each part is looked at once, since references
    may branch.
    """
    root, known = (schema if root is None else root), ({} if known is None else known)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ALL_TYPES
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = types = ALL_TYPES

    def inner(part: Any) -> frozenset[str]:
        return json_types(part, root, known, depth + 1)

    if "$ref" in schema:
        types &= inner(_resolve(root, schema["$ref"]))
    named = [name for name in _list(schema.get("type")) if isinstance(name, str)]
    if named:
        types &= frozenset(named) | (frozenset({"integer"}) if "number" in named else frozenset())
    if "const" in schema:
        types &= _types_of([schema["const"]])
    if isinstance(schema.get("enum"), list):
        types &= _types_of(schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            types &= frozenset().union(*(inner(branch) for branch in schema[keyword]))
    for branch in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        types &= inner(branch)
    known[id(schema)] = types
    return types


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
