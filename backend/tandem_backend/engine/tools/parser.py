# SPDX-License-Identifier: Apache-2.0
"""What parsers of tool calls have in common: text in as it comes, content and pieces of calls out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tandem_backend.engine.partial_text import held_len
from tandem_backend.engine.tools.spec import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolFormat(StrEnum):
    """How a chat template asks for tool calls."""

    HERMES = "hermes"
    QWEN_XML = "qwen_xml"


def tool_format(chat_template: str | None) -> ToolFormat | None:
    """The format that a template teaches the model; None where it is none that we know."""
    if chat_template is None or OPEN not in chat_template:
        return None
    return ToolFormat.QWEN_XML if "<function=" in chat_template else ToolFormat.HERMES


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call. The first piece of each has its name; the arguments' pieces joined are JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What some text brought."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolCallParser:
    """The part outside of calls. A format's parser subclasses it with `_read_call`.

    White space between the text and a call, or between calls, is layout and no content. A call whose name never came is
    given back as content, so nothing that the model wrote is lost.
    """

    markers: tuple[str, ...] = (OPEN,)

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.num_calls = 0
        self._rest = ""  # not yet understood
        self._space = ""  # trailing white space of the content so far
        self._raw: str | None = None  # of the call that is being read, until its name is known
        self._in_call = False

    def push(self, text: str) -> Parsed:
        """Take text that comes next."""
        self._rest += text
        parsed = Parsed()
        self._read(parsed)
        return parsed

    def finish(self) -> Parsed:
        """The answer has ended."""
        parsed = Parsed()
        while self._in_call and self._raw is not None:
            self._give_back(parsed)
            self._read(parsed)
        if not self._in_call:
            self._content(self._rest, parsed)
            if not self.num_calls:
                parsed.content += self._space
        self._rest = self._space = ""
        return parsed

    def _read(self, parsed: Parsed) -> None:
        step: Callable[[Parsed], bool]
        while self._rest:
            step = self._read_call if self._in_call else self._read_text
            if not step(parsed):
                break

    def _read_text(self, parsed: Parsed) -> bool:
        """Content up to a call. False: more text is needed."""
        found = [(at, marker) for marker in self.markers if (at := self._rest.find(marker)) >= 0]
        if not found:
            cut = len(self._rest) - held_len(self._rest, self.markers)
            self._content(self._rest[:cut], parsed)
            self._rest = self._rest[cut:]
            return False
        at, marker = min(found)
        self._content(self._rest[:at], parsed)
        self._rest = self._rest[at + len(marker) :]
        self._raw, self._in_call = marker, True
        self._begin_call()
        return True

    def _content(self, text: str, parsed: Parsed) -> None:
        text = self._space + text
        kept = text.rstrip()
        parsed.content += kept
        self._space = text[len(kept) :]

    def _give_back(self, parsed: Parsed) -> None:
        """What was read is no call after all; a call whose name was given out stays one, as it is."""
        if self._raw is not None:
            self._rest, self._raw = self._raw + self._rest, None
            # Its marker is content now; what follows is read anew.
            marker = next(m for m in self.markers if self._rest.startswith(m))
            self._content(marker, parsed)
            self._rest = self._rest[len(marker) :]
            self._in_call = False

    def _take(self, num_chars: int) -> str:
        """Move on in the text."""
        taken, self._rest = self._rest[:num_chars], self._rest[num_chars:]
        if self._raw is not None:
            self._raw += taken
        return taken

    def _name(self, name: str, parsed: Parsed) -> None:
        parsed.calls.append(ToolCallDelta(self.num_calls, name))
        self.num_calls += 1
        self._raw = None

    def _arguments(self, text: str, parsed: Parsed) -> None:
        if text:
            parsed.calls.append(ToolCallDelta(self.num_calls - 1, None, text))

    def _end_call(self) -> None:
        self._in_call, self._raw, self._space = False, None, ""

    def _begin_call(self) -> None:
        """A call begins behind its marker, which is in `_raw`."""
        raise NotImplementedError

    def _read_call(self, parsed: Parsed) -> bool:
        """A step within a call. False: more text is needed."""
        raise NotImplementedError
