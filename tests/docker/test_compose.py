# SPDX-License-Identifier: Apache-2.0
"""compose.yaml against the Compose Specification's schema, its own files, and .env.example."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from deployments import DOCKER, GATEWAY_EXIT_S, load
from tandem_backend.config import EngineConfig

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


def test_a_server_may_drain_before_it_is_killed_and_is_judged_by_its_heartbeat() -> None:
    exit_timeout_s = next(int(a.split("=")[1]) for a in SERVERS[0]["command"] if a.startswith("--exit-timeout="))
    assert _seconds(SERVERS[0]["stop_grace_period"]) >= exit_timeout_s + 30
    assert SERVERS[0]["healthcheck"]["test"][:3] == ["CMD", "tandem", "health"]
    assert SERVERS[0]["init"] is True


def test_the_gateway_may_drain_before_it_is_killed() -> None:
    gateway = COMPOSE["services"]["gateway"]
    drain_s = float(gateway["environment"]["TANDEM_GATEWAY_DRAIN_S"])
    assert _seconds(gateway["stop_grace_period"]) >= drain_s + GATEWAY_EXIT_S


def test_prometheus_scrapes_what_is_there() -> None:
    """Each target is a name of the network, and the port one that its services publish."""
    names = {alias: service for service in SERVERS for alias in service["networks"]["default"]["aliases"]}
    names |= COMPOSE["services"]
    targets = []
    for job in load(DOCKER / "prometheus" / "prometheus.yaml")["scrape_configs"]:
        for found in job.get("dns_sd_configs", []):
            targets += [(name, str(found["port"])) for name in found["names"]]
        for static in job.get("static_configs", []):
            targets += [tuple(target.split(":")) for target in static["targets"]]
    assert len(targets) == 2
    for name, port in targets:
        assert port in [published.rsplit(":", 1)[1] for published in names[name]["ports"]]


def test_the_settings_of_the_engine_are_valid(tmp_path: Path) -> None:
    settings = EngineConfig(**json.loads((DOCKER / "engine.json").read_text(encoding="utf-8")))
    state = next(volume for volume in SERVERS[0]["volumes"] if volume.startswith("state:")).split(":")[1]
    assert Path(str(settings.disk_cache)).is_relative_to(state)
