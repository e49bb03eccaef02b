# SPDX-License-Identifier: Apache-2.0
"""Answers as clients get them: content, reasoning and tool calls, streamed and whole."""

import json
import time
from typing import Any

import pytest
from fakes.pb_utils import ResponseSender
from tandem_backend.engine.answer_form import AnswerForm
from tandem_backend.engine.sequence import PreparedRequest
from tandem_backend.engine.tools import ToolFormat
from tandem_backend.serving.answer import answer_reader
from tandem_backend.serving.answer_fields import ReasoningFormat
from tandem_backend.serving.request import ResponseOptions
from tandem_backend.serving.response import Responder
from tandem_backend.types import FinishReason, Prompt, Request, StepOutput

TOOLS = ({"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},)
TEXT = 'hm\n</think>\n\nAdding.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def prepared(*, tools: bool = True, in_reasoning: bool = True) -> PreparedRequest:
    request = Request(request_id="1", prompt=Prompt(messages=(), tools=TOOLS if tools else None))
    form = AnswerForm(in_reasoning, ToolFormat.HERMES if tools else None)
    return PreparedRequest(request, (1, 2, 3), time.time_ns(), time.monotonic(), form=form)


def answer(form: ReasoningFormat, *, stream: bool, text: str = TEXT, **values: Any) -> list[dict[str, Any]]:
    """The responses' values to a text that comes letter by letter."""
    sender = ResponseSender()
    options = ResponseOptions(stream=stream, reasoning_format=form, return_finish_reason=True)
    responder = Responder(sender, options, reader=answer_reader(prepared(**values), form))
    for n, letter in enumerate(text):
        reason = FinishReason.STOP if n == len(text) - 1 else None
        responder.output(StepOutput(request_id="1", text=letter, token_ids=(n,), finish_reason=reason))
    return [{tensor.name(): tensor.as_numpy()[0] for tensor in r.output_tensors()} for r in sender.responses]


def joined(responses: list[dict[str, Any]], name: str) -> str:
    return "".join(response[name] for response in responses)


def calls(responses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an OpenAI client makes of the deltas."""
    found: list[dict[str, Any]] = []
    for response in responses:
        for delta in json.loads(response["tool_calls"]):
            if delta["index"] == len(found):
                found.append(delta)
            else:
                assert "id" not in delta
                found[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "text", "reasoning"),
    [
        (ReasoningFormat.FIELD, "Adding.", "hm"),
        (ReasoningFormat.BOTH, "hm\n</think>\n\nAdding.", "hm"),
        (ReasoningFormat.TAGS, "hm\n</think>\n\nAdding.", None),
    ],
)
def test_an_answer_with_reasoning_and_a_call(
    form: ReasoningFormat, text: str, reasoning: str | None, stream: bool
) -> None:
    responses = answer(form, stream=stream)
    assert len(responses) == (len(TEXT) if stream else 1)
    assert joined(responses, "text_output") == text
    if reasoning is None:
        assert all("reasoning_content" not in response for response in responses)
    else:
        assert joined(responses, "reasoning_content") == reasoning
    [call] = calls(responses)
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (call["type"], call["index"]) == ("function", 0)
    assert responses[-1]["finish_reason"] == "tool_calls"
    assert call["id"] == calls(answer(form, stream=not stream))[0]["id"], "equal requests get equal bytes"


def test_an_answer_without_calls_stops_as_usual() -> None:
    [response] = answer(ReasoningFormat.FIELD, stream=False, text="hm</think>\n\nfine")
    assert response == {"text_output": "fine", "reasoning_content": "hm", "tool_calls": "[]", "finish_reason": "stop"}


def test_without_tools_the_text_is_not_searched() -> None:
    responses = answer(ReasoningFormat.TAGS, stream=True, tools=False, in_reasoning=False)
    assert joined(responses, "text_output") == TEXT
    assert all(response.keys() == {"text_output", "finish_reason"} for response in responses)
