# SPDX-License-Identifier: Apache-2.0
"""Random walks of everything a server may do to an engine that is short of memory, with all unused memory NaN."""

import contextlib
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from engine_driver import VOCAB_SIZE, EngineDriver, Plain, Result, beginning, engine_config, limit_blocks, num_different
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.errors import InvalidRequestError, UnavailableError
from tandem_backend.types import FinishReason, Prompt, Request, SamplingParams

SEQUENCE_IDS = ("a", "b", 3)
PROMPTS = st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=12).map(tuple) | st.sampled_from(
    [tuple(range(3, 31)) * 2, (7,) * 66]
)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 20),
    min_tokens=st.sampled_from([0, 0, 5]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(3, VOCAB_SIZE - 1), max_size=1).map(tuple),
    drafter=st.sampled_from([None, "none", "half", "oracle", "half+lookup+mtp+draft_model", "mtp", "draft_model"]),
    num_draft_tokens=st.sampled_from([None, None, 3]),
)
PRIORITIES = st.sampled_from([5, 5, 1, 9])
TIMEOUTS = st.sampled_from([None, None, 3_600_000])
CUT_SHORT = (FinishReason.CANCELLED, FinishReason.TIMEOUT)
MAX_ACTIVE, MAX_QUEUED = 3, 3
NUM_BLOCKS = 6
MAX_CONTEXT = 192


