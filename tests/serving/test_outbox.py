# SPDX-License-Identifier: Apache-2.0
"""What the sender is handed, and when: the first and the last output at once, what comes between joined."""

import threading
import time
from dataclasses import replace

import pytest
from fakes.engine import chunk
from tandem_backend.errors import InternalError
from tandem_backend.serving import outbox as outbox_module
from tandem_backend.serving.outbox import Outbox
from tandem_backend.types import FinishReason, RequestStats, StepOutput

ERROR = StepOutput(request_id="", error=InternalError("the round failed"))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.spent = 0.0  # by the thread

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.spent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(outbox_module, "time", clock)
    return clock


def put(outbox: Outbox, request_id: str, *outputs: StepOutput) -> None:
    outbox.put(replace(output, request_id=request_id) for output in outputs)


def texts(outbox: Outbox, clock: Clock) -> list[str]:
    taken = outbox.take(clock.now)
    assert taken is not None
    return [output.text for output in taken[0]]


def test_outputs_between_the_first_and_the_last_wait_for_the_interval(clock: Clock) -> None:
    outbox = Outbox(0.02)
    outbox.open("1", is_streaming=True)
    put(outbox, "1", chunk("a "))
    assert texts(outbox, clock) == ["a "]
    put(outbox, "1", chunk("b "))
    clock.now += 0.01
    put(outbox, "1", chunk("c d "))
    assert texts(outbox, clock) == []
    clock.now += 0.011
    assert texts(outbox, clock) == ["b c d "]
    put(outbox, "1", chunk("e", finish_reason=FinishReason.STOP))
    assert texts(outbox, clock) == ["e"]
    clock.now += 1
    put(outbox, "1", chunk("after the last"))
    assert texts(outbox, clock) == []


def test_an_interval_of_nothing_hands_over_every_round(clock: Clock) -> None:
    outbox = Outbox(0.0)
    outbox.open("1", is_streaming=True)
    for text in ("a", "b", "c"):
        put(outbox, "1", chunk(text))
        assert texts(outbox, clock) == [text]


def test_a_request_that_does_not_stream_is_handed_over_whole(clock: Clock) -> None:
    outbox = Outbox(0.02)
    outbox.open("1", is_streaming=False)
    put(outbox, "1", chunk("a "), chunk("b "))
    clock.now += 100
    assert texts(outbox, clock) == []
    stats = RequestStats(num_rounds=3)
    put(outbox, "1", chunk("c", finish_reason=FinishReason.LENGTH, stats=stats))
    taken = outbox.take(clock.now)
    assert taken is not None
    (output,) = taken[0]
    assert (output.text, output.token_ids, output.logprobs) == ("a b c", (0, 0, 0), (-0.5,) * 3)
    assert (output.finish_reason, output.stats) == (FinishReason.LENGTH, stats)


def test_what_was_given_before_an_error_is_not_lost(clock: Clock) -> None:
    outbox = Outbox(10.0)
    outbox.open("1", is_streaming=True)
    put(outbox, "1", chunk("a "))
    assert texts(outbox, clock) == ["a "]
    put(outbox, "1", chunk("b "), chunk("c "), ERROR)
    taken = outbox.take(clock.now)
    assert taken is not None
    assert [(output.text, output.error) for output in taken[0]] == [("b c ", None), ("", ERROR.error)]


def test_streams_of_one_round_stay_in_step(clock: Clock) -> None:
    """One waking of the sender serves all of them."""
    outbox = Outbox(0.02)
    for request_id in ("1", "2"):
        outbox.open(request_id, is_streaming=True)
        put(outbox, request_id, chunk(request_id))
    assert texts(outbox, clock) == ["1", "2"]
    clock.now += 0.021
    for request_id in ("1", "2"):
        put(outbox, request_id, chunk(request_id * 2))
    assert texts(outbox, clock) == ["11", "22"]


@pytest.mark.parametrize(("cost_ms", "interval_ms"), [(0.035, 20), (0.14, 80), (5, 100)])
def test_responses_are_further_apart_where_sending_them_is_dear(
    clock: Clock, cost_ms: float, interval_ms: float
) -> None:
    """Four streams: at 20 ms apart 0.035 ms a response is 0.7 % of a core, 0.14 ms is 2.8 %; five times at most."""
    outbox = Outbox(0.02)
    streams = ("1", "2", "3", "4")
    for request_id in streams:
        outbox.open(request_id, is_streaming=True)
    for _ in range(60):  # until its mean has settled
        for request_id in streams:
            put(outbox, request_id, chunk("x"))
        clock.now += 1
        clock.spent += cost_ms / 1e3 * len(texts(outbox, clock))
    for request_id in streams:
        put(outbox, request_id, chunk("y"))
    clock.now += interval_ms / 1e3 - 0.001
    assert texts(outbox, clock) == []
    clock.now += 0.002
    assert texts(outbox, clock) == ["y"] * 4


def test_a_call_makes_no_response_look_dear(clock: Clock) -> None:
    outbox = Outbox(0.02)
    outbox.open("1", is_streaming=True)
    for _ in range(60):
        put(outbox, "1", chunk("x"))
        outbox.call(lambda: None)
        clock.now += 1
        assert texts(outbox, clock) == ["x"]
        clock.spent += 0.01
    put(outbox, "1", chunk("y"))
    clock.now += 0.021
    assert texts(outbox, clock) == ["y"]


def test_closing_hands_over_what_is_left(clock: Clock) -> None:
    outbox = Outbox(10.0)
    for request_id, is_streaming in (("1", True), ("2", False)):
        outbox.open(request_id, is_streaming=is_streaming)
    put(outbox, "1", chunk("a "))
    assert texts(outbox, clock) == ["a "]
    put(outbox, "1", chunk("b "))
    put(outbox, "2", chunk("c "))
    outbox.close()
    assert texts(outbox, clock) == ["b ", "c "]
    assert outbox.take(clock.now) is None


def test_a_sleeping_sender_is_woken_by_what_is_urgent_only() -> None:
    outbox = Outbox(1000.0)
    outbox.open("1", is_streaming=True)
    arrived: list[str] = []

    def send() -> None:
        while (taken := outbox.take(time.monotonic() + 1000)) is not None:
            arrived.extend(output.text for output in taken[0])
            for call in taken[1]:
                call()

    thread = threading.Thread(target=send)
    thread.start()
    for expected, outputs in (
        (["a "], [chunk("a ")]),
        (["a ", "b c"], [chunk("b "), chunk("c", finish_reason="stop")]),
    ):
        for output in outputs:
            put(outbox, "1", output)
        deadline = time.monotonic() + 10
        while arrived != expected:
            assert time.monotonic() < deadline, arrived
            time.sleep(0.002)
    called = threading.Event()
    outbox.call(called.set)
    assert called.wait(10)
    outbox.close()
    thread.join(10)
    assert not thread.is_alive()
