# SPDX-License-Identifier: Apache-2.0
"""Qwen's XML format: `<tool_call><function=f><parameter=key>value</parameter></function></tool_call>`."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem_backend.engine.partial_text import held_len, skip_space
from tandem_backend.engine.tools.parser import CLOSE, OPEN, Parsed, ToolCallParser
from tandem_backend.engine.tools.spec import Tool
from tandem_backend.engine.tools.values import json_types, typed_value

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# A line break before the end of a value is layout.
VALUE_ENDS = ("\n" + END_PARAMETER, END_PARAMETER)


class QwenXmlParser(ToolCallParser):
    """Values become JSON of the type that the tool's schema asks for; text is given out as it comes."""

    markers = (OPEN, FUNCTION)  # some models leave the outer tag out

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._begin_call()

    def _begin_call(self) -> None:
        self._step: Callable[[Parsed], bool] = self._read_name if self._raw == FUNCTION else self._read_function
        self._function = self._key = self._value = ""
        self._num_arguments = 0
        self._is_text = self._has_begun = False

    def _read_call(self, parsed: Parsed) -> bool:
        if self._step not in (self._read_value, self._read_name):
            self._take(skip_space(self._rest))
        return bool(self._rest) and self._step(parsed)

    def _read_function(self, parsed: Parsed) -> bool:
        if self._rest.startswith(FUNCTION):
            self._take(len(FUNCTION))
            self._step = self._read_name
            return True
        if FUNCTION.startswith(self._rest):
            return False
        self._give_back(parsed)
        return True

    def _read_name(self, parsed: Parsed) -> bool:
        end = self._rest.find(">")
        name = self._rest if end < 0 else self._rest[:end]
        if "<" in name or "\n" in name.strip():
            self._give_back(parsed)
            return True
        if end < 0:
            return False
        self._take(end + 1)
        self._function = name.strip()
        self._name(self._function, parsed)
        self._step = self._read_tag
        return True

    def _read_tag(self, parsed: Parsed) -> bool:
        """Between values: the next one, the end of the function, or something that does not belong here."""
        if self._rest.startswith(PARAMETER):
            end = self._rest.find(">")
            if end < 0:
                return False
            self._begin_value(self._take(end + 1)[len(PARAMETER) : -1].strip(), parsed)
            return True
        if self._rest.startswith((END_FUNCTION, CLOSE)):
            if self._rest.startswith(END_FUNCTION):
                self._take(len(END_FUNCTION))
            self._arguments("}" if self._num_arguments else "{}", parsed)
            self._step = self._read_close
            return True
        if any(tag.startswith(self._rest) for tag in (PARAMETER, END_FUNCTION, CLOSE)):
            return False
        next_tag = self._rest.find("<", 1)
        self._take(next_tag if next_tag > 0 else len(self._rest))
        return True

    def _begin_value(self, key: str, parsed: Parsed) -> None:
        self._key, self._value, self._has_begun = key, "", False
        schema = self._schema()
        self._is_text = schema is None or json_types(schema) == {"string"}
        opening = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: " + '"' * self._is_text, parsed)
        self._step = self._read_value

    def _read_value(self, parsed: Parsed) -> bool:
        if not self._has_begun:
            self._take(self._rest.startswith("\n"))
            self._has_begun = True
        ends = [(at, len(end)) for end in VALUE_ENDS if (at := self._rest.find(end)) >= 0]
        if not ends:
            self._give_value(self._take(len(self._rest) - held_len(self._rest, VALUE_ENDS)), parsed)
            return False
        at, length = min(ends)
        self._give_value(self._take(at), parsed)
        self._take(length)
        if self._is_text:
            self._arguments('"', parsed)
        else:
            self._arguments(json.dumps(typed_value(self._value, self._schema()), ensure_ascii=False), parsed)
        self._step = self._read_tag
        return True

    def _give_value(self, text: str, parsed: Parsed) -> None:
        if self._is_text:
            self._arguments(json.dumps(text, ensure_ascii=False)[1:-1], parsed)
        else:
            self._value += text

    def _schema(self) -> Mapping[str, Any] | None:
        tool = self.tools.get(self._function)
        return tool.property_schema(self._key) if tool is not None else None

    def _read_close(self, parsed: Parsed) -> bool:
        if CLOSE.startswith(self._rest) and self._rest != CLOSE:
            return False
        if self._rest.startswith(CLOSE):
            self._take(len(CLOSE))
        self._end_call()
        return True