class Walk(RuleBasedStateMachine):
    """`requests` holds the accepted ones in order; what they should have got is worked out at the end."""

    hybrid: Path
    draft_model: Path
    plain: Plain

    def __init__(self) -> None:
        super().__init__()
        config = engine_config(
            self.hybrid,
            drafters=("lookup", "mtp", "draft_model"),
            draft_model=self.draft_model,
            router="always",
            max_active=MAX_ACTIVE,
            max_queued=MAX_QUEUED,
            max_sessions=1,
            max_context_len=MAX_CONTEXT,
            max_prefill_rows=32,
            joint_prefill_rows=5,
        )
        references = self.plain.continuation
        extra = {name: ScriptedDrafter(name, references, VOCAB_SIZE) for name in ("half", "oracle")}
        self.driver = EngineDriver(config, extra, poison=True)
        self.engine = self.driver.engine
        limit_blocks(self.engine, NUM_BLOCKS)
        self.requests: list[Request] = []
        self.ids = (str(n) for n in count())

    def add(self, request: Request) -> None:
        statistics = self.engine.statistics()
        session = self.engine.scheduler.sessions.get(request.sequence_id or "")
        continues = request.sequence_id is not None and not request.sequence_start
        if (
            statistics["num_active"] + statistics["num_queued"] >= MAX_ACTIVE + MAX_QUEUED
            and not request.sequence_start
        ):
            with pytest.raises(UnavailableError, match="queue is full"):
                self.driver.add(request)
        elif continues and (session is None or session.ends):
            with pytest.raises(InvalidRequestError, match=r"^sequence_id: no open sequence"):
                self.driver.add(request)
        else:
            # A START cancels the sequence's own requests, which may or may not make room in a full queue.
            with contextlib.suppress(UnavailableError) if request.sequence_start else contextlib.nullcontext():
                self.driver.add(request)
                self.requests.append(request)
        self.engine.scheduler.check_integrity()

    @rule(prompt=PROMPTS, params=PARAMS, priority=PRIORITIES, timeout_ms=TIMEOUTS)
    def add_single(
        self, prompt: tuple[int, ...], params: SamplingParams, priority: int, timeout_ms: int | None
    ) -> None:
        request_id, urgency = next(self.ids), {"priority": priority, "timeout_ms": timeout_ms}
        self.add(Request(request_id=request_id, prompt=Prompt(token_ids=prompt), params=params, **urgency))

    @rule(
        prompt=PROMPTS,
        params=PARAMS,
        sequence_id=st.sampled_from(SEQUENCE_IDS),
        starts=st.sampled_from([True, False, False]),
        ends=st.sampled_from([True, False, False, False]),
        whole=st.booleans(),
        priority=PRIORITIES,
        timeout_ms=TIMEOUTS,
    )
    def add_turn(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        sequence_id: int | str,
        starts: bool,
        ends: bool,
        whole: bool,
        priority: int,
        timeout_ms: int | None,
    ) -> None:
        session = self.engine.scheduler.sessions.get(sequence_id)
        if whole and session is not None and session.sequence is not None:  # as far as it has come, and more
            prompt = (*session.sequence.token_ids[: MAX_CONTEXT // 2], *prompt)
        request = Request(
            request_id=next(self.ids),
            prompt=Prompt(token_ids=prompt),
            params=params,
            sequence_id=sequence_id,
            sequence_start=starts or sequence_id not in self.engine.scheduler.sessions,
            sequence_end=ends,
            whole_conversation=whole,
            priority=priority,
            timeout_ms=timeout_ms,
        )
        self.add(request)

    @precondition(lambda self: self.engine.has_work())
    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.driver.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(self.requests[-6:])).request_id)
        self.engine.scheduler.check_integrity()

    @rule()
    def let_time_pass(self) -> None:
        """As if a day had gone by: who has a deadline and who waits must go."""
        self.engine.endings.end_overdue(time.monotonic() + 90_000)
        assert all(g.request.timeout_ms is None for g in self.engine.scheduler.running)
        assert not self.engine.scheduler.waiting
        self.engine.scheduler.check_integrity()

    @rule(sequence_id=st.sampled_from([*SEQUENCE_IDS, "unknown"]))
    def close(self, sequence_id: int | str) -> None:
        self.engine.close_sequence(sequence_id)
        assert sequence_id not in self.engine.scheduler.sessions
        self.engine.scheduler.check_integrity()

    @rule()
    def sweep(self) -> None:
        """As if all sessions had been idle for long."""
        self.engine.scheduler.sweep(float("inf"))
        assert all(s.running or self.is_queued(s.sequence_id) for s in self.engine.scheduler.sessions.values())
        self.engine.scheduler.check_integrity()

    def is_queued(self, sequence_id: int | str) -> bool:
        return any(item.prepared.request.sequence_id == sequence_id for item in self.engine.scheduler.waiting)

    def teardown(self) -> None:
        self.driver.finish()
        for sequence_id in SEQUENCE_IDS:
            self.engine.close_sequence(sequence_id)
        self.engine.scheduler.cache.clear()
        statistics = self.engine.statistics()
        assert statistics["num_free_blocks"] == NUM_BLOCKS
        assert statistics["num_free_slots"] == statistics["num_slots"]
        assert statistics["num_sessions"] == statistics["num_active"] == statistics["num_queued"] == 0
        assert [request.request_id for request in self.requests] == list(self.driver.results)
        for request, result, tokens in self.with_their_tokens():
            self.check(request, result, tokens)

    def with_their_tokens(self) -> Iterator[tuple[Request, Result, tuple[int, ...]]]:
        """Each request that ran, in order, with all tokens before its first output."""
        kept: dict[int | str, tuple[int, ...]] = {}
        for request in self.requests:
            result = self.driver.results[request.request_id]
            assert result.is_finished, f"request {request.request_id} has no last output"
            assert request.prompt.token_ids is not None
            if request.sequence_start and request.sequence_id is not None:
                kept[request.sequence_id] = ()
            if result.stats is None:
                assert result.error is not None or result.finish_reason in CUT_SHORT
                assert not result.token_ids
                continue
            before = () if request.whole_conversation else kept.get(request.sequence_id or "", ())
            tokens = (*before, *request.prompt.token_ids)
            yield request, result, tokens
            if request.sequence_id is not None:
                kept[request.sequence_id] = (*tokens, *result.token_ids)

    def check(self, request: Request, result: Result, tokens: tuple[int, ...]) -> None:
        assert result.error is None
        assert result.stats is not None
        assert result.stats.num_prompt_tokens == len(tokens)
        reference = self.plain.run(tokens, request.params)
        if result.finish_reason in CUT_SHORT:
            reference = beginning(reference, len(result.token_ids))
        else:
            assert result.finish_reason == reference.finish_reason
        assert num_different(result, reference) == 0


def test_nothing_leaks_and_every_text_is_plain(hybrid: Path, small_draft_model: Path, plain: Plain) -> None:
    walk = type("Walk", (Walk,), {"hybrid": hybrid, "draft_model": small_draft_model, "plain": plain})
    run_state_machine_as_test(walk, settings=settings(max_examples=15, stateful_step_count=30, deadline=None))
