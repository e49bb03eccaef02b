# SPDX-License-Identifier: Apache-2.0
"""Outputs of rounds to responses: deltas or one answer, columns on request, one FINAL."""

import json

import numpy as np
import pytest
from fakes.engine import chunk
from fakes.pb_utils import ResponseSender
from tandem_backend.errors import InternalError, UnavailableError
from tandem_backend.serving.request import RETURN_INPUTS, ResponseOptions
from tandem_backend.serving.response import Ended, Responder
from tandem_backend.types import FinishReason, PromptLogprob, RequestStats, StepOutput

ROUNDS = [chunk("Hello "), chunk(), chunk("brave new "), chunk("world", finish_reason=FinishReason.STOP)]
PERF = ResponseOptions(return_perf_metrics=True)
EVERYTHING = dict.fromkeys(RETURN_INPUTS, True)


def answer(rounds: list[StepOutput], options: ResponseOptions) -> ResponseSender:
    sender = ResponseSender()
    responder = Responder(sender, options, num_prompt_tokens=7)
    for output in rounds:
        responder.output(output)
    assert responder.finished
    assert sender.num_finals == 1
    return sender


def test_streaming_sends_what_each_round_gave() -> None:
    sender = answer(ROUNDS, ResponseOptions(stream=True))
    assert [response.value("text_output") for response in sender.responses] == [["Hello "], ["brave new "], ["world"]]


def test_without_streaming_there_is_one_response_with_the_prompt_before_it() -> None:
    sender = answer(ROUNDS, ResponseOptions(echo="Say: "))
    assert [response.value("text_output") for response in sender.responses] == [["Say: Hello brave new world"]]


def test_nothing_is_returned_that_was_not_asked_for() -> None:
    (response,) = answer(ROUNDS, ResponseOptions()).responses
    assert [tensor.name() for tensor in response.output_tensors()] == ["text_output"]


def test_streamed_columns_are_deltas_and_the_running_logprob() -> None:
    first, second, last = answer(ROUNDS, ResponseOptions(stream=True, **EVERYTHING)).responses
    assert [r.value("finish_reason") for r in (first, second, last)] == [["None"], ["None"], ["stop"]]
    assert [r.value("num_output_tokens") for r in (first, second, last)] == [[1], [2], [1]]
    assert [r.value("num_input_tokens") for r in (first, second, last)] == [[7], [7], [7]]
    assert [r.value("cumulative_logprob") for r in (first, second, last)] == [[-0.5], [-1.5], [-2.0]]
    assert second.value("token_ids") == [0, 1]
    assert json.loads(second.value("logprobs")[0]) == [
        {"token_id": 0, "logprob": -0.5},
        {"token_id": 1, "logprob": -0.5},
    ]


def test_one_answer_has_the_same_columns_in_sum() -> None:
    (response,) = answer(ROUNDS, ResponseOptions(**EVERYTHING)).responses
    assert response.value("num_output_tokens") == [4]
    assert response.value("token_ids") == [0, 0, 1, 0]
    assert response.value("cumulative_logprob") == [-2.0]
    assert len(json.loads(response.value("logprobs")[0])) == 4


def test_the_cost_stands_on_the_last_response() -> None:
    stats = RequestStats(
        num_cached_tokens=5,
        num_output_tokens=10,
        num_rounds=5,
        num_decode_rounds=4,
        num_draft_tokens=8,
        num_accepted_tokens=6,
        drafter_tokens={"lookup": (2, 0), "mtp": (6, 6)},
        arrival_time_ns=1_700_000_000_123_456_789,
    )
    rounds = [chunk("a"), chunk("b", finish_reason=FinishReason.LENGTH, stats=stats)]
    first, last = answer(rounds, ResponseOptions(stream=True, return_perf_metrics=True)).responses
    assert first.value("acceptance_rate") is None
    assert last.value("acceptance_rate") == [0.75]
    assert (last.value("total_accepted_draft_tokens"), last.value("total_draft_tokens")) == ([6], [8])
    assert last.value("arrival_time_ns") == [1_700_000_000_123_456_789]
    assert (last.value("num_rounds"), last.value("num_cached_tokens")) == ([5], [5])
    assert last.value("acceptance_length") == [2.25]  # the first token is the prompt pass's
    assert json.loads(last.value("drafter_statistics")[0]) == {
        "lookup": {"drafted": 2, "accepted": 0, "share": 0.0},
        "mtp": {"drafted": 6, "accepted": 6, "share": 1.0},
    }


def test_logprobs_come_with_the_likeliest_tokens_where_they_are_there() -> None:
    tops = (((3, -0.25), (9, -2.0)),)
    rounds = [chunk("a", top_logprobs=tops), chunk("b", top_logprobs=tops, finish_reason=FinishReason.STOP)]
    (response,) = answer(rounds, ResponseOptions(return_logprobs=True)).responses
    top = [{"token_id": 3, "logprob": -0.25}, {"token_id": 9, "logprob": -2.0}]
    assert json.loads(response.value("logprobs")[0]) == [{"token_id": 0, "logprob": -0.5, "top_logprobs": top}] * 2


def test_prompt_logprobs_come_once_with_the_first_response() -> None:
    prompt = (None, PromptLogprob(5, -1.5, ((5, -1.5),)))
    rounds = [chunk("a", prompt_logprobs=prompt), chunk("b", finish_reason=FinishReason.STOP)]
    first, last = answer(rounds, ResponseOptions(stream=True)).responses
    assert json.loads(first.value("prompt_logprobs")[0]) == [
        None,
        {"token_id": 5, "logprob": -1.5, "top_logprobs": [{"token_id": 5, "logprob": -1.5}]},
    ]
    assert last.value("prompt_logprobs") is None


