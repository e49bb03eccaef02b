# SPDX-License-Identifier: Apache-2.0
"""The model's own metrics on the server's /metrics: what there is now, what was done, how long it took."""

import threading
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

from tandem_backend.serving.registry import Registry
from tandem_backend.serving.response import FAILED, Ended
from tandem_backend.types import EngineCounters, FinishReason, Histogram

OUTCOMES = (*FinishReason, FAILED)
TOTAL = "_total"  # a statistic that ends so only grows: a counter
# A histogram takes some twenty messages to the server, each of which interrupts the engine where cores are few.
BUSY_INTERVAL_S = 5.0

GAUGES = {
    "num_active": "Requests in the rounds",
    "num_queued": "Requests that wait",
    "max_active": "Requests that may be in the rounds",
    "max_queued": "Requests that may wait; more are refused",
    "num_sessions": "Open sequences",
    "num_blocks": "KV blocks",
    "num_free_blocks": "KV blocks that no sequence has",
    "num_block_tokens": "Tokens of a KV block",
    "kv_cache_bytes": "Memory of the KV blocks",
    "kv_cache_used_bytes": "Memory of the KV blocks that sequences have",
    "num_cached_blocks": "KV blocks that the prefix cache holds, alone or with sequences",
    "num_anchors": "Positions of cached prefixes from which requests may resume",
    "prefix_cache_bytes": "Memory of cached prefixes: anchors, and KV blocks out of kv_cache_bytes",
    "response_cache_bytes": "Memory of whole answers kept",
    "disk_cache_bytes": "Size of the disk cache's files",
    "disk_cache_pending_bytes": "State that waits to be written to the disk cache",
    "num_disk_anchors": "Positions of prefixes on disk from which requests may resume",
    "session_cache_bytes": "Memory of the states that open sequences keep",
    "num_slots": "Places for the recurrent state of sequences",
    "num_free_slots": "Places for recurrent state that nobody owns",
    "weight_bytes": "Weights that a pass reads",
    "state_bytes": "Memory of the places for recurrent state",
    "graph_bytes": "Device memory that captured passes take",
    "self_test_passed": "1: the exactness self-test passed; 0: it was skipped",
    "self_test_rows": "Rows that the exactness self-test compared bit for bit",
    "self_test_seconds": "Duration of the exactness self-test",
    "heartbeat_timestamp_seconds": "When the engine thread last came by, since 1970; older than seconds: it is stuck",
}
ROUNDS = "tandem_rounds_total"
PART_SECONDS = "tandem_round_part_seconds_total"
PROMPT_TOKENS = "tandem_prompt_tokens_total"
CACHED_TOKENS = "tandem_cached_prompt_tokens_total"
OUTPUT_TOKENS = "tandem_output_tokens_total"
DRAFT_TOKENS = "tandem_draft_tokens_total"
ACCEPTED_DRAFT_TOKENS = "tandem_accepted_draft_tokens_total"
REQUESTS = "tandem_requests_total"
ENDED_SESSIONS = "tandem_ended_sessions_total"
CACHE_HITS = "tandem_cache_hits_total"
CACHE_MISSES = "tandem_cache_misses_total"
CACHE_SAVED_TOKENS = "tandem_cache_saved_tokens_total"
CACHE_EVICTIONS = "tandem_cache_evictions_total"
COUNTERS = {
    "tandem_disk_cache_dropped_total": "Anchors left out: too many waited, or what they go on from is not on disk",
    "tandem_disk_cache_write_errors_total": "Anchors that could not be written to disk",
    "tandem_disk_cache_bad_files_total": "Files of the disk cache that were torn, damaged or none of it",
    ROUNDS: "Rounds of the engine: passes over the rows of all running requests",
    PART_SECONDS: "Time in rounds, by part: draft, verify, accept, commit or host",
    PROMPT_TOKENS: "Prompt tokens of requests that ended",
    CACHED_TOKENS: "Prompt tokens of requests that ended whose state was kept from before",
    OUTPUT_TOKENS: "Tokens given to requests",
    DRAFT_TOKENS: "Draft tokens that were verified, by drafter",
    ACCEPTED_DRAFT_TOKENS: "Draft tokens that were right, by drafter",
    REQUESTS: "Requests that ended, by outcome: a finish reason or error",
    ENDED_SESSIONS: "Sessions that ended, by reason",
    CACHE_HITS: "Look-ups that found something, by cache",
    CACHE_MISSES: "Look-ups that found nothing, by cache",
    CACHE_SAVED_TOKENS: "Prompt tokens that were not computed again, by cache",
    CACHE_EVICTIONS: "Entries that made room, by cache",
}
FIRST_TOKEN = "tandem_time_to_first_token_seconds"
INTER_TOKEN = "tandem_inter_token_seconds"
REQUEST_SECONDS = "tandem_request_seconds"
QUEUE_SECONDS = "tandem_queue_seconds"
REQUEST_PROMPT_TOKENS = "tandem_request_prompt_tokens"
REQUEST_OUTPUT_TOKENS = "tandem_request_output_tokens"
ROUND_SECONDS = "tandem_round_seconds"
ROUND_ROWS = "tandem_round_rows"
ROUND_SEQUENCES = "tandem_round_sequences"
ACCEPTANCE_LENGTH = "tandem_acceptance_length_tokens"
HISTOGRAMS = {
    FIRST_TOKEN: "Time from a request's arrival to its first token",
    INTER_TOKEN: "Time between a request's tokens",
    REQUEST_SECONDS: "Time from a request's arrival to its last response",
    QUEUE_SECONDS: "Time from a request's arrival to its start",
    REQUEST_PROMPT_TOKENS: "Prompt tokens of a request",
    REQUEST_OUTPUT_TOKENS: "Output tokens of a request",
    ROUND_SECONDS: "Duration of a round",
    ROUND_ROWS: "Rows of a round, prompt rows and draft nodes included",
    ROUND_SEQUENCES: "Requests that share a round",
    ACCEPTANCE_LENGTH: "Tokens that a request committed in a decoding round, bonus token included",
}
# Names under which dashboards of vLLM and of its Triton backend look for the same values.
ALIASES = {
    PROMPT_TOKENS: "vllm:prompt_tokens_total",
    OUTPUT_TOKENS: "vllm:generation_tokens_total",
    FIRST_TOKEN: "vllm:time_to_first_token_seconds",
    INTER_TOKEN: "vllm:time_per_output_token_seconds",
    REQUEST_SECONDS: "vllm:e2e_request_latency_seconds",
    QUEUE_SECONDS: "vllm:request_queue_time_seconds",
    REQUEST_PROMPT_TOKENS: "vllm:request_prompt_tokens",
    REQUEST_OUTPUT_TOKENS: "vllm:request_generation_tokens",
    "tandem_num_active": "vllm:num_requests_running",
    "tandem_num_queued": "vllm:num_requests_waiting",
}
# TensorRT-LLM's name, from which newer Triton servers tell gateways (ORCA) how full the cache is.
BLOCK_METRICS = "nv_trt_llm_kv_cache_block_metrics"

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@dataclass(slots=True)
class _Requests:
    """What is counted at the ends of requests."""

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    num_cached_tokens: int = 0
    first_token_s: Histogram = field(default_factory=partial(Histogram, SECONDS))
    request_s: Histogram = field(default_factory=partial(Histogram, SECONDS))
    queue_s: Histogram = field(default_factory=partial(Histogram, SECONDS))
    prompt_tokens: Histogram = field(default_factory=partial(Histogram, TOKENS))
    output_tokens: Histogram = field(default_factory=partial(Histogram, TOKENS))

    def add(self, ended: Ended) -> None:
        self.outcomes[ended.outcome] += 1
        stats = ended.stats
        if stats is None:  # it never ran
            return
        arrival_ns = stats.arrival_time_ns
        self.num_cached_tokens += stats.num_cached_tokens
        self.prompt_tokens.observe(stats.num_prompt_tokens)
        self.output_tokens.observe(stats.num_output_tokens)
        self.request_s.observe((time.time_ns() - arrival_ns) / 1e9)
        self.queue_s.observe((stats.first_scheduled_time_ns - arrival_ns) / 1e9)
        if stats.first_token_time_ns:
            self.first_token_s.observe((stats.first_token_time_ns - arrival_ns) / 1e9)


