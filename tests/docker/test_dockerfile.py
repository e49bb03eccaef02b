# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile by hadolint, scripts by shellcheck, and what the files say about the images, which no test builds."""

import re
from pathlib import Path
from typing import Any

import pytest
from deployments import DOCKER, ROOT, load, run

LINES = (DOCKER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
SCRIPTS = [*sorted(DOCKER.rglob("*.sh")), ROOT / "scripts" / "install_deploy_tools"]
FINAL = ("cpu", "cuda", "gateway")


def _stages() -> dict[str, list[str]]:
    """By stage: the instructions of all stages that it is made from, its own last."""
    stages: dict[str, list[str]] = {}
    name = ""
    for line in LINES:
        if match := re.match(r"FROM (\S+) AS (\S+)$", line):
            name = match[2]
            stages[name] = list(stages.get(match[1], []))
        elif name and line.strip() and not line.startswith("#"):
            stages[name].append(line)
    return stages


def test_hadolint_finds_nothing() -> None:
    assert run("hadolint", "--no-color", DOCKER / "Dockerfile") == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    assert run("shellcheck", script) == ""
    assert script.stat().st_mode & 0o111


@pytest.mark.parametrize("target", FINAL)
def test_an_image_runs_as_nobody_and_says_when_it_is_well(target: str) -> None:
    instructions = _stages()[target]
    users = [line for line in instructions if line.startswith("USER ")]
    assert users[-1] == "USER 10001:10001"
    assert any(line.startswith("HEALTHCHECK ") for line in instructions)
    assert 'ENTRYPOINT ["tandem"]' in instructions


@pytest.mark.parametrize("target", FINAL)
def test_an_image_has_the_package_as_it_was_installed_and_no_source(target: str) -> None:
    copied = [line for line in _stages()[target] if line.startswith("COPY ")]
    part = f"install-{target}"
    assert f"COPY --from={part} /opt/tandem /opt/tandem" in copied
    assert all("--from=" in line or line == "COPY model_repository /models" for line in copied)
    assert any("docker/install.sh /opt/tandem" in line for line in _stages()[part])


def test_what_is_copied_is_there_and_let_into_the_context() -> None:
    ignore = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    sources: set[str] = set()
    for line in LINES:
        if line.startswith("COPY ") and "--from=" not in line:
            sources |= set(line.split()[1:-1])
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_versions_are_arguments_with_the_defaults_of_compose() -> None:
    defaults = dict(line.removeprefix("ARG ").split("=", 1) for line in LINES if line.startswith("ARG "))
    services: dict[str, Any] = load(DOCKER / "compose.yaml")["services"]
    for name, value in services["triton-cpu"]["build"]["args"].items():
        assert value == f"${{{name}:-{defaults[name]}}}"


def test_each_expose_is_a_port_of_compose() -> None:
    stages = _stages()
    services = load(DOCKER / "compose.yaml")["services"]
    for target, service in (("cpu", "triton-cpu"), ("gateway", "gateway")):
        exposed = next(line.split()[1:] for line in stages[target] if line.startswith("EXPOSE "))
        assert exposed == [port.rsplit(":", 1)[1] for port in services[service]["ports"]]
