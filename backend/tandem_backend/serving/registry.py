# SPDX-License-Identifier: Apache-2.0
"""Triton server's registry of metrics: writes gauges, counters and histograms, and of them only what has changed."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import triton_python_backend_utils as pb_utils

from tandem_backend.serving.overlap import OverlapNumber
from tandem_backend.types import Histogram


class Registry:
    """One model's metrics. A write is a message to the server (0.02 ms of its and our time); one thread makes them.

    Triton server's own histograms take one message for every value. Ours are counted where the values arise and written
    as the counters that a histogram consists of, `_bucket` with the label `le`, `_sum` and `_count`: queries are the
    same, and the cost is bounded by the number of buckets, not by the load.

    A stub that was loaded while the one before still answers has series of its own, with the label `overlap`.
    """

    def __init__(self, model: str, version: str) -> None:
        self._overlap = OverlapNumber(model, version)
        self._labels = {"model": model, "version": version}
        if self._overlap.value:
            self._labels["overlap"] = str(self._overlap.value)
        self._families: dict[str, Any] = {}
        # By name and label values: the metric and what was last written to it.
        self._written: dict[tuple[str, ...], tuple[Any, float | None]] = {}

    def close(self) -> None:
        """Let go of all metrics, then of the number under which they were reported."""
        self._written.clear()
        self._families.clear()
        self._overlap.release()

    def gauge(self, name: str, description: str, value: float, **labels: str) -> None:
        metric, written = self._metric(name, pb_utils.MetricFamily.GAUGE, description, labels)
        if written is None:  # it may still have the value of a stub that was killed
            metric.set(value)
        elif written != value:
            # Not set(): it waits for Triton server with the GIL, and for ever where that has died (seen with 2.51).
            metric.increment(value - written)
        if written != value:
            self._written[(name, *labels.values())] = (metric, value)

    def counter(self, name: str, description: str, total: float, **labels: str) -> None:
        """`total` is what was counted since this model was loaded."""
        metric, written = self._metric(name, pb_utils.MetricFamily.COUNTER, description, labels)
        if total > (written or 0):
            metric.increment(total - (written or 0))
            self._written[(name, *labels.values())] = (metric, total)

    def histogram(self, name: str, description: str, histogram: Histogram) -> None:
        numbers = list(accumulate(histogram.counts))
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        for bound, number in zip(bounds, numbers, strict=True):
            self.counter(f"{name}_bucket", f"{description}, up to `le`", number, le=bound)
        self.counter(f"{name}_sum", f"{description}, sum", histogram.total)
        self.counter(f"{name}_count", f"{description}, number", numbers[-1])

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
