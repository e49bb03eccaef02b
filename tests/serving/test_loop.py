# SPDX-License-Identifier: Apache-2.0
"""The engine loop against scripted engines: every request ends in one FINAL, whatever happens to it."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
from fakes.engine import FakePrepared, Script, ScriptedEngine, chunk
from fakes.pb_utils import ResponseSender
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_backend.errors import InternalError, UnavailableError
from tandem_backend.serving import loop as loop_module
from tandem_backend.serving.loop import EngineLoop, Report
from tandem_backend.serving.request import ResponseOptions
from tandem_backend.serving.response import Responder
from tandem_backend.types import EngineCounters, FinishReason, Prompt, Request, SequenceId, StepOutput

DONE = chunk("end", finish_reason=FinishReason.STOP)
FAILED = StepOutput(request_id="", error=InternalError("the round failed"))
ENDLESS = [chunk("a ")]  # then nothing until it is cancelled
STREAM = ResponseOptions(stream=True, return_finish_reason=True)


class Harness:
    """A running loop and the senders of what was submitted to it."""

    def __init__(self, scripts: dict[str, Script], report: Report | None = None) -> None:
        self.engine = ScriptedEngine(scripts)
        self.loop = EngineLoop(self.engine, report)
        self.senders: dict[str, ResponseSender] = {}

    def submit(
        self,
        name: str,
        *,
        sequence_id: SequenceId | None = None,
        start: bool = False,
        broken_sends: frozenset[int] = frozenset(),
    ) -> ResponseSender:
        request = Request(
            request_id=f"{len(self.senders)}-{name}",
            prompt=Prompt(text=name),
            sequence_id=sequence_id,
            sequence_start=start,
        )
        sender = self.senders[request.request_id] = ResponseSender(broken_sends)
        self.loop.submit(FakePrepared(request, 1), Responder(sender, STREAM))
        return sender

    def close(self, sequence_id: SequenceId) -> ResponseSender:
        sender = self.senders[f"close-{len(self.senders)}"] = ResponseSender()
        self.loop.close_sequence(sequence_id, f"close-{len(self.senders)}", Responder(sender, STREAM))
        return sender


@contextmanager
def running(scripts: dict[str, Script], report: Report | None = None) -> Iterator[Harness]:
    harness = Harness(scripts, report)
    harness.loop.start()
    try:
        yield harness
    finally:
        harness.loop.stop()


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def reason(sender: ResponseSender) -> str:
    return sender.wait()[-1].value("finish_reason")[0]


def test_requests_stream_side_by_side() -> None:
    with running({"one": [chunk("a "), chunk("b "), DONE], "two": [chunk("c "), DONE]}) as harness:
        one, two = harness.submit("one"), harness.submit("two")
        one.wait()
        two.wait()
    assert (one.text(), two.text()) == ("a b end", "c end")
    assert (one.num_finals, two.num_finals) == (1, 1)


def test_a_cancelled_request_is_cancelled_in_the_engine_and_others_go_on() -> None:
    with running({"endless": ENDLESS, "long": [*[chunk("x")] * 300, DONE]}) as harness:
        cancelled, other = harness.submit("endless"), harness.submit("long")
        wait_until(lambda: cancelled.responses)
        cancelled.cancelled = True
        assert reason(cancelled) == "cancelled"
        assert other.num_finals == 0
        other.wait()
    assert other.text() == "x" * 300 + "end"


def test_nothing_but_the_end_is_sent_to_a_client_that_has_gone() -> None:
    sender = ResponseSender()
    sender.cancelled = True
    loop = EngineLoop(ScriptedEngine({}))
    request = Request(request_id="1", prompt=Prompt(text="x"))
    loop.submit(FakePrepared(request, 1), Responder(sender, STREAM))
    loop._poll_cancelled()
    for output in (chunk("late"), chunk(finish_reason=FinishReason.CANCELLED)):
        loop._deliver(replace(output, request_id="1"))
    assert (sender.text(), len(sender.responses), sender.num_finals) == ("", 1, 1)


def test_closing_a_sequence_cancels_it_and_is_answered() -> None:
    with running({"endless": ENDLESS}) as harness:
        running_turn = harness.submit("endless", sequence_id="s", start=True)
        wait_until(lambda: running_turn.responses)
        closed = harness.close("s")
        assert reason(closed) == "cancelled"
        assert closed.text() == ""
        assert reason(running_turn) == "cancelled"
        assert reason(harness.close("never opened")) == "cancelled"


def test_an_error_of_add_goes_to_that_request_only() -> None:
    with running({"one": [DONE]}) as harness:
        refused = harness.submit("one", sequence_id="unknown")
        unscripted = harness.submit("nothing is scripted for this")
        fine = harness.submit("one")
        fine.wait()
        assert refused.wait()[0].error().code() == "INVALID_ARG"
        assert "sequence_id" in refused.responses[0].error().message()
        assert unscripted.wait()[0].error().code() == "INTERNAL"
    assert fine.text() == "end"


def test_an_engine_that_raises_fails_what_runs_and_goes_on(log: list[str]) -> None:
    with running({"bad": [chunk("a"), ValueError("boom")], "endless": ENDLESS, "good": [DONE]}) as harness:
        bad, beside = harness.submit("bad"), harness.submit("endless")
        for sender in (bad, beside):
            error = sender.wait()[-1].error()
            assert (error.code(), "boom" in error.message()) == ("INTERNAL", True)
        after = harness.submit("good")
        after.wait()
    assert after.text() == "end"
    assert [sender.num_finals for sender in (bad, beside, after)] == [1, 1, 1]


def test_failures_in_a_row_end_the_loop_and_its_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "REPORT_INTERVAL_S", 0.02)
    reports: list[float] = []
    unloaded = threading.Event()
    harness = Harness({"bad": [ValueError("boom")], "good": [DONE], "endless": ENDLESS})
    harness.loop = EngineLoop(harness.engine, lambda *_: reports.append(0), on_broken=unloaded.set)
    harness.loop.start()
    for _ in range(2):
        harness.submit("bad").wait()
    harness.engine.health.went_well()
    for _ in range(2):
        harness.submit("bad").wait()
    harness.submit("good").wait()  # two failures are not three
    harness.submit("bad").wait()
    assert unloaded.wait(10)
    with pytest.raises(UnavailableError, match=r"^the engine failed 3 times in a row; the model must be loaded again$"):
        harness.submit("endless")
    num_reports = len(reports)
    time.sleep(0.2)
    assert len(reports) <= num_reports + 1  # one may have been on its way
    harness.loop.stop()


def test_requests_on_their_way_to_a_broken_engine_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with running({"bad": [ValueError("boom")], "endless": ENDLESS}) as harness:
        harness.engine.health.max_failed_rounds = 1
        submitted = threading.Event()
        abandon = harness.loop._abandon

        def abandon_and_wait(error: Exception) -> None:
            abandon(error)
            assert submitted.wait(10)

        monkeypatch.setattr(harness.loop, "_abandon", abandon_and_wait)
        harness.submit("bad").wait()
        late = harness.submit("endless")
        submitted.set()
        error = late.wait()[0].error()
        assert (error.code(), late.num_finals) == ("UNAVAILABLE", 1)


def test_a_client_that_cannot_be_answered_stops_its_generation() -> None:
    with running({"endless": ENDLESS}) as harness:
        sender = harness.submit("endless", broken_sends=frozenset({1}))
        assert "shared memory" in sender.wait()[0].error().message()
        wait_until(lambda: not harness.engine.has_work())


def test_stop_answers_what_is_left_and_refuses_more() -> None:
    with running({"endless": ENDLESS}) as harness:
        senders = [harness.submit("endless") for _ in range(5)]
        wait_until(lambda: all(sender.responses for sender in senders))
        started = time.monotonic()
        harness.loop.stop()
        assert time.monotonic() - started < 2
        for sender in senders:
            assert sender.wait()[-1].error().code() == "UNAVAILABLE"
            assert sender.num_finals == 1
        with pytest.raises(UnavailableError):
            harness.submit("endless")


def test_stop_is_bounded_when_the_engine_hangs() -> None:
    harness = Harness({"hangs": []})
    harness.engine.step = lambda: time.sleep(3) or []  # type: ignore[method-assign]
    harness.loop.start()
    sender = harness.submit("hangs")
    wait_until(harness.engine.has_work)
    started = time.monotonic()
    harness.loop.stop(timeout_s=0.4)
    assert time.monotonic() - started < 1
    assert sender.wait()[0].error().code() == "UNAVAILABLE"


def test_idle_sessions_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "SWEEP_INTERVAL_S", 0.01)
    with running({}) as harness:
        wait_until(lambda: harness.engine.num_sweeps > 2)


def test_the_engine_is_reported_busy_and_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "REPORT_INTERVAL_S", 0.03)
    reports: list[tuple[float, int, str]] = []

    def report(statistics: Mapping[str, float], counters: EngineCounters) -> None:
        thread = threading.current_thread().name
        reports.append((statistics["num_active"], counters.num_rounds, thread))
        if len(reports) == 2:
            raise ValueError("a metric that can't be written")

    with running({"endless": ENDLESS}, report) as harness:
        endless = harness.submit("endless")
        wait_until(lambda: len([active for active, *_ in reports if active == 1]) > 3)
        endless.cancelled = True
        endless.wait()
        wait_until(lambda: reports[-1][0] == 0)
    assert {thread for *_, thread in reports} == {"sender"}
    rounds = [number for _, number, _ in reports]
    assert rounds == sorted(rounds)
    assert rounds[-1] > rounds[0]


def test_a_sender_that_blocks_holds_up_no_round() -> None:
    with running({"blocked": [chunk("a "), DONE], "endless": ENDLESS}) as harness:
        may_send = threading.Event()
        sender = harness.submit("blocked")
        send, sender.send = sender.send, lambda *args, **flags: may_send.wait(20) and send(*args, **flags)
        harness.submit("endless").cancelled = True
        before = harness.engine.num_rounds
        wait_until(lambda: harness.engine.num_rounds > before + 100)
        may_send.set()
        assert sender.wait()
        assert sender.text() == "a end"


outputs = st.sampled_from([chunk("x "), chunk(), DONE, FAILED, ValueError("boom")])
requests = st.tuples(
    st.lists(outputs, max_size=4),
    st.sampled_from([None, "s", "t"]),  # sequence id
    st.booleans(),  # START
    st.booleans(),  # cancelled by the client
    st.frozensets(st.integers(1, 3), max_size=1),  # a send that fails
)


@settings(max_examples=40, deadline=None)
@given(st.lists(requests, max_size=5), st.lists(st.sampled_from(["s", "t"]), max_size=2))
def test_each_request_gets_exactly_one_final(
    plan: list[tuple[Script, SequenceId | None, bool, bool, frozenset[int]]], closings: list[SequenceId]
) -> None:
    with running({str(number): item[0] for number, item in enumerate(plan)}) as harness:
        for number, (_, sequence_id, start, cancelled, broken_sends) in enumerate(plan):
            sender = harness.submit(str(number), sequence_id=sequence_id, start=start, broken_sends=broken_sends)
            sender.cancelled = cancelled
        for sequence_id in closings:
            harness.close(sequence_id)
        time.sleep(0.01)
    for sender in harness.senders.values():
        sender.wait()
        assert sender.num_finals == 1


def test_draining_lets_requests_end_and_answers_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "SWEEP_INTERVAL_S", 0.1)  # so long an idle engine may wait before it flushes
    scripts = {"short": [chunk("a "), *[chunk("b ")] * 20, DONE], "endless": ENDLESS}
    with running(scripts) as harness:
        short, endless = harness.submit("short"), harness.submit("endless")
        endless.wait_for_first()
        harness.loop.drain(0.5)
        with pytest.raises(UnavailableError, match="shutting down"):
            harness.submit("short")
        assert reason(short) == "stop"
        assert endless.num_finals == 0
        error = endless.wait()[-1].error()
        assert (error.code(), endless.num_finals) == ("UNAVAILABLE", 1)
        assert "exit timeout" in error.message()
        wait_until(lambda: not harness.engine.has_work())
        wait_until(lambda: harness.engine.num_flushes == 1)
        assert not harness.engine.is_closed
