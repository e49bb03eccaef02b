# SPDX-License-Identifier: Apache-2.0
"""ResponseCache: whole answers of requests that have only one, greedy or with the client's own seed."""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tandem_backend.types import (
    CacheCounters,
    FinishReason,
    Request,
    RequestStats,
    SamplingParams,
    StepOutput,
    join_outputs,
)

ENTRY_BYTES = 1000  # an entry's objects without their contents, about
TOKEN_BYTES = 48  # a token id or log-probability in a tuple, about
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class ResponseKey:
    """All that an answer depends on, and who may see it. Equal keys are equal in full, not by hash."""

    cache_salt: str
    prompt_ids: tuple[int, ...]
    form: str  # tools and template arguments, which may decide how the text is read
    params: SamplingParams  # without what only concerns drafting


def response_key(request: Request, prompt_ids: tuple[int, ...]) -> ResponseKey | None:
    """None where another answer would be as right, it is a turn of a session, or a receipt is wanted for it.

    A sequence of one request, START with END, is no session: all requests through `tandem_generate` come so.
    To be asked before an unseeded request gets its seed.
    """
    is_turn = request.sequence_id is not None and not (request.sequence_start and request.sequence_end)
    params, prompt = request.params, request.prompt
    is_repeatable = params.relax_tau is None and (params.temperature == 0 or params.seed is not None)
    if is_turn or request.return_receipt or not is_repeatable:
        return None
    form = json.dumps([prompt.tools, dict(prompt.template_kwargs)], sort_keys=True, default=repr)
    neutral = replace(params, drafter=None, num_draft_tokens=None)
    return ResponseKey(request.cache_salt, prompt_ids, form, neutral)


@dataclass(frozen=True, slots=True)
class _Entry:
    output: StepOutput
    num_bytes: int
    made_s: float


class ResponseCache:
    """The least recently used answers go when `max_bytes` are full, every answer after `ttl_s`. 0 bytes: off."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self.ttl_s = max_bytes, ttl_s
        self.counters = CacheCounters()
        self.num_bytes = 0
        self._clock = clock
        self._entries: OrderedDict[ResponseKey, _Entry] = OrderedDict()
        self._unfinished: dict[str, tuple[ResponseKey, list[StepOutput]]] = {}  # by request

    @property
    def is_on(self) -> bool:
        return self.max_bytes > 0

    def answer(self, key: ResponseKey | None, request_id: str, arrival_time_ns: int) -> StepOutput | None:
        """The whole kept answer in one output, for another request."""
        known = self._find(key)
        if known is None or key is None:
            return None
        now = time.time_ns()
        stats = RequestStats(
            num_prompt_tokens=len(key.prompt_ids),
            is_cached_response=True,
            num_output_tokens=len(known.token_ids),
            seed=known.stats.seed if known.stats is not None else None,
            arrival_time_ns=arrival_time_ns,
            first_scheduled_time_ns=now,
            first_token_time_ns=now,
            last_token_time_ns=now,
        )
        return replace(known, request_id=request_id, stats=stats)

    def _find(self, key: ResponseKey | None) -> StepOutput | None:
        if key is None or not self.is_on:
            return None
        entry = self._entries.get(key)
        if entry is not None and self._clock() - entry.made_s > self.ttl_s:
            self._drop(key)
            entry = None
        self.counters.count(len(key.prompt_ids) + len(entry.output.token_ids) if entry is not None else 0)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.output

    def expect(self, request_id: str, key: ResponseKey | None) -> None:
        """A request will be computed; its answer is kept when it has ended by itself."""
        if key is not None and self.is_on:
            self._unfinished[request_id] = (key, [])

    def watch(self, outputs: Iterable[StepOutput]) -> None:
        """Take note of what requests get."""
        for output in outputs:
            unfinished = self._unfinished.get(output.request_id)
            if unfinished is None:
                continue
            key, parts = unfinished
            parts.append(output)
            if output.is_last:
                del self._unfinished[output.request_id]
                if output.finish_reason in COMPLETE:
                    # The rounds are those of this request; one that is answered from here has none.
                    self._add(key, replace(join_outputs(parts), rounds=()))

    def clear(self) -> int:
        """Forget all answers; returns how many there were."""
        num_entries = len(self._entries)
        self._entries.clear()
        self.num_bytes = 0
        return num_entries

    def _add(self, key: ResponseKey, output: StepOutput) -> None:
        if key in self._entries:
            self._drop(key)
        entry = _Entry(output, _num_bytes(key, output), self._clock())
        self._entries[key] = entry
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))
            self.counters.num_evictions += 1

    def _drop(self, key: ResponseKey) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes


def _num_bytes(key: ResponseKey, output: StepOutput) -> int:
    num_tops = sum(1 + 2 * len(top) for top in output.top_logprobs)
    num_tops += sum(2 + 2 * len(entry.top) for entry in output.prompt_logprobs if entry is not None)
    num_tokens = len(key.prompt_ids) + 2 * len(output.token_ids) + num_tops
    return ENTRY_BYTES + TOKEN_BYTES * num_tokens + 4 * len(output.text)
