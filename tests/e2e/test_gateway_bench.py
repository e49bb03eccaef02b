# SPDX-License-Identifier: Apache-2.0
"""`tandem bench gateway` against a real server: what it reports, not how fast it is."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from tandem_backend.benchmarks.engine_runs import TextsDifferError
from tandem_backend.benchmarks.gateway import GatewayBench, render_gateway, running_gateway
from tandem_backend.errors import TandemError
from tandem_backend.types import Prompt
from tandem_backend.verification.prompts import NamedPrompt

PROMPTS = [
    NamedPrompt("text", Prompt(text="def read_lines(path):\n")),
    NamedPrompt("chat", Prompt(messages=({"role": "user", "content": "What does zip() do?"},))),
]


@pytest.fixture(scope="module")
def bench(server: Any) -> Iterator[GatewayBench]:
    with running_gateway(server.grpc_url) as process:
        yield GatewayBench(server.grpc_url, process, PROMPTS, 8, 2)


def test_both_ways_are_measured_on_the_same_texts(bench: GatewayBench) -> None:
    row = bench.run(1, lambda text: None)
    assert row["streams"] == 2
    assert all(math.isfinite(row[name]) and row[name] > 0 for name in ("grpc_tokens_per_s", "gateway_tokens_per_s"))
    assert "gateway tokens/s" in render_gateway({"rows": [row]})


def test_other_texts_are_no_figures(bench: GatewayBench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def other(self: GatewayBench, prompt: Any) -> tuple[str, int]:
        return "something else", 8

    monkeypatch.setattr(GatewayBench, "_by_http", other)
    with pytest.raises(TextsDifferError):
        bench.run(1, lambda text: None)


def test_a_gateway_that_does_not_start_says_why() -> None:
    with pytest.raises(TandemError, match="backend_url"), running_gateway("nowhere"):
        pass
