# SPDX-License-Identifier: Apache-2.0
"""AnswerReader: the text of an answer as content, reasoning and tool calls, while it comes."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem_backend.engine.reasoning.splitter import ReasoningSplitter
from tandem_backend.engine.sequence import PreparedRequest
from tandem_backend.engine.tools import ToolCallDelta, ToolCallParser, make_parser, read_tools
from tandem_backend.engine.tools.parser import Parsed
from tandem_backend.serving.answer_fields import ReasoningFormat


@dataclass(slots=True)
class Piece:
    """What some text brought; `calls` are OpenAI's deltas of tool_calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: "Piece") -> None:
        """Join what came later; pieces of one call's arguments become one."""
        self.text += other.text
        self.reasoning += other.reasoning
        for call in other.calls:
            if self.calls and "id" not in call and self.calls[-1]["index"] == call["index"]:
                self.calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            else:
                self.calls.append(call)


class AnswerReader:
    """Calls within reasoning are reasoning. Ids of calls follow from the prompt: equal requests get equal bytes."""

    def __init__(
        self, form: ReasoningFormat, *, in_reasoning: bool, parser: ToolCallParser | None, call_id: str
    ) -> None:
        self.form = form
        self.finds_calls = parser is not None
        self._parser, self._call_id = parser, call_id
        self._splitter = ReasoningSplitter(in_block=in_reasoning)

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls if self._parser is not None else 0

    def push(self, text: str) -> Piece:
        """Take text that comes next."""
        split = self._splitter.push(text)
        return self._piece(split.markup, split.reasoning, self._parse(split.answer))

    def finish(self) -> Piece:
        """The answer has ended."""
        split = self._splitter.finish()
        piece = self._piece(split.markup, split.reasoning, self._parse(split.answer))
        if self._parser is not None:
            piece.add(self._piece("", "", self._parser.finish()))
        return piece

    def _parse(self, answer: str) -> Parsed:
        return self._parser.push(answer) if self._parser is not None else Parsed(answer)

    def _piece(self, markup: str, reasoning: str, parsed: Parsed) -> Piece:
        if self.form is ReasoningFormat.FIELD:
            markup = ""
        piece = Piece(markup + parsed.content, reasoning)
        piece.add(Piece(calls=[self._delta(call) for call in parsed.calls]))
        return piece

    def _delta(self, call: ToolCallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "index": call.index,
            "id": f"call_{self._call_id}{call.index}",
            "type": "function",
            "function": function,
        }


def answer_reader(prepared: PreparedRequest, form: ReasoningFormat) -> AnswerReader | None:
    """None where the text goes out as it is."""
    parser, tools = None, prepared.request.prompt.tools
    if prepared.form.tool_format is not None and tools:
        parser = make_parser(prepared.form.tool_format, read_tools(tools))
    if parser is None and form is ReasoningFormat.TAGS:
        return None
    prompt = np.asarray(prepared.prompt_ids, np.int32).tobytes()
    call_id = hashlib.blake2b(prompt, digest_size=12).hexdigest()
    return AnswerReader(form, in_reasoning=prepared.form.in_reasoning, parser=parser, call_id=call_id)
