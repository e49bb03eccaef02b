# SPDX-License-Identifier: Apache-2.0
"""Who is let in, who starts when, and what becomes of those that wait or run for too long."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import VOCAB_SIZE, EngineDriver, Plain, beginning, engine_config, limit_blocks, num_different
from fakes.tiny_model import tiny_checkpoint
from session_requests import PARAMS, start, turn
from tandem_backend.errors import InvalidRequestError, UnavailableError
from tandem_backend.model.state import KV_BLOCK
from tandem_backend.types import FinishReason, Prompt, Request, SamplingParams, SessionEnd

ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True)


class Clock:
    """time.monotonic() of the engine, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


@pytest.fixture
def make(hybrid: Path) -> Callable[..., EngineDriver]:
    def make(**config: Any) -> EngineDriver:
        values = {"drafters": ("lookup", "mtp"), "router": "always", "kv_cache_bytes": 8 << 20} | config
        return EngineDriver(engine_config(hybrid, **values), poison=True)

    return make


def request(request_id: str, token_ids: tuple[int, ...] = (3, 4, 5), **values: Any) -> Request:
    return Request(request_id=request_id, prompt=Prompt(token_ids=token_ids), **{"params": PARAMS, **values})


def running(driver: EngineDriver) -> list[str]:
    return [generation.request.request_id for generation in driver.engine.scheduler.running]


def order_of_starts(driver: EngineDriver) -> list[str]:
    """Request ids in the order in which they start, until all are done."""
    started: list[str] = []
    while driver.engine.has_work():
        driver.step()
        started += [request_id for request_id in running(driver) if request_id not in started]
    return started


# The queue.


def test_a_full_queue_refuses_at_once_and_says_when_to_retry(make: Callable[..., EngineDriver], clock: Clock) -> None:
    driver = make(max_active=2, max_queued=1)
    driver.add(request("slow", params=ENDLESS))
    driver.step()
    clock.now_s += 12
    driver.engine.cancel("slow")
    for n in range(2):
        driver.add(request(str(n), params=ENDLESS))
    driver.step()
    driver.add(request("waits"))
    with pytest.raises(
        UnavailableError, match=r"^the queue is full \(1 waiting, 2 running\); retry after 6 s$"
    ) as info:
        driver.add(request("refused"))
    assert info.value.retry_after_s == 6  # a request took 12 s, and two run


def test_the_retry_hint_stays_within_a_minute(make: Callable[..., EngineDriver], clock: Clock) -> None:
    driver = make(max_active=1, max_queued=0)
    driver.add(request("1"))
    assert driver.engine.scheduler.waiting.retry_after_s(0) == 1
    driver.step()
    clock.now_s += 1e6
    driver.finish()
    assert driver.engine.scheduler.waiting.retry_after_s(1) == 60


def test_waiting_for_too_long_ends_with_unavailable(make: Callable[..., EngineDriver], clock: Clock) -> None:
    driver = make(max_active=1, queue_timeout_s=20.0)
    driver.add(request("runs", params=ENDLESS))
    driver.step()
    driver.add(request("first"))
    clock.now_s += 15
    driver.add(request("second"))
    driver.step()
    assert not driver.results["first"].is_finished
    clock.now_s += 5
    driver.step()
    error = driver.results["first"].error
    assert isinstance(error, UnavailableError)
    assert str(error).startswith("queue_timeout_s: waited for 20 s; retry after ")
    assert not driver.results["second"].is_finished
    assert not driver.results["runs"].is_finished  # the timeout is the queue's
    driver.engine.cancel("runs")
    driver.finish()
    assert driver.results["second"].finish_reason == FinishReason.LENGTH


def test_without_a_queue_timeout_requests_wait(make: Callable[..., EngineDriver], clock: Clock) -> None:
    driver = make(max_active=1, queue_timeout_s=0.0)
    driver.add(request("runs"))
    driver.step()
    driver.add(request("waits"))
    clock.now_s += 1e9
    driver.finish()
    assert driver.results["waits"].finish_reason == FinishReason.LENGTH


