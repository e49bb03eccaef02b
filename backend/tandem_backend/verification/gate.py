# SPDX-License-Identifier: Apache-2.0
"""The gate: every combination of drafters, parallel requests, chunk size and cache against plain decoding."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from tandem_backend.verification.comparison import Trace, acceptance_len, compare, require_rows

PLAIN = "none"  # the drafter that drafts nothing
COLD = "cold"  # the cache that keeps nothing
Tick = Callable[[int, int], None]  # requests done, requests in all


@dataclass(frozen=True, slots=True)
class Plan:
    """What to combine. Chunk sizes are rows of prompt in a pass; None: the target's own, which can't be chosen."""

    drafters: tuple[str, ...]
    parallel: tuple[int, ...]
    chunks: tuple[int | None, ...]
    caches: tuple[str, ...]

    @property
    def num_combinations(self) -> int:
        return len(self.drafters) * len(self.parallel) * len(self.chunks) * len(self.caches)


class Target(Protocol):
    """What decodes: an engine of this process or a server."""

    def decode(self, drafter: str, parallel: int, reference: Sequence[Trace], tick: Tick) -> list[Trace]:
        """Decode every prompt, so many at once, under one drafter set. Trace i is of prompt i modulo their number.

        With fewer prompts than `parallel` they are repeated up to it.
        """

    def explain(self, index: int, output: int, expected: Trace, got: Trace) -> str:
        """The difference at output token `output` of trace `index` of the last decode: both logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One combination's result."""

    drafters: str
    parallel: int
    chunk: int | None
    cache: str
    num_prompts: int  # requests decoded
    num_tokens: int
    num_differing_tokens: int
    num_differing_rows: int
    acceptance_len: float
    num_draft_rows: int
    num_cached_tokens: int
    elapsed_s: float

    @property
    def is_different(self) -> bool:
        return bool(self.num_differing_tokens or self.num_differing_rows)

    @property
    def never_drafted(self) -> bool:
        return self.drafters != PLAIN and self.num_draft_rows == 0

    @property
    def never_resumed(self) -> bool:
        return self.cache != COLD and self.num_cached_tokens == 0

    @property
    def name(self) -> str:
        chunk = "" if self.chunk is None else f" chunk={self.chunk}"
        return f"drafters={self.drafters} parallel={self.parallel}{chunk} cache={self.cache}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a combination."""

    trace: int
    output: int
    explanation: str


def verify(
    plan: Plan,
    references: Mapping[str, Sequence[Trace]],
    open_target: Callable[[int | None, str], Target],
    tick: Tick,
) -> Iterator[tuple[Line, Difference | None]]:
    """Decode under every combination of `plan`; `open_target` gives the target of a chunk size and a cache.

    references: what is right, by cache.

    A target is opened once for all its drafters and degrees of parallelism, so that later requests meet the state
    that earlier ones left behind.
    """
    for cache, chunk in product(plan.caches, plan.chunks):
        reference = references[cache]
        require_rows(reference)
        target = open_target(chunk, cache)
        for parallel, drafter in product(plan.parallel, plan.drafters):
            started = time.monotonic()
            traces = target.decode(drafter, parallel, reference, tick)
            require_rows(traces)
            expected = [reference[i % len(reference)] for i in range(len(traces))]
            differences = [compare(*pair) for pair in zip(expected, traces, strict=True)]
            line = Line(
                drafters=drafter,
                parallel=parallel,
                chunk=chunk,
                cache=cache,
                num_prompts=len(traces),
                num_tokens=sum(len(trace.token_ids) for trace in traces),
                num_differing_tokens=sum(d.num_tokens for d in differences),
                num_differing_rows=sum(d.num_rows for d in differences),
                acceptance_len=acceptance_len(traces),
                num_draft_rows=sum(trace.num_draft_tokens for trace in traces),
                num_cached_tokens=sum(trace.num_cached_tokens for trace in traces),
                elapsed_s=time.monotonic() - started,
            )
            first = next(((i, d.first) for i, d in enumerate(differences) if d.first is not None), None)
            if first is None:
                yield line, None
            else:
                index, output = first
                explanation = target.explain(index, output, expected[index], traces[index])
                yield line, Difference(index, output, explanation)
