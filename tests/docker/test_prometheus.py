# SPDX-License-Identifier: Apache-2.0
"""Prometheus's own tool on our configuration and alerts: series that raise each alert, and series that don't."""

from typing import Any

import pytest
import yaml
from deployments import DOCKER, load, run, tool

FOLDER = DOCKER / "prometheus"
ALERTS = [rule["alert"] for group in load(FOLDER / "rules.yaml")["groups"] for rule in group["rules"]]


def _cases(alert: str) -> list[dict[str, Any]]:
    tests = load(FOLDER / "rules_test.yaml")["tests"]
    return [case for test in tests for case in test["alert_rule_test"] if case["alertname"] == alert]


def test_the_configuration_and_its_rules_are_valid() -> None:
    assert f"{len(ALERTS)} rules found" in run(tool("promtool"), "check", "config", FOLDER / "prometheus.yaml")


def test_the_alerts_fire_when_they_should_and_only_then() -> None:
    assert "SUCCESS" in run(tool("promtool"), "test", "rules", FOLDER / "rules_test.yaml")


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_is_shown_to_fire_and_to_be_silent(alert: str) -> None:
    numbers = [len(case["exp_alerts"]) for case in _cases(alert)]
    assert 0 in numbers
    assert max(numbers) > 0


@pytest.mark.parametrize("alert", ALERTS)
def test_the_operators_guide_explains_each_alert(alert: str) -> None:
    assert f"| `{alert}` |" in (DOCKER / "OPERATIONS.md").read_text(encoding="utf-8")


def test_a_changed_threshold_is_noticed(tmp_path: Any) -> None:
    """The tests of the rules are sharp: with another limit on the heartbeat's age they fail."""
    promtool = tool("promtool")
    rules = (FOLDER / "rules.yaml").read_text(encoding="utf-8")
    assert rules.count("[1h])) > 30") == 1
    (tmp_path / "rules.yaml").write_text(rules.replace("[1h])) > 30", "[1h])) > 3000"))
    cases = load(FOLDER / "rules_test.yaml")
    cases["tests"] = [test for test in cases["tests"] if test["name"] == "heartbeat"]
    (tmp_path / "rules_test.yaml").write_text(yaml.safe_dump(cases))
    with pytest.raises(AssertionError, match="TandemHeartbeatLost"):
        run(promtool, "test", "rules", tmp_path / "rules_test.yaml")
