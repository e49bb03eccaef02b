# SPDX-License-Identifier: Apache-2.0
"""The tools of a request, as the parsers and the grammar need them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem_backend.errors import InvalidRequestError

# What OpenAI allows, and dots; a name is written into markup.
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]  # JSON Schema of an object

    def property_schema(self, key: str) -> Mapping[str, Any] | None:
        """The schema of one argument, with the definitions that it may refer to; None for an unknown one."""
        properties = self.parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            return None
        definitions = {name: self.parameters[name] for name in ("$defs", "definitions") if name in self.parameters}
        return {**definitions, **schema}


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Tools as OpenAI writes them, or the function objects alone. Raises InvalidRequestError naming the place."""
    found: list[Tool] = []
    for n, item in enumerate(tools):
        inner = item.get("function", item)
        function = inner if isinstance(inner, Mapping) else {}
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise InvalidRequestError(
                f"tools[{n}]: name must be 1 to 128 letters, digits, '_', '-' or '.', got {str(name)[:140]!r}"
            )
        if any(tool.name == name for tool in found):
            raise InvalidRequestError(f"tools[{n}]: name {name!r} is there twice")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidRequestError(
                f"tools[{n}]: parameters must be a JSON Schema object, got {str(parameters)[:100]}"
            )
        found.append(Tool(name, parameters or {}))
    return tuple(found)