def test_the_most_urgent_starts_first_unless_another_came_long_before(
    make: Callable[..., EngineDriver], clock: Clock
) -> None:
    driver = make(max_active=1, priority_aging_s=10.0)
    driver.add(request("runs"))
    driver.step()
    driver.add(request("long ago", priority=9))
    clock.now_s += 45
    for priority in (6, 5, 1):
        driver.add(request(f"priority {priority}", priority=priority))
    # Priority 9 loses 40 s against 5 and 80 s against 1; it came 45 s before them.
    assert order_of_starts(driver) == ["runs", "priority 1", "long ago", "priority 5", "priority 6"]


def test_a_sequence_with_many_turns_does_not_hold_up_others(make: Callable[..., EngineDriver], clock: Clock) -> None:
    driver = make(max_active=1)
    driver.add(start("a0", sequence_id="a"))
    for n in range(1, 4):
        driver.add(turn(f"a{n}", (7,), sequence_id="a"))
    driver.add(request("b"))
    started: list[str] = []
    while driver.engine.has_work():
        clock.now_s += 1
        driver.step()
        started += [request_id for request_id in running(driver) if request_id not in started]
    assert started == ["a0", "b", "a1", "a2", "a3"]


def test_turns_keep_their_order_whatever_their_priority(make: Callable[..., EngineDriver]) -> None:
    driver = make()
    driver.add(start("1"))
    driver.add(turn("2", (8,), sequence_id=1))
    urgent = turn("3", (9,), sequence_id=1)
    driver.add(Request(**{name: getattr(urgent, name) for name in urgent.__slots__} | {"priority": 1}))
    assert order_of_starts(driver) == ["1", "2", "3"]


# Memory.


def test_the_worst_case_is_reserved_before_a_request_starts(make: Callable[..., EngineDriver], plain: Plain) -> None:
    """Two requests that could not both grow to their end run one after the other, though both fit at first."""
    driver = make(max_active=4)
    limit_blocks(driver.engine, 5)
    params = SamplingParams(max_tokens=3 * KV_BLOCK - 3, ignore_eos=True)
    for n in range(2):
        driver.add(request(str(n), params=params))
    driver.step()
    assert running(driver) == ["0"]
    driver.engine.cancel("0")
    driver.step()
    assert running(driver) == ["1"]
    driver.engine.cancel("1")
    driver.finish()
    assert num_different(driver.results["1"], beginning(plain.run((3, 4, 5), params), 1)) == 0


def test_who_is_first_waits_for_memory_and_nobody_passes(make: Callable[..., EngineDriver]) -> None:
    driver = make(max_active=4)
    limit_blocks(driver.engine, 5)
    driver.add(request("runs", params=SamplingParams(max_tokens=2 * KV_BLOCK - 3, ignore_eos=True)))
    driver.step()
    driver.add(request("large", params=SamplingParams(max_tokens=4 * KV_BLOCK - 3, ignore_eos=True)))
    driver.add(request("small"))
    driver.step()
    assert running(driver) == ["runs"]
    driver.engine.cancel("runs")
    driver.step()
    assert running(driver) == ["large", "small"]


# Deadlines.


def test_a_deadline_ends_a_running_request_with_what_it_has(
    make: Callable[..., EngineDriver], plain: Plain, clock: Clock
) -> None:
    driver = make(drafters=())
    driver.add(request("1", params=ENDLESS, timeout_ms=1500))
    driver.add(request("mate", timeout_ms=60_000))
    for _ in range(3):
        driver.step()
    clock.now_s += 1.5
    driver.finish()
    result = driver.results["1"]
    assert result.finish_reason == FinishReason.TIMEOUT
    assert num_different(result, beginning(plain.run((3, 4, 5), PARAMS), 3)) == 0
    assert result.stats is not None
    assert result.stats.num_output_tokens == 3
    assert driver.results["mate"].finish_reason == FinishReason.LENGTH


def test_a_deadline_counts_from_arrival_and_strikes_in_the_queue_too(
    make: Callable[..., EngineDriver], clock: Clock
) -> None:
    driver = make(max_active=1)
    driver.add(request("runs", params=ENDLESS))
    driver.step()
    driver.add(request("waits", timeout_ms=100))
    clock.now_s += 0.1
    driver.step()
    result = driver.results["waits"]
    assert (result.finish_reason, result.token_ids, result.text) == (FinishReason.TIMEOUT, [], "")
    assert running(driver) == ["runs"]


