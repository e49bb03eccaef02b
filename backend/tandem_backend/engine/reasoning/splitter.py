# SPDX-License-Identifier: Apache-2.0
"""ReasoningSplitter: reasoning and answer of a text that comes in pieces."""

from dataclasses import dataclass

from tandem_backend.engine.partial_text import held_len
from tandem_backend.engine.reasoning.tags import CLOSE, OPEN


@dataclass(slots=True)
class Split:
    """A piece of the text. `markup` and `answer` joined are the text itself."""

    markup: str = ""  # the block as it was written: tags, reasoning and the space around them
    reasoning: str = ""  # the block's content alone
    answer: str = ""


class ReasoningSplitter:
    """A block is at the text's beginning, or was opened by the prompt; tags further on are part of the answer."""

    def __init__(self, *, in_block: bool) -> None:
        self._state = "block" if in_block else "start"
        self._rest = ""  # not yet understood
        self._has_reasoning = False
        self._space = ""  # the reasoning's white space so far that may be its end

    def push(self, text: str) -> Split:
        """Take text that comes next."""
        self._rest += text
        split = Split()
        if self._state == "start":
            self._read_start(split)
        if self._state == "block":
            self._read_block(split)
        if self._state == "after":
            self._read_after(split)
        if self._state == "answer":
            split.answer, self._rest = self._rest, ""
        return split

    def finish(self) -> Split:
        """The text has ended."""
        rest, self._rest = self._rest, ""
        if self._state == "block":
            split = Split(markup=rest)
            self._reason(rest, split)
            return split
        return Split(markup=rest) if self._state == "after" else Split(answer=rest)

    def _read_start(self, split: Split) -> None:
        begun = self._rest.lstrip()
        if begun.startswith(OPEN):
            self._move(len(self._rest) - len(begun) + len(OPEN), split)
            self._state = "block"
        elif not OPEN.startswith(begun):
            self._state = "answer"

    def _read_block(self, split: Split) -> None:
        end = self._rest.find(CLOSE)
        if end < 0:
            self._reason(self._move(len(self._rest) - held_len(self._rest, (CLOSE,)), split), split)
            return
        self._reason(self._move(end, split), split)
        self._move(len(CLOSE), split)
        self._space, self._state = "", "after"

    def _read_after(self, split: Split) -> None:
        answer = self._rest.lstrip()
        self._move(len(self._rest) - len(answer), split)
        if answer:
            self._state = "answer"

    def _move(self, num_chars: int, split: Split) -> str:
        moved, self._rest = self._rest[:num_chars], self._rest[num_chars:]
        split.markup += moved
        return moved

    def _reason(self, text: str, split: Split) -> None:
        """White space at the block's ends is layout."""
        text = self._space + text
        if not self._has_reasoning:
            text = text.lstrip()
        kept = text.rstrip()
        self._has_reasoning = self._has_reasoning or bool(kept)
        split.reasoning += kept
        self._space = text[len(kept) :]
