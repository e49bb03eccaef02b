# SPDX-License-Identifier: Apache-2.0
"""The gateway's own metrics, for Prometheus. The engine's are at Triton server's /metrics."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tandem_client.gateway.calls import Call
from tandem_client.types import NS_PER_S

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counts requests and what came of them; each gateway has a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix, registry = "tandem_gateway_", self.registry
        self._requests = Counter(f"{prefix}requests", "Requests by status.", ["path", "status"], registry=registry)
        self._running = Gauge(f"{prefix}running_requests", "Requests that run.", registry=registry)
        self._calls = Counter(
            f"{prefix}calls", "Backend requests by outcome.", ["endpoint", "outcome"], registry=registry
        )
        self._tokens = Counter(f"{prefix}tokens", "Tokens of ended answers.", ["kind", "key"], registry=registry)
        self._first = Histogram(
            f"{prefix}time_to_first_token_seconds", "Until the first token.", buckets=_SECONDS, registry=registry
        )
        self._whole = Histogram(
            f"{prefix}request_seconds", "Of backend requests.", ["endpoint"], buckets=_SECONDS, registry=registry
        )

    def watch(self, name: str, description: str, value: Callable[[], float]) -> None:
        """A gauge whose value is asked for when it is read."""
        Gauge(f"tandem_gateway_{name}", description, registry=self.registry).set_function(value)

    def began(self) -> None:
        self._running.inc()

    def responded(self, path: str, status: int) -> None:
        """A request has ended; `path` is the route's, never the client's text."""
        self._running.dec()
        self._requests.labels(path, str(status)).inc()

    def ended(self, call: Call) -> None:
        """A backend request has ended."""
        outcome = call.error or next(iter(call.finish_reasons.values()), "incomplete")
        self._calls.labels(call.endpoint, outcome).inc()
        self._whole.labels(call.endpoint).observe((call.ended_ns - call.started_ns) / NS_PER_S)
        if call.first_token_ns:
            self._first.observe((call.first_token_ns - call.started_ns) / NS_PER_S)
        for usage in call.usages.values():
            self._tokens.labels("output", call.key_name).inc(usage.num_output_tokens)
        if usages := list(call.usages.values()):
            self._tokens.labels("prompt", call.key_name).inc(usages[0].num_input_tokens)
            self._tokens.labels("cached", call.key_name).inc(usages[0].num_cached_tokens)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
