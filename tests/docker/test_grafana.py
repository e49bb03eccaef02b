# SPDX-License-Identifier: Apache-2.0
"""The dashboard hangs together, and is where Grafana looks for it."""

import json
from itertools import combinations
from typing import Any

from deployments import DOCKER, GATEWAY_PREFIX, load, selectors

FOLDER = DOCKER / "grafana"
DASHBOARD = json.loads((FOLDER / "dashboards" / "tandem.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for one, other in combinations((panel["gridPos"] for panel in PANELS), 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)


def test_every_query_goes_to_the_chosen_source_and_obeys_the_variables() -> None:
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "instance", "model"}
    for panel in PANELS:
        if panel["type"] == "row":
            continue
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            for name, _ in selectors(target["expr"]):
                chosen = f'{name}{{instance=~"$instance", model=~"$model"' in target["expr"]
                assert chosen or name == "up" or name.startswith(GATEWAY_PREFIX)


def test_the_dashboard_is_provisioned() -> None:
    """Grafana's configuration and compose.yaml mean the same folders."""
    (provider,) = load(FOLDER / "provisioning" / "dashboards" / "tandem.yaml")["providers"]
    volumes = load(DOCKER / "compose.yaml")["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in volumes
    assert "./grafana/provisioning:/etc/grafana/provisioning:ro" in volumes
    (source,) = load(FOLDER / "provisioning" / "datasources" / "prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in load(DOCKER / "compose.yaml")["services"]
