# SPDX-License-Identifier: Apache-2.0
"""The model's own metrics on the server's /metrics: the engine's statistics as gauges, what it did as counters."""

import threading
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from tandem_backend.serving.response import FAILED
from tandem_backend.types import EngineCounters, FinishReason

ROUNDS = "tandem_rounds_total"
OUTPUT_TOKENS = "tandem_output_tokens_total"
DRAFT_TOKENS = "tandem_draft_tokens_total"
ACCEPTED_DRAFT_TOKENS = "tandem_accepted_draft_tokens_total"
REQUESTS = "tandem_requests_total"
COUNTERS = {
    ROUNDS: "Rounds of the engine: passes over the rows of all running requests",
    OUTPUT_TOKENS: "Tokens given to requests",
    DRAFT_TOKENS: "Draft tokens that were verified, by drafter",
    ACCEPTED_DRAFT_TOKENS: "Draft tokens that were right, by drafter",
    REQUESTS: "Requests that ended, by outcome: stop, length, cancelled or error",
}
OUTCOMES = (*FinishReason, FAILED)


class Metrics:
    """Writes into Triton server's registry. A write goes to another process (0.02 ms), so only changes are written."""

    def __init__(self, model: str, version: str) -> None:
        self._labels = {"model": model, "version": version}
        self._lock = threading.Lock()  # guards _num_requests
        self._num_requests: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._families: dict[str, Any] = {}
        # By name and label values: the metric and what was last written to it.
        self._written: dict[tuple[str, ...], tuple[Any, float | None]] = {}

    def count_request(self, outcome: str) -> None:
        """Take note of a request's end; any thread, at no cost. The next update() writes it."""
        with self._lock:
            self._num_requests[outcome] += 1

    def update(self, statistics: Mapping[str, float], counters: EngineCounters) -> None:
        """Write what has changed; always the same thread, and not the engine's."""
        for key, value in statistics.items():
            self._set(f"tandem_{key}", value)
        self._count(ROUNDS, counters.num_rounds)
        self._count(OUTPUT_TOKENS, counters.num_output_tokens)
        for drafter, (drafted, accepted) in counters.drafter_tokens.items():
            self._count(DRAFT_TOKENS, drafted, drafter=drafter)
            self._count(ACCEPTED_DRAFT_TOKENS, accepted, drafter=drafter)
        with self._lock:
            num_requests = dict(self._num_requests)
        for outcome, number in num_requests.items():
            self._count(REQUESTS, number, outcome=outcome)

    def _set(self, name: str, value: float) -> None:
        description = f"{name.removeprefix('tandem_')} of the engine's statistics"
        metric, written = self._metric(name, pb_utils.MetricFamily.GAUGE, description, {})
        # Unwritten, a gauge may still have the value of an instance before this one.
        if written != value:
            metric.set(value)
            self._written[(name,)] = (metric, value)

    def _count(self, name: str, total: int, **labels: str) -> None:
        metric, written = self._metric(name, pb_utils.MetricFamily.COUNTER, COUNTERS[name], labels)
        if total > (written or 0):
            metric.increment(total - (written or 0))
            self._written[(name, *labels.values())] = (metric, total)

    def _metric(self, name: str, kind: Any, description: str, labels: Mapping[str, str]) -> tuple[Any, float | None]:
        """The metric, made where it is new, and what was last written to it."""
        key = (name, *labels.values())
        if key in self._written:
            return self._written[key]
        if name not in self._families:
            self._families[name] = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        metric = self._families[name].Metric(labels={**self._labels, **labels})
        self._written[key] = (metric, None)
        return metric, None