def test_a_turn_that_ran_out_of_time_leaves_its_session_to_go_on(
    make: Callable[..., EngineDriver], plain: Plain, clock: Clock
) -> None:
    driver = make(drafters=("mtp",))
    first = start("1", params=ENDLESS)
    driver.add(Request(**{name: getattr(first, name) for name in first.__slots__} | {"timeout_ms": 1000}))
    for _ in range(3):
        driver.step()
    clock.now_s += 1
    driver.finish()
    given = driver.results["1"].token_ids
    assert driver.results["1"].finish_reason == FinishReason.TIMEOUT
    assert num_different(driver.run(turn("2", (8,))), plain.run((5, 6, 7, *given, 8), PARAMS)) == 0


def test_a_deadline_gives_out_the_text_that_was_held_back(text_model: Path, clock: Clock) -> None:
    """The end of a text that may become a stop string is held back; when time is up it is text like any other."""
    whole = EngineDriver(engine_config(text_model)).run(request("whole", (5, 6, 7), params=PARAMS))
    held = whole.text[-1]
    driver = EngineDriver(engine_config(text_model))
    params = SamplingParams(max_tokens=50, ignore_eos=True, stop=(held + "\0",))
    driver.add(request("1", (5, 6, 7), params=params, timeout_ms=1000))
    while len(driver.results["1"].token_ids) < len(whole.token_ids):
        driver.step()
    assert not driver.results["1"].text.endswith(whole.text)
    clock.now_s += 1
    driver.finish()
    assert driver.results["1"].text == whole.text


# Sessions.


def test_max_sessions_is_a_hard_limit(make: Callable[..., EngineDriver]) -> None:
    driver = make(max_active=3, max_sessions=2)
    for sequence_id in (1, 2, 3):
        driver.run(start(f"first {sequence_id}", sequence_id=sequence_id))
        assert driver.engine.statistics()["num_sessions"] <= 2
    assert list(driver.engine.scheduler.sessions) == [2, 3]
    assert driver.engine.counters().ended_sessions[SessionEnd.MEMORY] == 1
    for sequence_id in (2, 3):
        driver.add(turn(f"second {sequence_id}", sequence_id=sequence_id))
    with pytest.raises(UnavailableError, match=r"^max_sessions: all 2 open sequences are busy; retry after 1 s"):
        driver.add(start("refused", sequence_id=4))
    driver.add(start("one shot", sequence_id=5, sequence_end=True))  # nothing of it is kept
    driver.add(start("anew", sequence_id=3))  # takes its own place
    driver.finish()
    assert driver.results["one shot"].finish_reason == FinishReason.LENGTH
    assert driver.results["second 3"].finish_reason == FinishReason.CANCELLED
    assert sorted(driver.engine.scheduler.sessions) == [2, 3]


def test_a_start_cancelled_in_the_queue_leaves_nothing(make: Callable[..., EngineDriver]) -> None:
    driver = make(max_active=1)
    driver.add(request("runs"))
    driver.step()
    driver.add(start("1"))
    driver.add(turn("2"))
    driver.engine.cancel("1")
    assert driver.engine.statistics()["num_sessions"] == 0
    with pytest.raises(InvalidRequestError, match="no open sequence 1"):
        driver.add(turn("3"))
    driver.finish()
    assert driver.results["1"].finish_reason == FinishReason.CANCELLED
    error = driver.results["2"].error
    assert isinstance(error, UnavailableError)
    assert str(error).startswith("sequence 1 is lost: its first turn never ran; send sequence_start")