class Metrics:
    """What the model reports, by name. A name has a unit where it has one; labels take few values."""

    def __init__(self, model: str, version: str) -> None:
        self._registry = Registry(model, version)
        self._lock = threading.Lock()  # guards _requests
        self._requests = _Requests()
        self._next_requests_s = 0.0  # time.monotonic()

    def end_request(self, ended: Ended) -> None:
        """Take note of a request's end; any thread, at no cost. The next update() writes it."""
        with self._lock:
            self._requests.add(ended)

    def update(self, statistics: Mapping[str, float], counters: EngineCounters) -> None:
        """Write what has changed; always the same thread, and not the engine's.

        While requests run, histograms and what is counted at their ends only every BUSY_INTERVAL_S.
        """
        for key, value in statistics.items():
            if key.endswith(TOTAL):
                self._count(f"tandem_{key}", value)
            else:
                self._set(f"tandem_{key}", value, GAUGES.get(key))
        if "num_blocks" in statistics:
            self._write_blocks(statistics)
        self._write_work(counters)
        now_s = time.monotonic()
        if not statistics.get("num_active") or now_s >= self._next_requests_s:
            self._next_requests_s = now_s + BUSY_INTERVAL_S
            self._write_rounds(counters)
            self._write_requests()

    def close(self) -> None:
        """Give the metrics up while Triton server listens: a stub that exits holding one segfaults (seen with 2.51)."""
        self._registry.close()

    def _write_work(self, counters: EngineCounters) -> None:
        self._count(ROUNDS, counters.num_rounds)
        self._count(OUTPUT_TOKENS, counters.num_output_tokens)
        for part, seconds in counters.part_s.items():
            self._count(PART_SECONDS, seconds, part=part)
        for drafter, (drafted, accepted) in counters.drafter_tokens.items():
            self._count(DRAFT_TOKENS, drafted, drafter=drafter)
            self._count(ACCEPTED_DRAFT_TOKENS, accepted, drafter=drafter)
        for reason, number in counters.ended_sessions.items():
            self._count(ENDED_SESSIONS, number, reason=reason)
        for cache, did in counters.caches.items():
            self._count(CACHE_HITS, did.num_hits, cache=cache)
            self._count(CACHE_MISSES, did.num_misses, cache=cache)
            self._count(CACHE_SAVED_TOKENS, did.num_saved_tokens, cache=cache)
            self._count(CACHE_EVICTIONS, did.num_evictions, cache=cache)

    def _write_rounds(self, counters: EngineCounters) -> None:
        self._distribute(ROUND_SECONDS, counters.round_s)
        self._distribute(ROUND_ROWS, counters.round_rows)
        self._distribute(ROUND_SEQUENCES, counters.round_sequences)
        self._distribute(ACCEPTANCE_LENGTH, counters.acceptance_len)
        self._distribute(INTER_TOKEN, counters.inter_token_s)

    def _write_requests(self) -> None:
        with self._lock:
            requests = deepcopy(self._requests)
        self._count(PROMPT_TOKENS, requests.prompt_tokens.total)
        self._count(CACHED_TOKENS, requests.num_cached_tokens)
        self._distribute(FIRST_TOKEN, requests.first_token_s)
        self._distribute(REQUEST_SECONDS, requests.request_s)
        self._distribute(QUEUE_SECONDS, requests.queue_s)
        self._distribute(REQUEST_PROMPT_TOKENS, requests.prompt_tokens)
        self._distribute(REQUEST_OUTPUT_TOKENS, requests.output_tokens)
        # Last: who sees a request counted finds all else about it written.
        for outcome, number in requests.outcomes.items():
            self._count(REQUESTS, number, outcome=outcome)

    def _write_blocks(self, statistics: Mapping[str, float]) -> None:
        size, free = statistics["num_blocks"], statistics["num_free_blocks"]
        used = size - free
        types = {"used": used, "free": free, "max": size, "fraction": used / size if size else 0.0}
        types["tokens_per"] = statistics["num_block_tokens"]
        for name, value in types.items():
            self._registry.gauge(BLOCK_METRICS, "KV cache block metrics", value, kv_cache_block_type=name)
        self._registry.gauge("vllm:kv_cache_usage_perc", "Used part of the KV cache, 1 is full", types["fraction"])

    def _set(self, name: str, value: float, description: str | None) -> None:
        for each in _names(name):
            self._registry.gauge(each, description or _described(name), value)

    def _count(self, name: str, total: float, **labels: str) -> None:
        for each in _names(name):
            self._registry.counter(each, COUNTERS.get(name) or _described(name), total, **labels)

    def _distribute(self, name: str, histogram: Histogram) -> None:
        for each in _names(name):
            self._registry.histogram(each, HISTOGRAMS[name], histogram)


def _names(name: str) -> tuple[str, ...]:
    return (name, ALIASES[name]) if name in ALIASES else (name,)


def _described(name: str) -> str:
    return f"{name.removeprefix('tandem_')} of the engine's statistics"
