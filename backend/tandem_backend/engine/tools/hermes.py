# SPDX-License-Identifier: Apache-2.0
"""Hermes' format, JSON between tags: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

import json
import re
from collections.abc import Callable, Sequence

from tandem_backend.engine.partial_text import skip_space
from tandem_backend.engine.tools.json_scan import JsonValueScanner
from tandem_backend.engine.tools.parser import CLOSE, Parsed, ToolCallParser
from tandem_backend.engine.tools.spec import Tool

ARGUMENTS = ("arguments", "parameters")
MEMBER = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*(?=\S)', re.DOTALL)
MEMBER_SO_FAR = re.compile(r'"(?:[^"\\]|\\.)*(?:\\|"\s*(?::\s*)?)?', re.DOTALL)


class HermesParser(ToolCallParser):
    """Arguments are given out as the model writes them, once the name is known.

    The JSON's own end ends a call, so a string may hold the closing tag's letters. JSON that breaks off is given out as
    far as it came.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._begin_call()

    def _begin_call(self) -> None:
        self._step: Callable[[Parsed], bool] = self._read_brace
        self._scanner = JsonValueScanner()
        self._key = self._value = ""
        self._early = ""  # arguments that came before the name
        self._is_named = False

    def _read_call(self, parsed: Parsed) -> bool:
        if self._step != self._read_value:
            self._take(skip_space(self._rest))
        return bool(self._rest) and self._step(parsed)

    def _read_brace(self, parsed: Parsed) -> bool:
        if self._rest[0] != "{":
            self._give_back(parsed)
            return True
        self._take(1)
        self._step = self._read_member
        return True

    def _read_member(self, parsed: Parsed) -> bool:
        if self._rest[0] == "}":
            self._take(1)
            self._step = self._read_close
            if not self._is_named:
                self._give_back(parsed)
            return True
        if self._rest[0] == ",":
            self._take(1)
            return True
        found = MEMBER.match(self._rest)
        if found is None:
            if MEMBER_SO_FAR.fullmatch(self._rest) is not None:
                return False
            self._break_off(parsed)
            return True
        self._key, self._value, self._scanner = _string(f'"{found[1]}"'), "", JsonValueScanner()
        self._take(found.end())
        self._step = self._read_value
        return True

    def _read_value(self, parsed: Parsed) -> bool:
        piece = self._take(self._scanner.feed(self._rest))
        self._value += piece
        # Arguments in a string, JSON within JSON, are given out when the string is whole.
        if self._key in ARGUMENTS and not self._value.startswith('"'):
            self._give_arguments(piece, parsed)
        if not self._scanner.is_done:
            return False
        if self._scanner.is_broken:
            self._break_off(parsed)
            return True
        if self._key in ARGUMENTS and self._value.startswith('"'):
            self._give_arguments(_string(self._value), parsed)
        elif self._key == "name" and self._value.startswith('"') and not self._is_named:
            self._is_named = True
            self._name(_string(self._value), parsed)
            self._arguments(self._early, parsed)
        self._step = self._read_member
        return True

    def _give_arguments(self, text: str, parsed: Parsed) -> None:
        if self._is_named:
            self._arguments(text, parsed)
        else:
            self._early += text

    def _break_off(self, parsed: Parsed) -> None:
        """No JSON goes on like this: the call ends here, or was none."""
        if self._is_named:
            self._step = self._read_close
        else:
            self._give_back(parsed)

    def _read_close(self, parsed: Parsed) -> bool:
        if CLOSE.startswith(self._rest) and self._rest != CLOSE:
            return False
        if self._rest.startswith(CLOSE):
            self._take(len(CLOSE))
        self._end_call()
        return True


def _string(text: str) -> str:
    """A JSON string's content; as it is written where it is no valid one."""
    try:
        value: str = json.loads(text, strict=False)
    except ValueError:
        return text[1:-1]
    return value