def test_ends_of_sessions_are_counted_by_reason(make: Callable[..., EngineDriver], clock: Clock) -> None:
    driver = make(max_sessions=2)
    driver.run(start("ended", sequence_id="a"))
    driver.run(turn("end", sequence_id="a", sequence_end=True))
    driver.run(start("idle", sequence_id="b"))
    clock.now_s += driver.engine.config.session_idle_s + 1
    driver.engine.sweep()
    driver.run(start("reset", sequence_id="c"))
    driver.run(start("reset again", sequence_id="c"))
    driver.engine.close_sequence("c")
    assert driver.engine.counters().ended_sessions == {"ended": 2, "reset": 1, "idle": 1, "memory": 0, "failed": 0}


# Starts that fail.


@pytest.mark.parametrize("is_new", [True, False])
def test_a_start_that_raises_leaves_no_memory_behind(
    make: Callable[..., EngineDriver], plain: Plain, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    driver = make()
    if not is_new:
        driver.run(start("first"))
    scheduler = driver.engine.scheduler

    def broken(*_: Any) -> None:
        raise RuntimeError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(type(scheduler), "reserve", broken)
        driver.add(start("1") if is_new else turn("1"))
        driver.add(turn("behind"))
        driver.finish()
    for request_id in ("1", "behind"):
        assert driver.results[request_id].error is not None
    assert "no luck" in str(driver.results["1"].error)
    assert scheduler.slots.num_free == scheduler.slots.size
    assert scheduler.blocks.num_free + scheduler.cache.num_evictable == scheduler.blocks.size
    assert not scheduler.sessions
    assert num_different(driver.run(start("again")), plain.run((5, 6, 7), PARAMS)) == 0


def test_failures_in_a_row_break_the_engine_and_a_good_round_forgives(
    make: Callable[..., EngineDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(max_failed_rounds=2)
    rounds = type(driver.engine.rounds)
    for is_broken in (False, True):
        driver.run(request(f"good {is_broken}"))
        for n in range(1 + is_broken):
            with monkeypatch.context() as patch:
                patch.setattr(rounds, "run", lambda *_: 1 / 0)
                driver.run(request(f"bad {is_broken} {n}"))
        assert driver.engine.health.is_broken == is_broken


# Fairness.


@pytest.mark.parametrize("chat_len", [30, 64])
def test_a_long_prompt_among_short_chats_starves_nobody(tmp_path: Path, chat_len: int) -> None:
    """2,000 tokens, and a chat more each round. Chats that leave rows over are answered in the round they come in.

    Chats that would fill every round leave the long prompt its quarter.
    """
    checkpoint = tiny_checkpoint(tmp_path, "qwen3_5_text", vocab_size=VOCAB_SIZE, max_position_embeddings=2100)
    limits = {"max_active": 16, "joint_prefill_rows": 64, "kv_cache_bytes": 8 << 20, "prefix_cache_bytes": 0}
    driver = EngineDriver(engine_config(checkpoint, **limits))
    prompt = tuple(3 + n % 28 for n in range(2000))
    alone = driver.run(request("alone", prompt))
    driver.add(request("stream", params=ENDLESS))
    driver.step()
    driver.add(request("long", prompt))
    num_rounds = 0
    while not driver.results["long"].token_ids:
        driver.add(request(f"chat {num_rounds}", tuple(3 + (num_rounds + k) % 28 for k in range(chat_len))))
        driver.step()
        if chat_len <= 48:
            assert len(driver.results[f"chat {num_rounds}"].token_ids) == 1
        num_rounds += 1
        assert num_rounds <= 2000 / 16
    driver.engine.cancel("stream")
    driver.finish()
    assert num_rounds >= 2000 / 64
    assert num_different(driver.results["long"], alone) == 0


def test_a_round_never_has_more_rows_than_admission_allows(make: Callable[..., EngineDriver]) -> None:
    config = {"max_active": 6, "row_budget": 8, "joint_prefill_rows": 16, "max_prefill_rows": 24}
    driver = make(**config)
    times = driver.engine.rounds.times
    for n in range(20):
        driver.add(request(str(n), tuple(3 + (n + k) % 28 for k in range(5 + 7 * (n % 4)))))
    seen = 0
    while driver.engine.has_work():
        before = times.num_rows
        driver.step()
        seen = max(seen, times.num_rows - before)
        assert times.num_rows - before <= max(24, max(6, 8) + 16)
    assert seen > 8
