# SPDX-License-Identifier: Apache-2.0
"""docker/smoke.sh and the scripts that the images are made by, without Docker."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from deployments import DOCKER, ROOT

STEPS = ("start", "ready", "stream", "cancel", "gateway", "unload", "stop", "passed")
TANDEM = Path(sys.executable).parent / "tandem"


def _free_ports(number: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@contextmanager
def _gateway(tandem: Path, grpc: int, port: int) -> Iterator[None]:
    """A gateway as its image starts it, with the settings of compose."""
    settings = {"BACKEND_URL": f"127.0.0.1:{grpc}", "HOST": "127.0.0.1", "PORT": str(port), "DRAIN_S": "30"}
    env = {f"TANDEM_GATEWAY_{name}": value for name, value in settings.items()}
    process = subprocess.Popen([tandem, "gateway"], env=os.environ | env, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0


def _smoke(tandem: Path, *arguments: str, gateway: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """smoke.sh with a server of one `tandem`, and with the gateway of another."""
    http, grpc, metrics, port = _free_ports(4)
    ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
    serve = (str(tandem), "serve", f"--model-repository={ROOT / 'model_repository'}", *ports, *arguments)
    where = {"SMOKE_HTTP": f"127.0.0.1:{http}", "SMOKE_METRICS": f"127.0.0.1:{metrics}", "SMOKE_READY_S": "120"}
    command = [DOCKER / "smoke.sh", *serve]
    with ExitStack() as stack:
        if gateway is not None:
            where["SMOKE_GATEWAY"] = f"127.0.0.1:{port}"
            stack.enter_context(_gateway(gateway, grpc, port))
        return subprocess.run(command, env=os.environ | where | env, capture_output=True, text=True, check=False)


@pytest.mark.timeout(180)
def test_a_server_that_works_passes() -> None:
    result = _smoke(TANDEM, "--exit-timeout=5", gateway=TANDEM)
    steps = [line for line in result.stdout.splitlines() if line.startswith("smoke: ")]
    assert result.returncode == 0, result.stderr
    assert steps == [f"smoke: {step}" for step in STEPS]


@pytest.mark.timeout(60)
def test_a_server_that_does_not_start_fails_with_the_step(tmp_path: Path) -> None:
    result = _smoke(TANDEM, f"--triton-server={tmp_path}")
    assert result.returncode == 1
    assert "smoke: ready: the server has exited" in result.stderr


def test_a_server_of_somebody_else_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"127.0.0.1:{other.getsockname()[1]}"
        answering = threading.Thread(target=_answer_once, args=(other,))
        answering.start()
        result = _smoke(TANDEM, SMOKE_HTTP=url)
        answering.join()
    assert (result.returncode, result.stderr) == (1, f"smoke: start: something answers at {url} already\n")


def _answer_once(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def test_compose_that_fails_is_a_failed_start(tmp_path: Path) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 125\n")
    (tmp_path / "docker").chmod(0o755)
    (http,) = _free_ports(1)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SMOKE_HTTP": f"127.0.0.1:{http}"}
    result = subprocess.run([DOCKER / "smoke.sh"], env=env, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "smoke: start: it did not start\n")


def test_the_install_script_says_what_it_takes(tmp_path: Path) -> None:
    for arguments, message in (
        ([], "VENV is missing"),
        ([tmp_path / "new", "everything"], "PART must be backend or gateway, got everything"),
        ([tmp_path, "backend"], f"{tmp_path} is there already"),
    ):
        command = [DOCKER / "install.sh", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode != 0
        assert message in result.stderr
    assert not (tmp_path / "new").exists()


def _run(*command: str | Path, **env: str) -> None:
    result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_images_scripts_make_a_server_that_passes(tmp_path: Path) -> None:
    """The Dockerfile's own steps: Tandem as wheels in new environments, and what it takes of a Triton server.

    The server is the wheel's, laid out as NVIDIA's image has it. Docker, its base images and apt have no part in this.
    """
    venv, image, server = tmp_path / "venv", tmp_path / "image", tmp_path / "opt" / "tritonserver"
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    gateway = tmp_path / "gateway"
    _run(DOCKER / "install.sh", venv, "backend", "server", PYTHON=str(python))
    _run(DOCKER / "install.sh", gateway, "gateway", PYTHON=str(python))
    assert not list((gateway / "lib" / python.name / "site-packages").glob("torch*"))
    packages = venv / "lib" / python.name / "site-packages"
    assert not list(packages.glob("__editable__*"))
    assert (packages / "tandem_backend" / "commands" / "health.py").is_file()

    wheel = packages / "pytriton" / "tritonserver"
    shutil.copytree(wheel, image, ignore=shutil.ignore_patterns("python_backend_stubs", "caches"))
    stub = wheel / "python_backend_stubs" / f"3.{sys.version_info.minor}" / "triton_python_backend_stub"
    shutil.copy(stub, image / "backends" / "python")
    _run(DOCKER / "collect_server.sh", image, server, LD_LIBRARY_PATH=str(packages / "nvidia_pytriton.libs"))
    shutil.rmtree(packages / "pytriton")
    shutil.rmtree(packages / "nvidia_pytriton.libs")

    libraries = str(server / "libraries")
    result = _smoke(
        *(venv / "bin" / "tandem", "--exit-timeout=5", f"--triton-server={server}"),
        gateway=gateway / "bin" / "tandem",
        LD_LIBRARY_PATH=libraries,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "smoke: gateway\n" in result.stdout