def test_the_seed_of_a_sampled_answer_stands_with_its_cost() -> None:
    stats = RequestStats(seed=2**64 - 1)
    (response,) = answer([chunk("a", finish_reason=FinishReason.STOP, stats=stats)], PERF).responses
    assert response.value("seed") == [2**64 - 1]
    (response,) = answer([chunk("a", finish_reason=FinishReason.STOP, stats=RequestStats())], PERF).responses
    assert response.value("seed") is None


def test_a_request_that_drafted_nothing_has_figures_too() -> None:
    stats = RequestStats(num_output_tokens=1, num_rounds=1, drafter_tokens={"mtp": (2, 0)})
    (response,) = answer([chunk("a", finish_reason=FinishReason.STOP, stats=stats)], PERF).responses
    assert response.value("acceptance_length") == response.value("acceptance_rate") == [0.0]
    assert json.loads(response.value("drafter_statistics")[0])["mtp"]["share"] == 0.0


@pytest.mark.parametrize(
    ("last", "broken_sends", "outcome"),
    [
        (chunk("a", finish_reason=FinishReason.LENGTH), (), "length"),
        (chunk("a", finish_reason=FinishReason.CANCELLED), (), "cancelled"),
        (StepOutput(request_id="", error=UnavailableError("full")), (), "error"),
        (chunk("a", finish_reason=FinishReason.STOP), (2,), "error"),
        (chunk("a", finish_reason=FinishReason.STOP), (2, 3), "error"),
    ],
)
def test_the_outcome_is_told_once(last: StepOutput, broken_sends: tuple[int, ...], outcome: str) -> None:
    told: list[Ended] = []
    responder = Responder(ResponseSender(frozenset(broken_sends)), ResponseOptions(stream=True), 1, told.append)
    responder.output(chunk("a"))
    assert told == []
    for output in (last, last):
        responder.output(output)
    assert [ended.outcome for ended in told] == [outcome]
    assert (told[0].error is not None) == (outcome == "error")


def test_outputs_have_the_types_of_config_pbtxt() -> None:
    (response,) = answer(ROUNDS, ResponseOptions(**EVERYTHING)).responses
    types = {tensor.name(): tensor.as_numpy().dtype for tensor in response.output_tensors()}
    assert types["cumulative_logprob"] == np.float32
    assert types["num_input_tokens"] == types["num_output_tokens"] == np.uint32
    assert types["token_ids"] == np.int32
    assert types["text_output"] == types["finish_reason"] == types["logprobs"] == np.object_


def test_an_error_after_the_first_token_is_an_error_response() -> None:
    rounds = [chunk("a"), StepOutput(request_id="", error=UnavailableError("out of memory"))]
    first, last = answer(rounds, ResponseOptions(stream=True)).responses
    assert first.value("text_output") == ["a"]
    assert (last.error().message(), last.error().code()) == ("[UNAVAILABLE] out of memory", "UNAVAILABLE")


def test_what_comes_after_the_end_is_dropped() -> None:
    sender = ResponseSender()
    responder = Responder(sender)
    responder.output(chunk("a", finish_reason=FinishReason.STOP))
    responder.output(chunk("b"))
    responder.fail(InternalError("late"))
    assert len(sender.responses) == sender.num_finals == 1


def test_a_response_that_cannot_be_sent_ends_the_request() -> None:
    sender = ResponseSender(broken_sends=frozenset({2}))
    responder = Responder(sender, ResponseOptions(stream=True))
    responder.output(chunk("a"))
    responder.output(chunk("b"))
    assert responder.finished
    assert sender.num_finals == 1
    assert "shared memory" in sender.responses[-1].error().message()


def test_the_client_is_released_even_if_the_error_cannot_be_sent(log: list[str]) -> None:
    sender = ResponseSender(broken_sends=frozenset({1, 2}))
    Responder(sender).output(chunk("a", finish_reason=FinishReason.STOP))
    assert (sender.num_finals, sender.responses) == (1, [])
    dead = ResponseSender(broken_sends=frozenset({1, 2, 3}))
    Responder(dead).output(chunk("a", finish_reason=FinishReason.STOP))
    assert any("could not be finished" in line for line in log)


def test_an_answer_that_can_not_be_read_still_ends() -> None:
    class Broken:
        def push(self, text: str) -> None:
            raise ValueError("an odd tool call")

    sender = ResponseSender()
    responder = Responder(sender, ResponseOptions(stream=True), reader=Broken())
    responder.output(ROUNDS[0])
    responder.output(ROUNDS[-1])
    assert sender.num_finals == 1
    assert "an odd tool call" in sender.responses[-1].error().message()


def test_logprobs_say_what_tokens_stand_for_where_asked() -> None:
    tops = (((0, -0.5), (1, -0.75)),)
    rounds = [chunk("a", top_logprobs=tops, finish_reason=FinishReason.STOP)]
    sender = ResponseSender()
    options = ResponseOptions(return_logprobs=True, logprobs_bytes=True)
    responder = Responder(sender, options, token_bytes=lambda token_id: bytes([0xE2, token_id]))
    for output in rounds:
        responder.output(output)
    (entry,) = json.loads(sender.responses[0].value("logprobs")[0])
    assert entry["bytes"] == [0xE2, 0]
    assert [each["bytes"] for each in entry["top_logprobs"]] == [[0xE2, 0], [0xE2, 1]]
