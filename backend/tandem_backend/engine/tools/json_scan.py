# SPDX-License-Identifier: Apache-2.0
"""Where a JSON value ends in a text that is still coming. It looks at structure only: brackets, strings, separators."""


class JsonValueScanner:
    """Fed piece by piece with text that begins with a value's first letter."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._is_scalar = False
        self.is_done = False
        self.is_broken = False  # a tag where no JSON has one: the model gave up on the value

    def feed(self, text: str) -> int:
        """How many letters of the text belong to the value; fewer than all only where it ends."""
        for n, letter in enumerate(text):
            if self._in_string:
                self._string_letter(letter)
                if self._in_string or self._depth:
                    continue
                self.is_done = True
                return n + 1
            if letter == "<":
                self.is_done = self.is_broken = True
                return n
            if self._is_scalar and (letter in ",]}" or letter.isspace()):
                self.is_done = True
                return n
            if letter == '"':
                self._in_string = True
            elif letter in "[{":
                self._depth += 1
            elif letter in "]}":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_done = True
                    return n + 1
            elif self._depth == 0:
                self._is_scalar = True
        return len(text)

    def _string_letter(self, letter: str) -> None:
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._in_string = False
