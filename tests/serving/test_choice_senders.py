# SPDX-License-Identifier: Apache-2.0
"""Several choices through one response sender: each one's responses, all of them in one, and a single FINAL."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from fakes.engine import FakePrepared, Script, ScriptedEngine, chunk
from fakes.pb_utils import ResponseSender
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_backend.engine.choices import choice_ids
from tandem_backend.errors import InternalError, InvalidRequestError, UnavailableError
from tandem_backend.serving.choices import choice_senders
from tandem_backend.serving.loop import EngineLoop
from tandem_backend.serving.request import RETURN_INPUTS, ResponseOptions
from tandem_backend.serving.response import Ended, Responder
from tandem_backend.types import (
    FinishReason,
    Prompt,
    PromptLogprob,
    Request,
    RequestStats,
    SamplingParams,
    StepOutput,
)

EVERYTHING: dict[str, Any] = dict.fromkeys(RETURN_INPUTS, True)
STREAM = ResponseOptions(stream=True, **EVERYTHING)
WHOLE = ResponseOptions(echo="Say: ", **EVERYTHING)
SAMPLED = SamplingParams(temperature=1.0, seed=2**64 - 1)
DONE = chunk("end", finish_reason=FinishReason.STOP)


def request(num_choices: int) -> Request:
    return Request(request_id="r", prompt=Prompt(text="x"), params=replace(SAMPLED, num_choices=num_choices))


def responders(
    sender: ResponseSender, num_choices: int, options: ResponseOptions, told: list[Ended] | None = None
) -> list[Responder]:
    on_end = told.append if told is not None else None
    senders = choice_senders(sender, request(num_choices), 7, is_streaming=options.stream)
    return [Responder(own, options, 7, on_end, choice=choice) for own, choice in senders]


def test_a_single_answer_goes_to_the_requests_own_sender() -> None:
    sender = ResponseSender()
    assert choice_senders(sender, request(1), 7, is_streaming=True) == [(sender, None)]


def test_streamed_responses_tell_whose_they_are() -> None:
    sender, told = ResponseSender(), []
    first, second = responders(sender, 2, STREAM, told)
    first.output(chunk("a b "))
    second.output(chunk("c "))
    first.output(replace(DONE, stats=RequestStats(seed=2**64 - 1)))
    assert sender.num_finals == 0
    second.output(replace(DONE, finish_reason=FinishReason.LENGTH, stats=RequestStats(seed=0)))
    assert sender.num_finals == 1
    found = [(r.value("choice_index"), r.value("text_output"), r.value("finish_reason")) for r in sender.responses]
    assert found == [
        ([0], ["a b "], ["None"]),
        ([1], ["c "], ["None"]),
        ([0], ["end"], ["stop"]),
        ([1], ["end"], ["length"]),
    ]
    assert [r.value("seed") for r in sender.responses] == [None, None, [2**64 - 1], [0]]
    assert sender.responses[2].value("cumulative_logprob") == [-1.5]
    assert [(ended.outcome, ended.choice_index) for ended in told] == [("stop", 0), ("length", 1)]


def test_without_streaming_all_choices_are_one_response() -> None:
    sender = ResponseSender()
    one, two, three = responders(sender, 3, WHOLE)
    prompt = (None, PromptLogprob(5, -1.5))
    two.output(chunk("b c d", finish_reason=FinishReason.LENGTH, stats=RequestStats(seed=0, num_rounds=2)))
    three.output(chunk(finish_reason=FinishReason.TIMEOUT))  # before it ran
    assert sender.responses == []
    stats = RequestStats(seed=2**64 - 1, num_rounds=4)
    one.output(chunk("a", finish_reason=FinishReason.STOP, stats=stats, prompt_logprobs=prompt))
    (response,) = sender.wait()
    assert sender.num_finals == 1
    assert response.value("choice_index") == [0, 1, 2]
    assert response.value("text_output") == ["Say: a", "Say: b c d", "Say: "]
    assert response.value("finish_reason") == ["stop", "length", "timeout"]
    assert response.value("num_output_tokens") == [1, 3, 0]
    assert response.value("token_ids") == [0, 0, 1, 2]
    assert response.value("cumulative_logprob") == [-0.5, -1.5, 0.0]
    assert response.value("seed") == [2**64 - 1, 0, 1]
    assert response.value("num_rounds") == [4, 2, 0]
    assert [len(json.loads(text)) for text in response.value("logprobs")] == [1, 3, 0]
    assert len(json.loads(response.value("prompt_logprobs")[0])) == 2
    lengths = {tensor.name(): len(tensor.as_numpy()) for tensor in response.output_tensors()}
    assert {name for name, length in lengths.items() if length != 3} == {"token_ids", "prompt_logprobs"}


def test_token_ids_come_with_their_numbers() -> None:
    sender = ResponseSender()
    for responder in responders(sender, 2, ResponseOptions(return_token_ids=True)):
        responder.output(chunk("a b", finish_reason=FinishReason.STOP))
    (response,) = sender.responses
    assert response.value("num_output_tokens") == [2, 2]


@pytest.mark.parametrize("options", [STREAM, WHOLE])
def test_an_error_of_one_choice_is_the_requests(options: ResponseOptions) -> None:
    sender, told = ResponseSender(), []
    one, two, three = responders(sender, 3, options, told)
    one.output(DONE)
    two.output(StepOutput(request_id="", error=InternalError("the request's grammar failed")))
    assert sender.responses[-1].error().message() == "[INTERNAL] the request's grammar failed"
    num_responses = len(sender.responses)
    sender.is_cancelled = lambda: pytest.fail("asked after FINAL, which crashes Triton server")  # type: ignore[method-assign]
    assert three.is_cancelled()
    three.output(chunk("late"))
    three.output(chunk(finish_reason=FinishReason.CANCELLED))
    assert (len(sender.responses), sender.num_finals) == (num_responses, 1)
    assert [ended.outcome for ended in told] == ["stop", "error", "cancelled"]
    assert all(responder.finished for responder in (one, two, three))


def test_an_error_passed_to_the_front_ends_the_request_too() -> None:
    sender = ResponseSender()
    senders = choice_senders(sender, request(2), 7, is_streaming=True)
    one, two = (Responder(own, STREAM, 7, error_as_output=True, choice=choice) for own, choice in senders)
    one.fail(UnavailableError("full"))
    two.fail(UnavailableError("full"))
    (response,) = sender.responses
    assert json.loads(response.value("error")[0]) == {"code": "UNAVAILABLE", "message": "full"}
    assert sender.num_finals == 1


@pytest.mark.parametrize("broken_sends", [{1}, {1, 2}, {2}, {2, 3}, {3}, {3, 4}])
@pytest.mark.parametrize("options", [STREAM, WHOLE])
def test_a_response_that_cannot_be_sent_ends_the_request(options: ResponseOptions, broken_sends: set[int]) -> None:
    sender = ResponseSender(frozenset(broken_sends))
    both = responders(sender, 2, options)
    for output in (chunk("a"), DONE):
        for responder in both:
            responder.output(output)
    assert sender.num_finals == 1
    assert all(responder.finished for responder in both)


@contextmanager
def running(scripts: dict[str, Script]) -> Iterator[EngineLoop]:
    loop = EngineLoop(ScriptedEngine(scripts))
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()


def submit(loop: EngineLoop, name: str, num_choices: int, options: ResponseOptions = STREAM) -> ResponseSender:
    sender = ResponseSender()
    asked = replace(request(num_choices), request_id=f"{name} {num_choices}", prompt=Prompt(text=name))
    loop.submit(FakePrepared(asked, 7), *responders(sender, num_choices, options))
    return sender


def is_empty(loop: EngineLoop) -> bool:
    deadline = time.monotonic() + 10
    while loop._live or loop._engine.has_work():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_a_client_that_leaves_ends_all_choices() -> None:
    with running({"endless": [chunk("a ")]}) as loop:
        sender = submit(loop, "endless", 4)
        sender.wait_for_first()
        sender.cancelled = True
        sender.wait()
        assert is_empty(loop)
    assert {r.value("choice_index")[0] for r in sender.responses if r.value("finish_reason") == ["cancelled"]} == {
        *range(4)
    }
    assert sender.num_finals == 1


def test_choices_that_nobody_wants_any_more_are_cancelled_in_the_engine() -> None:
    with running({"endless": [chunk("a ")]}) as loop:
        sender = submit(loop, "endless", 3)
        sender.wait_for_first()
        loop._engine._left["endless 3#1"].append(StepOutput(request_id="", error=InternalError("boom")))
        assert sender.wait()[-1].error().code() == "INTERNAL"
        assert is_empty(loop)


def test_a_refusal_of_the_engine_is_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with running({"one": [DONE]}) as loop:
        refused = submit(loop, "unknown script", 3)
        assert refused.wait()[0].error().code() == "INTERNAL"

        def refuse(prepared: FakePrepared) -> None:
            raise InvalidRequestError("n: too many")

        monkeypatch.setattr(loop._engine, "add", refuse)
        also = submit(loop, "one", 2)
        assert also.wait()[0].error().message() == "[INVALID_ARG] n: too many"
        assert is_empty(loop)
    assert [sender.num_finals for sender in (refused, also)] == [1, 1]
    assert [len(sender.responses) for sender in (refused, also)] == [1, 1]


outputs = st.sampled_from([chunk("x "), chunk(), DONE, StepOutput(request_id="", error=InternalError("boom"))])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(outputs, max_size=4),
    st.integers(1, 5),
    st.sampled_from([STREAM, WHOLE]),
    st.booleans(),
    st.frozensets(st.integers(1, 6), max_size=1),  # a send that fails
)
def test_each_request_gets_exactly_one_final(
    script: list[StepOutput], num_choices: int, options: ResponseOptions, cancelled: bool, broken: frozenset[int]
) -> None:
    sender = ResponseSender(broken)
    sender.cancelled = cancelled
    asked = replace(request(num_choices), prompt=Prompt(text="script"))
    with running({"script": script}) as loop:
        loop.submit(FakePrepared(asked, 7), *responders(sender, num_choices, options))
        time.sleep(0.01)
        assert set(loop._live) <= set(choice_ids(asked))
    sender.wait()
    assert sender.num_finals == 1
