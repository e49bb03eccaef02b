# SPDX-License-Identifier: Apache-2.0
"""Requests run through an engine of this process, with the clock on the rounds in which all of them decode."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from tandem_backend.config import EngineConfig
from tandem_backend.engine import Engine, PreparedRequest
from tandem_backend.engine.scheduler import Scheduler
from tandem_backend.engine.times import RoundTimes
from tandem_backend.errors import TandemError

ALL_PROMPT_ROWS = 8192
TURN_TOKENS = 8  # a slow spell of the machine lasts much longer than so many take


class TextsDifferError(TandemError):
    """Two sides of a comparison gave different texts: their speed means nothing."""


def bench_config(checkpoint: Path, drafters: Sequence[str], num_threads: int, max_active: int) -> EngineConfig:
    """The defaults but for four: no self-test, few sessions, no prefix cache, and requests that come together begin so.

    With a prefix cache a prompt would be cheap for having been asked before.
    """
    return EngineConfig(
        checkpoint=checkpoint,
        drafters=tuple(drafters),
        num_threads=num_threads,
        max_active=max_active,
        max_sessions=1,
        prefix_cache_bytes=0,
        joint_prefill_rows=ALL_PROMPT_ROWS,
        self_test_rows=0,
    )


@dataclass(slots=True)
class Run:
    """Requests decoded together to their end."""

    token_ids: list[tuple[int, ...]]  # by request
    prefill_s: float = 0.0  # rounds before every request has its first token
    decode_s: float = 0.0  # rounds in which every request decodes
    num_tokens: int = 0  # of all requests, in decode_s
    tokens_by_id: Counter[str] = field(default_factory=Counter)  # num_tokens by request, in their order
    progress: list[tuple[int, float]] = field(default_factory=list)  # num_tokens and decode_s after each round
    times: RoundTimes = field(default_factory=RoundTimes)  # of the same rounds; host_ms is all outside the other parts

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.decode_s

    def first_tokens(self, count: int) -> "Run":
        """The run up to so many tokens; of a round that goes beyond, its share of the time."""
        tokens, seconds = 0, 0.0
        for reached, reached_s in self.progress:
            if reached >= count:
                share = (count - tokens) / (reached - tokens)
                return Run([], num_tokens=count, decode_s=seconds + share * (reached_s - seconds))
            tokens, seconds = reached, reached_s
        raise ValueError(f"count: the run has {tokens} tokens, not {count}")


def run_together(engine: Engine, requests: Sequence[PreparedRequest]) -> Run:
    """Decode requests in joint rounds until all have ended; the engine must be idle. Raises their TandemError."""
    token_ids: dict[str, list[int]] = {prepared.request.request_id: [] for prepared in requests}
    for prepared in requests:
        engine.add(prepared)
    run = Run([], tokens_by_id=Counter(dict.fromkeys(token_ids, 0)))
    before, after = Run([]), Run([])
    is_over = False
    while engine.has_work():
        part = after if is_over else run if all(token_ids.values()) else before
        is_over |= _step(engine, token_ids, part)
    run.prefill_s = before.decode_s
    run.token_ids = [tuple(ids) for ids in token_ids.values()]
    return run


def run_in_turns(engine: Engine, requests: Sequence[PreparedRequest]) -> list[Run]:
    """Decode requests each in rounds of its own, all of them a few tokens at a time; the engine must be idle.

    So what slows the machine down for longer than a turn slows all of them alike, at the same tokens. Raises the
    requests' TandemError.
    """
    token_ids: dict[str, list[int]] = {prepared.request.request_id: [] for prepared in requests}
    runs = {request_id: Run([]) for request_id in token_ids}
    for prepared in requests:
        engine.add(prepared)
        reading = Run([])
        with _running_alone(engine.scheduler, prepared.request.request_id):
            while engine.has_work() and not token_ids[prepared.request.request_id]:
                _step(engine, token_ids, reading)
        runs[prepared.request.request_id].prefill_s = reading.decode_s
    while engine.has_work():
        left = [generation.request.request_id for generation in engine.scheduler.running]
        turn = min((request_id for request_id in token_ids if request_id in left), key=lambda i: len(token_ids[i]))
        end = max(map(len, token_ids.values())) + TURN_TOKENS
        with _running_alone(engine.scheduler, turn):
            while engine.has_work() and len(token_ids[turn]) < end:
                _step(engine, token_ids, runs[turn])
    for request_id, run in runs.items():
        run.token_ids = [tuple(token_ids[request_id])]
    return list(runs.values())


@contextmanager
def _running_alone(scheduler: Scheduler, request_id: str) -> Iterator[None]:
    """Keep the other running requests out of the rounds within."""
    others = [generation for generation in scheduler.running if generation.request.request_id != request_id]
    scheduler.running = [generation for generation in scheduler.running if generation not in others]
    try:
        yield
    finally:
        scheduler.running += others


def _step(engine: Engine, token_ids: Mapping[str, list[int]], run: Run) -> bool:
    """One round, whose tokens and times are added; says whether a request ended in it."""
    before, begun = replace(engine.rounds.times), time.perf_counter()
    outputs = engine.step()
    elapsed_s = time.perf_counter() - begun
    for output in outputs:
        if output.error is not None:
            raise output.error
        token_ids[output.request_id].extend(output.token_ids)
        run.tokens_by_id[output.request_id] += len(output.token_ids)
    run.decode_s += elapsed_s
    run.num_tokens = run.tokens_by_id.total()
    run.progress.append((run.num_tokens, run.decode_s))
    run.times.add(_round_times(before, engine.rounds.times, 1e3 * elapsed_s))
    return any(output.is_last for output in outputs)


def _round_times(before: RoundTimes, after: RoundTimes, elapsed_ms: float) -> RoundTimes:
    """What was added, with the scheduling around the round counted as host work too."""
    spent = RoundTimes(**{item.name: getattr(after, item.name) - getattr(before, item.name) for item in fields(after)})
    spent.host_ms = elapsed_ms - spent.draft_ms - spent.verify_ms - spent.accept_ms - spent.commit_ms
    return spent
