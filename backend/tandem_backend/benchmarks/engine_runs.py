# SPDX-License-Identifier: Apache-2.0
"""Requests run through an engine of this process, with the clock on the rounds in which all of them decode."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from tandem_backend.config import EngineConfig
from tandem_backend.engine import Engine, PreparedRequest
from tandem_backend.engine.times import RoundTimes
from tandem_backend.errors import TandemError

ALL_PROMPT_ROWS = 8192


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
    times: RoundTimes = field(default_factory=RoundTimes)  # of the same rounds; host_ms is all outside the other parts

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.decode_s


def run_together(engine: Engine, requests: Sequence[PreparedRequest]) -> Run:
    """Decode requests in joint rounds until all have ended; the engine must be idle. Raises their TandemError."""
    token_ids: dict[str, list[int]] = {prepared.request.request_id: [] for prepared in requests}
    for prepared in requests:
        engine.add(prepared)
    run = Run([])
    is_over = False
    while engine.has_work():
        do_all_decode = all(token_ids.values())
        before, begun = replace(engine.rounds.times), time.perf_counter()
        outputs = engine.step()
        elapsed_s = time.perf_counter() - begun
        for output in outputs:
            if output.error is not None:
                raise output.error
            token_ids[output.request_id].extend(output.token_ids)
        if not do_all_decode:
            run.prefill_s += elapsed_s
        elif not is_over:
            run.decode_s += elapsed_s
            run.num_tokens += sum(len(output.token_ids) for output in outputs)
            run.times.add(_round_times(before, engine.rounds.times, 1e3 * elapsed_s))
        is_over = is_over or any(output.is_last for output in outputs)
    run.token_ids = [tuple(ids) for ids in token_ids.values()]
    return run


def _round_times(before: RoundTimes, after: RoundTimes, elapsed_ms: float) -> RoundTimes:
    """What was added, with the scheduling around the round counted as host work too."""
    spent = RoundTimes(**{item.name: getattr(after, item.name) - getattr(before, item.name) for item in fields(after)})
    spent.host_ms = elapsed_ms - spent.draft_ms - spent.verify_ms - spent.accept_ms - spent.commit_ms
    return spent
