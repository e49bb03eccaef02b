# SPDX-License-Identifier: Apache-2.0
"""What the tests of docker/ share: its files, tools that may be missing, and the metrics that queries name."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
TOOLS = ROOT / ".venv" / "deploy_tools"
GATEWAY_EXIT_S = 20  # after its drain: it ends the conversations in the backend and writes its journal
GATEWAY_PREFIX = "tandem_gateway_"  # of the gateway's own metrics; all others are Triton server's

_OPERATORS = {"and", "or", "unless"}
_GROUPING = re.compile(r"\b(?:by|on)\s*\([^)]*\)")
# A name that nothing in parentheses follows: those are functions.
_SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)(?![\w:])(?!\s*\()\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def tool(name: str) -> str:
    """The path of a program that scripts/install_deploy_tools brings; without it the test is skipped."""
    found = shutil.which(name) or shutil.which(name, path=str(TOOLS))
    if found is None:
        pytest.skip(f"{name} is not here: scripts/install_deploy_tools brings it")
    return found


def run(*command: str | Path) -> str:
    """The command's output, both kinds; fails the test with it where the command does. Programs of .venv go first."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def selectors(query: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """The name and the label matchers of each metric in a query, without matchers of a dashboard's variables."""
    text = re.sub(r"\[[^\]]*\]", "", query)  # ranges
    for name, labels in _SELECTOR.findall(_GROUPING.sub(" ", text)):
        if name not in _OPERATORS:
            yield name, [match for match in _MATCHER.findall(labels) if not match[2].startswith("$")]


def queries() -> list[str]:
    """All that the dashboard and the alerts ask of Prometheus."""
    dashboard = json.loads((DOCKER / "grafana" / "dashboards" / "tandem.json").read_text(encoding="utf-8"))
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    groups = load(DOCKER / "prometheus" / "rules.yaml")["groups"]
    return [*targets, *(rule["expr"] for group in groups for rule in group["rules"])]


def unanswered(exposition: str, *, by_gateway: bool = False) -> set[str]:
    """The metrics, with their labels, that a query asks for and a server's, or a gateway's, /metrics does not have."""
    samples = [
        (name, dict(re.findall(r'(\w+)="([^"]*)"', labels)))
        for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", exposition, re.MULTILINE)
    ]
    asked = {(name, tuple(matchers)) for query in queries() for name, matchers in selectors(query)}
    return {
        f"{name}{list(matchers)}"
        for name, matchers in asked
        if name != "up"  # Prometheus's own
        and name.startswith(GATEWAY_PREFIX) == by_gateway
        and not any(name == found and _match(matchers, labels) for found, labels in samples)
    }


def _match(matchers: tuple[tuple[str, str, str], ...], labels: dict[str, str]) -> bool:
    return all(_matches(operator, value, labels.get(label, "")) for label, operator, value in matchers)


def _matches(operator: str, wanted: str, found: str) -> bool:
    is_equal = re.fullmatch(wanted, found) is not None if operator.endswith("~") else wanted == found
    return is_equal == operator.startswith("=")
