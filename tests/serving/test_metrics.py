# SPDX-License-Identifier: Apache-2.0
"""What is written to the server's metrics, and how often."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.pb_utils import Metric
from tandem_backend.errors import InternalError
from tandem_backend.serving import metrics as metrics_module
from tandem_backend.serving.metrics import ALIASES, BLOCK_METRICS, COUNTERS, GAUGES, HISTOGRAMS, Metrics
from tandem_backend.serving.response import FAILED, Ended
from tandem_backend.types import CacheCounters, EngineCounters, FinishReason, RequestStats

LABELS = 'model="tandem",version="1"'
README = Path(__file__).parents[2] / "model_repository" / "README.md"
STATISTICS = {"num_blocks": 8, "num_free_blocks": 6, "num_block_tokens": 16}


def counters(num_rounds: int = 0, drafted: int = 0, accepted: int = 0) -> EngineCounters:
    return EngineCounters(
        num_rounds, 3 * num_rounds, {"mtp": (drafted, accepted)}, {"prefix": CacheCounters(2 * num_rounds, 1, 64, 0)}
    )


def numbers(registry: dict[str, Metric]) -> dict[str, float]:
    return {name.replace(f"{{{LABELS}", "{").replace("{,", "{"): metric.number for name, metric in registry.items()}


def written(registry: dict[str, Metric], before: dict[str, int]) -> set[str]:
    return {name.partition("{")[0] for name, metric in registry.items() if metric.num_writes > before[name]}


def num_writes(registry: dict[str, Metric]) -> dict[str, int]:
    return {name: metric.num_writes for name, metric in registry.items()}


def test_statistics_are_gauges_and_work_is_counted(registry: dict[str, Metric]) -> None:
    metrics = Metrics("tandem", "1")
    metrics.update({"num_active": 2, "self_test_passed": 1, "cache_hits_total": 3}, counters(4, 8, 6))
    for outcome in (FinishReason.STOP, FAILED, FinishReason.STOP):
        metrics.end_request(Ended(outcome, is_streaming=True))
    metrics.update({"num_active": 0, "self_test_passed": 1, "cache_hits_total": 5}, counters(5, 10, 6))
    found = numbers(registry)
    expected = {
        "tandem_num_active{}": 0,
        "vllm:num_requests_running{}": 0,
        "tandem_self_test_passed{}": 1,
        "tandem_cache_hits_total{}": 5,
        "tandem_rounds_total{}": 5,
        "tandem_output_tokens_total{}": 15,
        "vllm:generation_tokens_total{}": 15,
        'tandem_draft_tokens_total{drafter="mtp"}': 10,
        'tandem_cache_hits_total{cache="prefix"}': 10,
        'tandem_cache_saved_tokens_total{cache="prefix"}': 64,
        'tandem_ended_sessions_total{reason="idle"}': 0,
        'tandem_accepted_draft_tokens_total{drafter="mtp"}': 6,
        'tandem_requests_total{outcome="stop"}': 2,
        'tandem_requests_total{outcome="length"}': 0,
        'tandem_requests_total{outcome="cancelled"}': 0,
        'tandem_requests_total{outcome="timeout"}': 0,
        'tandem_requests_total{outcome="error"}': 1,
    }
    assert {name: found[name] for name in expected} == expected


def test_histograms_count_what_lies_up_to_each_bound(registry: dict[str, Metric]) -> None:
    metrics = Metrics("tandem", "1")
    work = counters()
    for rows, number in ((1, 2), (2, 1), (5, 1), (5000, 1)):
        work.round_rows.observe(rows, number)
    metrics.update(STATISTICS, work)
    found = numbers(registry)
    buckets = {le: found[f'tandem_round_rows_bucket{{le="{le}"}}'] for le in ("1", "2", "4", "8", "1024", "+Inf")}
    assert buckets == {"1": 2, "2": 3, "4": 3, "8": 4, "1024": 4, "+Inf": 5}
    assert (found["tandem_round_rows_sum{}"], found["tandem_round_rows_count{}"]) == (5009, 5)
    work.round_rows.observe(2)
    before = num_writes(registry)
    metrics.update(STATISTICS, work)
    assert written(registry, before) == {f"tandem_round_rows_{part}" for part in ("bucket", "sum", "count")}
    assert numbers(registry)['tandem_round_rows_bucket{le="1"}'] == 2


def test_a_request_that_ran_is_measured(registry: dict[str, Metric]) -> None:
    now = time.time_ns()
    stats = RequestStats(
        num_prompt_tokens=30,
        num_cached_tokens=20,
        num_output_tokens=4,
        arrival_time_ns=now - 2_000_000_000,
        first_scheduled_time_ns=now - 1_500_000_000,
        first_token_time_ns=now - 1_000_000_000,
    )
    metrics = Metrics("tandem", "1")
    metrics.end_request(Ended(FinishReason.LENGTH, False, stats))
    metrics.end_request(Ended(FAILED, False, None, InternalError("never ran")))
    metrics.update(STATISTICS, counters())
    found = numbers(registry)
    assert found["tandem_prompt_tokens_total{}"] == found["vllm:prompt_tokens_total{}"] == 30
    assert found["tandem_cached_prompt_tokens_total{}"] == 20
    sums = {"queue": 0.5, "time_to_first_token": 1.0}
    assert {name: found[f"tandem_{name}_seconds_sum{{}}"] for name in sums} == sums
    assert 2.0 <= found["tandem_request_seconds_sum{}"] < 10
    for name in ("tandem_request_seconds", "vllm:e2e_request_latency_seconds", "tandem_request_output_tokens"):
        assert found[f"{name}_count{{}}"] == 1
    assert found['vllm:time_to_first_token_seconds_bucket{le="0.75"}'] == 0
    assert found['vllm:time_to_first_token_seconds_bucket{le="1"}'] == 1


def test_blocks_are_told_under_the_name_that_gateways_read(registry: dict[str, Metric]) -> None:
    Metrics("tandem", "1").update(STATISTICS, counters())
    found = numbers(registry)
    types = {"used": 2, "free": 6, "max": 8, "tokens_per": 16, "fraction": 0.25}
    assert {name: found[f'{BLOCK_METRICS}{{kv_cache_block_type="{name}"}}'] for name in types} == types
    assert found["vllm:kv_cache_usage_perc{}"] == 0.25


def test_only_what_changed_is_written(registry: dict[str, Metric]) -> None:
    metrics = Metrics("tandem", "1")
    metrics.update({"num_active": 2, "num_sessions": 0}, counters(4, 8, 6))
    before = num_writes(registry)
    metrics.update({"num_active": 2, "num_sessions": 1}, counters(4, 9, 6))
    assert written(registry, before) == {"tandem_num_sessions", "tandem_draft_tokens_total"}


def test_histograms_and_ends_are_written_less_often_while_requests_run(
    registry: dict[str, Metric], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(time_ns=time.time_ns, monotonic=lambda: now[0]))
    metrics = Metrics("tandem", "1")
    work = counters(1)

    def update(num_active: int) -> set[str]:
        """What is written after one more round and one more request."""
        work.num_rounds += 1
        work.round_rows.observe(1)
        metrics.end_request(Ended(FinishReason.STOP, is_streaming=True))
        before = num_writes(registry)
        metrics.update({"num_active": num_active}, work)
        return written(registry, before or dict.fromkeys(registry, 0))

    rare = {"tandem_round_rows_count", "tandem_requests_total"}
    assert update(2) > rare
    now[0] += 4
    assert update(2) == {"tandem_rounds_total"}
    now[0] += 1
    assert update(2) > rare
    assert update(0) > rare
    assert numbers(registry)['tandem_requests_total{outcome="stop"}'] == 4


def test_after_a_killed_stub_gauges_are_set_and_counting_goes_on(registry: dict[str, Metric]) -> None:
    Metrics("tandem", "1").update({"num_sessions": 7}, counters(4, 8, 6))
    Metrics("tandem", "1").update({"num_sessions": 0}, counters(1, 2, 0))
    assert registry[f"tandem_num_sessions{{{LABELS}}}"].number == 0
    assert registry[f"tandem_rounds_total{{{LABELS}}}"].number == 5


def test_stubs_that_overlap_share_no_series(registry: dict[str, Metric]) -> None:
    """Triton server (2.51) would delete a shared one under the stub that goes on."""
    stubs = [Metrics("tandem", "1") for _ in range(3)]
    other_model = Metrics("other", "1")
    for number, stub in enumerate([*stubs, other_model]):
        stub.update({"num_sessions": number}, counters())
    sessions = {name: metric.number for name, metric in registry.items() if name.startswith("tandem_num_sessions")}
    assert sessions == {
        f"tandem_num_sessions{{{LABELS}}}": 0,
        f'tandem_num_sessions{{{LABELS},overlap="1"}}': 1,
        f'tandem_num_sessions{{{LABELS},overlap="2"}}': 2,
        'tandem_num_sessions{model="other",version="1"}': 3,
    }
    stubs[1].close()
    Metrics("tandem", "1").update({"num_sessions": 9}, counters())  # the least number that is free
    assert registry[f'tandem_num_sessions{{{LABELS},overlap="1"}}'].number == 9


def test_labels_take_few_values(registry: dict[str, Metric]) -> None:
    """No value comes from a request: the number of series does not grow with the load."""
    metrics = Metrics("tandem", "1")
    for reason in FinishReason:
        metrics.end_request(Ended(reason, True, RequestStats()))
    metrics.update(dict.fromkeys([*GAUGES, "some_new_total"], 1.0), counters(1, 1, 1))
    series = set(registry)
    for _ in range(3):
        metrics.end_request(Ended(FAILED, True, RequestStats(num_prompt_tokens=7), InternalError("x")))
        metrics.update(dict.fromkeys([*GAUGES, "some_new_total"], 2.0), counters(2, 3, 2))
    assert set(registry) == series
    labels = {label for name in series for label in re.findall(r'(\w+)="', name)}
    assert labels == {"model", "version", "outcome", "reason", "drafter", "cache", "le", "kv_cache_block_type"}


def test_a_value_of_time_or_memory_has_its_unit_in_its_name() -> None:
    for name in (*COUNTERS, *HISTOGRAMS, *GAUGES):
        assert not re.search(r"_(s|ms|ns|time|latency|size)$", name), name


@pytest.mark.parametrize("table", ["COUNTERS", "HISTOGRAMS", "GAUGES", "ALIASES"])
def test_every_family_is_described(table: str) -> None:
    families: Any = getattr(metrics_module, table)
    names = families.values() if families is ALIASES else families
    prefix = "tandem_" if families is GAUGES else ""
    text = README.read_text(encoding="utf-8")
    assert [name for name in names if f"`{prefix}{name}`" not in text] == []
