# SPDX-License-Identifier: Apache-2.0
"""Limits of a real Triton server with small ones: full queues, waiting, deadlines, priorities, many at once."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from small_server import LIMITS
from triton_calls import (
    EXACTLY,
    FULL_ANSWER,
    PROMPT,
    Answer,
    GrpcStream,
    ask,
    metrics,
    post,
    wait_until,
    wait_until_free,
)
from tritonclient.utils import InferenceServerException

# Longer than any test: what waits behind it is not let in by its end.
ENDLESS = {"text_input": PROMPT, "max_tokens": 4000, "sampling_parameters": '{"ignore_eos": true, "drafter": "none"}'}
SHORT = {"text_input": PROMPT, "max_tokens": 3, "sampling_parameters": EXACTLY}


@pytest.fixture(autouse=True)
def _nothing_is_left(small_server: Any) -> Iterator[None]:
    yield
    wait_until_free(small_server)


def sampling(**values: Any) -> str:
    return json.dumps({"ignore_eos": True, **values})


class Busy:
    """Endless streams that take up every running place."""

    def __init__(self, server: Any, stack: ExitStack) -> None:
        self.streams = [stack.enter_context(GrpcStream(server.grpc_url)) for _ in range(LIMITS["max_active"])]
        self.texts: list[Iterator[Any]] = []
        for stream in self.streams:
            stream.send(stream=True, **ENDLESS)
            self.texts.append(stream.responses())
            next(self.texts[-1])

    def free_one(self) -> None:
        self.streams.pop().cancel()


@pytest.fixture
def busy(small_server: Any) -> Iterator[Busy]:
    with ExitStack() as stack:
        yield Busy(small_server, stack)


def test_a_full_queue_answers_at_once_with_a_hint_and_disturbs_nobody(small_server: Any, busy: Busy) -> None:
    server = small_server
    with GrpcStream(server.grpc_url) as waiting:
        for n in range(LIMITS["max_queued"]):
            waiting.send(str(n), stream=True, **SHORT, **FULL_ANSWER)
        wait_until(lambda: metrics(server)["tandem_num_queued"] == LIMITS["max_queued"])
        with pytest.raises(
            InferenceServerException, match=r"\[UNAVAILABLE\] the queue is full \(2 waiting, 2 running\); "
        ):
            ask(server, **SHORT)
        status, reply = post(server.http_url, "generate", {"text_input": PROMPT})
        assert status == 400
        assert "[UNAVAILABLE] the queue is full" in reply["error"]
        assert "; retry after " in reply["error"]
        for text in busy.texts:
            next(text)
        busy.free_one()
        for n in range(LIMITS["max_queued"]):
            assert Answer(list(waiting.responses(str(n)))).num_output_tokens == 3


def test_waiting_for_too_long_ends_with_unavailable(small_server: Any, busy: Busy) -> None:
    with pytest.raises(
        InferenceServerException, match=r"\[UNAVAILABLE\] queue_timeout_s: waited for 8 s; retry after "
    ):
        ask(small_server, **SHORT)


@pytest.mark.parametrize("model", ["tandem", "tandem_generate"])
def test_a_deadline_ends_a_stream_with_what_it_has(small_server: Any, model: str) -> None:
    request = {"text_input": PROMPT, "max_tokens": 4000, "sampling_parameters": sampling(timeout_ms=400)}
    timed = ask(small_server, model=model, **request)
    assert timed.finish_reason == "timeout"
    assert 0 < timed.num_output_tokens < 4000
    whole = ask(small_server, text_input=PROMPT, max_tokens=timed.num_output_tokens, sampling_parameters=EXACTLY)
    assert (timed.text, timed.token_ids, timed.logprobs) == (whole.text, whole.token_ids, whole.logprobs)


def test_a_deadline_over_http_and_by_the_protocols_own_timeout(small_server: Any) -> None:
    body = {"text_input": PROMPT, "max_tokens": 4000, "ignore_eos": True, "return_finish_reason": True}
    status, reply = post(small_server.http_url, "generate", body | {"timeout_ms": 300})
    assert (status, reply["finish_reason"]) == (200, "timeout")
    assert len(reply["text_output"]) > len(PROMPT)
    with GrpcStream(small_server.grpc_url) as stream:
        for model in ("tandem", "tandem_generate"):
            stream.send(model, model=model, stream=True, timeout_us=300_000, **ENDLESS, **FULL_ANSWER)
            assert Answer(list(stream.responses(model))).finish_reason == "timeout"


def test_a_deadline_strikes_in_the_queue_too(small_server: Any, busy: Busy) -> None:
    started_s = time.monotonic()
    waited = ask(small_server, text_input=PROMPT, sampling_parameters=sampling(timeout_ms=200))
    assert (waited.finish_reason, waited.text, waited.token_ids) == ("timeout", "", [])
    assert time.monotonic() - started_s >= 0.2


def test_the_most_urgent_starts_first(small_server: Any, busy: Busy) -> None:
    with GrpcStream(small_server.grpc_url) as stream:
        for num_queued, priority in enumerate((9, 1), start=1):
            request = {"text_input": PROMPT, "max_tokens": 20, "sampling_parameters": sampling(priority=priority)}
            stream.send(str(priority), return_perf_metrics=True, **request)
            wait_until(lambda num_queued=num_queued: metrics(small_server)["tandem_num_queued"] == num_queued)
        busy.free_one()
        starts = {p: next(stream.responses(str(p))).first_scheduled_time_ns for p in (1, 9)}
        assert starts[1] < starts[9]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"timeout_ms": 0}, "timeout_ms: "),
        ({"priority": 10}, "priority: "),
        ({"priority": "high"}, "priority: "),
    ],
)
def test_wrong_values_are_refused_by_name(small_server: Any, values: dict[str, Any], text: str) -> None:
    with pytest.raises(InferenceServerException, match=rf"\[INVALID_ARG\] {text}"):
        ask(small_server, text_input=PROMPT, sampling_parameters=json.dumps(values))
    status, reply = post(small_server.http_url, "generate", {"text_input": PROMPT} | values)
    assert (status, f"[INVALID_ARG] {text}" in reply["error"]) == (400, True)


def test_a_long_prompt_and_short_chats_all_get_their_answer(server: Any) -> None:
    prompt = [40 + number % 1000 for number in range(2000)]
    with GrpcStream(server.grpc_url) as background, GrpcStream(server.grpc_url) as long, ExitStack() as stack:
        background.send(stream=True, **ENDLESS)
        next(background.responses())
        long.send(input_ids=prompt, max_tokens=4, sampling_parameters=EXACTLY, stream=True, **FULL_ANSWER)
        chats = [stack.enter_context(GrpcStream(server.grpc_url)) for _ in range(4)]
        for chat in chats:
            chat.send(stream=True, **SHORT, **FULL_ANSWER)
        answers = [Answer(list(chat.responses())) for chat in chats]
        assert answers == [ask(server, **SHORT)] * 4
        answer = Answer(list(long.responses()))
    assert answer == ask(server, input_ids=prompt, max_tokens=4, sampling_parameters=EXACTLY)


def test_a_front_without_a_place_refuses(small_server: Any, busy: Busy) -> None:
    """HTTP requests beyond every limit get an error each; none is left without an answer."""
    connections = []
    for _ in range(8):
        connection = http.client.HTTPConnection(small_server.http_url, timeout=30)
        body = {"text_input": PROMPT, "max_tokens": 2, "timeout_ms": 1500}
        connection.request("POST", "/v2/models/tandem_generate/generate", json.dumps(body))
        connections.append(connection)
    replies = [connection.getresponse() for connection in connections]
    texts = [reply.read().decode() for reply in replies]
    refused = [text for text in texts if "[UNAVAILABLE] the queue is full" in text]
    assert len(refused) == 8 - LIMITS["max_queued"]
    assert sorted(reply.status for reply in replies) == [200] * 2 + [400] * 6
