# SPDX-License-Identifier: Apache-2.0
"""`tandem bench serving` against a real server: what it reports, not how fast it is."""

import math
from dataclasses import replace
from typing import Any

import pytest
from tandem_backend.benchmarks import serving
from tandem_backend.benchmarks.engine_runs import TextsDifferError
from tandem_backend.benchmarks.serving import ServingBench, render_serving
from tandem_backend.config import load_engine_config
from tandem_backend.types import Prompt
from tandem_backend.verification.prompts import NamedPrompt
from triton_calls import MODEL_REPOSITORY

PROMPTS = [NamedPrompt(str(n), Prompt(text=f"def read_{n}(path):\n")) for n in range(3)]


@pytest.fixture(scope="module")
def bench(server: Any) -> ServingBench:
    config = load_engine_config(MODEL_REPOSITORY / "tandem" / "1" / "engine.json", {"self_test_rows": 0})
    return ServingBench(config, server, PROMPTS, 8, None)


def test_both_sides_are_measured_on_the_same_tokens(bench: ServingBench) -> None:
    rows = bench.run(1, lambda text: None)
    assert [row["streams"] for row in rows] == [1, 8]
    for row in rows:
        rates = [row[name] for name in ("engine_tokens_per_s", "grpc_tokens_per_s", "ratio", "tokens_per_response")]
        first = [row[name] for name in ("engine_first_token_ms", "grpc_first_token_ms")]
        assert all(math.isfinite(figure) and figure > 0 for figure in [*rates, *first])
        assert set(row["grpc_cpu_ms_per_token"]) == {"client", "server", "stub"}
    assert "8 streams" in render_serving({"rows": rows})


def test_other_tokens_are_no_figures(bench: ServingBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PAIRS", {1: 1})
    in_process = bench._in_process

    def other(prompts: Any) -> Any:
        run = in_process(prompts)
        return replace(run, token_ids=[(*ids[:-1], ids[-1] + 1) for ids in run.token_ids])

    monkeypatch.setattr(bench, "_in_process", other)
    with pytest.raises(TextsDifferError):
        bench.run(1, lambda text: None)
