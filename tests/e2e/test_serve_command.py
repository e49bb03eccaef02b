# SPDX-License-Identifier: Apache-2.0
"""`tandem serve` as a user runs it: a real Triton server over a repository with one small model."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from deployments import DOCKER
from running_server import running_server
from tandem_backend.serving.launcher import TritonServer
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

GUIDE = (DOCKER / "OPERATIONS.md").read_text(encoding="utf-8")
TANDEM = Path(sys.executable).parent / "tandem"
READY_S = 60
EXIT_S = 30
KEY = "repository-key-of-the-tests"
CONFIG = """
backend: "python"
max_batch_size: 0
input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]
"""
MODEL = """
class TritonPythonModel:
    def initialize(self, args):
        STATEMENT
    def execute(self, requests):
        return []
"""


def _write_model(repository: Path, statement: str = "pass") -> Path:
    folder = repository / "probe" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(CONFIG)
    (folder / "model.py").write_text(MODEL.replace("STATEMENT", statement))
    return repository


@contextmanager
def _serving(repository: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [TANDEM, "serve", f"--model-repository={repository}", *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Tests that run in a shell's background inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.terminate()  # it stops what it started
        process.communicate(timeout=EXIT_S)


def _wait_ready(process: subprocess.Popen[str]) -> str:
    """The announcement's HTTP address."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.match(r"\s+HTTP\s+http://(\S+)", line):
            return match[1]
    raise AssertionError(f"not ready, exit code {process.wait()}")


def _free_ports() -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@pytest.mark.timeout(READY_S + EXIT_S)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_on_the_ports_until_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    http_port, grpc_port, metrics_port = _free_ports()
    ports = (f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}")
    with _serving(_write_model(tmp_path), *ports) as process:
        assert _wait_ready(process) == f"127.0.0.1:{http_port}"
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/v2/models/probe/ready") as response:
            assert response.status == 200
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as response:
            assert b"nv_inference_request_success" in response.read()
        socket.create_connection(("127.0.0.1", grpc_port)).close()
        started = psutil.Process(process.pid).children(recursive=True)
        assert {"tritonserver", "triton_python_backend_stub"} <= {Path(child.exe()).name for child in started}

        process.send_signal(number)
        output, _ = process.communicate(timeout=EXIT_S)
        assert process.returncode == 0, output
        _, alive = psutil.wait_procs(started, timeout=5)
        assert alive == []
        assert not list(Path("/dev/shm").glob(f"tandem_{process.pid}_*"))


@pytest.mark.timeout(EXIT_S)
def test_a_taken_port_fails_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begun = time.monotonic()
        with _serving(_write_model(tmp_path), "--http-port=0", f"--grpc-port={port}", "--metrics-port=0") as process:
            output, _ = process.communicate(timeout=EXIT_S)
    assert process.returncode == 1
    assert output.startswith(f"Error: --grpc-port {port}: can't listen on 127.0.0.1:{port}")
    assert time.monotonic() - begun < 10


@pytest.mark.timeout(READY_S + EXIT_S)
def test_arguments_after_the_dashes_go_to_the_server(tmp_path: Path) -> None:
    free = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    with _serving(_write_model(tmp_path), *free, "--", "--model-control-mode=explicit") as process:
        address = _wait_ready(process)
        request = urllib.request.Request(f"http://{address}/v2/repository/index", method="POST")
        with urllib.request.urlopen(request) as response:
            assert json.load(response) == [{"name": "probe"}]
        process.terminate()
        process.communicate(timeout=EXIT_S)


def _status(server: TritonServer, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(server.http_url, timeout=READY_S)
    connection.request("GET", "/v2/logging", headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.fixture
def restricted(tmp_path: Path) -> Iterator[TritonServer]:
    """A server with the restrictions that the operator's guide writes."""
    arguments = GUIDE.split("tandem serve ... -- ")[1].split("```")[0].replace("\\\n", " ").split()
    with running_server(_write_model(tmp_path), extra_args=arguments, repository_key=KEY) as server:
        yield server


@pytest.mark.timeout(READY_S + EXIT_S)
def test_the_guide_s_restrictions_hold(restricted: TritonServer) -> None:
    """Who has the header is served, nobody else, over HTTP and over gRPC."""
    assert [_status(restricted, headers) for headers in ({}, {"admin-key": "SECRET"})] == [403, 200]
    with InferenceServerClient(restricted.grpc_url) as client:
        client.get_log_settings(headers={"triton-grpc-protocol-admin-key": "SECRET"})
        client.get_model_repository_index(headers={"triton-grpc-protocol-tandem-model-repository-key": KEY})
        for call in (client.get_log_settings, client.get_model_repository_index):
            with pytest.raises(InferenceServerException, match=r"UNAVAILABLE.*protocol is restricted"):
                call(headers={"admin-key": "SECRET", "tandem-model-repository-key": KEY})
    (load,) = re.findall(r"^curl .*/load$", GUIDE, re.MULTILINE)
    for old, new in (("curl", "curl -s -o /dev/null -w '%{http_code}'"), ("localhost:8000", restricted.http_url)):
        load = load.replace(old, new)
    load = load.replace("models/tandem/", "models/probe/")
    for key, status in ((KEY, "200"), ("", "403")):
        env = os.environ | {"TANDEM_REPOSITORY_KEY": key}
        result = subprocess.run(["bash", "-c", load], env=env, capture_output=True, text=True, check=True)
        assert result.stdout == status


@pytest.mark.timeout(READY_S + EXIT_S)
def test_a_model_that_does_not_load_ends_it_with_the_reason(tmp_path: Path) -> None:
    repository = _write_model(tmp_path, "raise ValueError('max_active: must be 1 or more')")
    with _serving(repository, "--http-port=0", "--grpc-port=0", "--metrics-port=0") as process:
        output, _ = process.communicate(timeout=READY_S)
    assert process.returncode == 1
    assert "failed to load 'probe'" in output
    assert "max_active: must be 1 or more" in output
    assert "Error: Triton server exited with code 1 before it was ready" in output
