# SPDX-License-Identifier: Apache-2.0
"""What is written to the server's metrics, and how often."""

from pathlib import Path

from fakes.pb_utils import Metric
from tandem_backend.serving.metrics import COUNTERS, Metrics
from tandem_backend.types import EngineCounters

LABELS = 'model="tandem",version="1"'
README = Path(__file__).parents[2] / "model_repository" / "README.md"


def counters(num_rounds: int, drafted: int, accepted: int) -> EngineCounters:
    return EngineCounters(num_rounds, 3 * num_rounds, {"mtp": (drafted, accepted)})


def numbers(registry: dict[str, Metric]) -> dict[str, float]:
    return {name.replace(f"{{{LABELS}", "{"): metric.number for name, metric in registry.items()}


def test_statistics_are_gauges_and_work_is_counted(registry: dict[str, Metric]) -> None:
    metrics = Metrics("tandem", "1")
    metrics.update({"num_active": 2, "self_test_passed": 1}, counters(4, 8, 6))
    metrics.count_request("stop")
    metrics.count_request("error")
    metrics.count_request("stop")
    metrics.update({"num_active": 0, "self_test_passed": 1}, counters(5, 10, 6))
    assert numbers(registry) == {
        "tandem_num_active{}": 0,
        "tandem_self_test_passed{}": 1,
        "tandem_rounds_total{}": 5,
        "tandem_output_tokens_total{}": 15,
        'tandem_draft_tokens_total{,drafter="mtp"}': 10,
        'tandem_accepted_draft_tokens_total{,drafter="mtp"}': 6,
        'tandem_requests_total{,outcome="stop"}': 2,
        'tandem_requests_total{,outcome="length"}': 0,
        'tandem_requests_total{,outcome="cancelled"}': 0,
        'tandem_requests_total{,outcome="timeout"}': 0,
        'tandem_requests_total{,outcome="error"}': 1,
    }


def test_only_what_changed_is_written(registry: dict[str, Metric]) -> None:
    metrics = Metrics("tandem", "1")
    metrics.update({"num_active": 2, "num_queued": 0}, counters(4, 8, 6))
    before = {name: metric.num_writes for name, metric in registry.items()}
    metrics.update({"num_active": 2, "num_queued": 1}, counters(4, 9, 6))
    written = {name.partition("{")[0] for name, metric in registry.items() if metric.num_writes > before[name]}
    assert written == {"tandem_num_queued", "tandem_draft_tokens_total"}


def test_a_reloaded_model_sets_its_gauges_and_goes_on_counting(registry: dict[str, Metric]) -> None:
    Metrics("tandem", "1").update({"num_sessions": 7}, counters(4, 8, 6))
    Metrics("tandem", "1").update({"num_sessions": 0}, counters(1, 2, 0))
    assert registry[f"tandem_num_sessions{{{LABELS}}}"].number == 0
    assert registry[f"tandem_rounds_total{{{LABELS}}}"].number == 5


def test_every_counter_is_described() -> None:
    text = README.read_text(encoding="utf-8")
    assert [name for name in COUNTERS if f"`{name}`" not in text] == []
