# SPDX-License-Identifier: Apache-2.0
"""Runs one Triton server over a model repository: start, wait until every model is READY, stop with all it left."""

import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tandem_backend.serving.drain import DRAIN_FILE_VARIABLE
from tandem_backend.serving.installation import LaunchError, TritonInstallation, find_triton_server
from tandem_backend.serving.server_api import ServerApi

__all__ = ["LaunchError", "TritonInstallation", "TritonServer", "find_triton_server", "interrupt_on_signals"]

logger = logging.getLogger(__name__)

_POLL_S = 0.1
# Rarely Triton server's Python backend aborts while models load (boost::interprocess::lock_exception).
_MAX_STARTS = 3
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
# A request that tandem_generate forwards holds one of these threads until its first token. With Triton server's 32 the
# 33rd would wait there, unseen by the engine. tandem_generate takes 300 requests at once; the rest is to spare.
_BLS_THREADS = 320
_EXIT_GRACE_S = 15  # the server may take this much longer than its exit timeout
# The models answer the rest at the end of the exit timeout. That has to reach the clients, and the models to unload.
_ANSWER_S = 10
# Lines of the server's log that never say why it failed; a machine without a GPU has the last two.
_NOISE = re.compile(r"[IW]\d{4} |[+|]|\s*$|E\d{4} .*CudaDriverHelper|Error: Failed to initialize NVML")
_SHARED_MEMORY = Path("/dev/shm")


class _StartCrash(LaunchError):
    """The server died by a fault of its own before it was ready."""


class TritonServer:
    """A Triton server process; as a context manager it runs from start() to stop(). Port 0 means any free port.

    The server's and the models' output goes to `log_path` (a temporary file by default), or with `foreground` to
    the caller's own output. `exit_timeout_s` is what running requests get to finish in stop(); then they are answered
    UNAVAILABLE. Models can be loaded and unloaded through `api`, unless `extra_args` set another --model-control-mode,
    and by whoever knows `repository_key`; by default it is a new secret at each start.
    """

    http_url: str  # "HOST:PORT", as are the other two
    grpc_url: str
    metrics_url: str
    api: ServerApi

    def __init__(
        self,
        model_repository: Path,
        *,
        triton_server: str | None = None,
        host: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        log_path: Path | None = None,
        foreground: bool = False,
        extra_args: Sequence[str] = (),
        ready_timeout_s: float = 120,
        exit_timeout_s: int = 5,
        repository_key: str | None = None,
    ) -> None:
        self._model_repository = model_repository
        self._triton_server = triton_server
        self._host = host
        self._ports = {"--http-port": http_port, "--grpc-port": grpc_port, "--metrics-port": metrics_port}
        self._log_path = log_path
        self._foreground = foreground
        self._extra_args = tuple(extra_args)
        self._ready_timeout_s = ready_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._repository_key = repository_key
        # Servers that share /dev/shm must not share names, and what a killed one leaves must be found again.
        self.shm_prefix = f"tandem_{os.getpid()}_{secrets.token_hex(4)}_"
        self._run_dir: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The server's process, of the last run after stop(). Raises RuntimeError before the first."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the server and all its models are ready. One that crashes before is started anew, twice.

        Raises LaunchError when the installation, the model repository or a port can't be used, and, with the lines of
        the log that say why, when the server exits, a model does not load, or `ready_timeout_s` passes.
        """
        if not self._model_repository.is_dir():
            raise LaunchError(f"--model-repository {self._model_repository}: no such folder")
        installation = find_triton_server(self._triton_server)
        installation.check()
        for num_starts in range(1, _MAX_STARTS + 1):
            try:
                self._start_once(installation)
                break
            except _StartCrash as error:
                if num_starts == _MAX_STARTS:
                    raise
                logger.warning("%s\nstarting it anew", error)

    def _start_once(self, installation: TritonInstallation) -> None:
        ports = choose_ports(self._host, self._ports)
        reachable = "127.0.0.1" if self._host == "0.0.0.0" else self._host
        self.http_url, self.grpc_url, self.metrics_url = (f"{reachable}:{port}" for port in ports.values())
        key = self._repository_key or secrets.token_hex(16)
        self.api = ServerApi(self.http_url, self.metrics_url, self.grpc_url, key)
        self._run_dir = Path(tempfile.mkdtemp(prefix="tandem-"))
        try:
            env = installation.environment(os.environ) | {DRAIN_FILE_VARIABLE: str(self._drain_file())}
            self._spawn(self._command(installation, ports), env)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Let the models drain, then the server; what is left after that is killed, its shared memory removed."""
        if self._run_dir is None:
            return
        try:
            if self._process is not None:
                self._drain_file().write_text(str(self._exit_timeout_s))
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._exit_timeout_s + _ANSWER_S + _EXIT_GRACE_S)
        finally:
            self._remove_leftovers()

    def kill(self) -> None:
        """End a server that need not or can't be asked, and remove all that it leaves."""
        if self._run_dir is not None:
            self._remove_leftovers()

    def log_tail(self, num_lines: int = 30) -> str:
        """The last lines of the log that say something about a failure: without notices, tables and blank lines."""
        path = self._log_file()
        if path is None or not path.exists():
            return ""
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([line for line in lines if not _NOISE.match(line)][-num_lines:])

    def _command(self, installation: TritonInstallation, ports: dict[str, int]) -> list[str]:
        assert self._run_dir is not None
        return [
            str(installation.binary),
            f"--model-repository={self._model_repository.absolute()}",
            f"--backend-directory={installation.assemble_backend_dir(self._run_dir)}",
            f"--backend-config=python,thread-pool-size={_BLS_THREADS}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            f"--exit-timeout-secs={self._exit_timeout_s + _ANSWER_S}",
            *self._control_args(),
            *(f"--{name}-address={self._host}" for name in ("http", "grpc", "metrics")),
            *(f"{option}={port}" for option, port in ports.items()),
            *self._extra_args,
        ]

    def _control_args(self) -> list[str]:
        """Explicit control loads all models as well, and lets one be loaded anew."""
        if any(argument.startswith("--model-control-mode") for argument in self._extra_args):
            self.api.key = None
            return []
        return ["--model-control-mode=explicit", "--load-model=*", *self.api.server_args()]

    def _drain_file(self) -> Path:
        assert self._run_dir is not None
        return self._run_dir / "drain"

    def _spawn(self, command: list[str], env: dict[str, str]) -> None:
        path = self._log_file()
        with ExitStack() as stack:
            output = stack.enter_context(path.open("wb")) if path else None
            # A process group of its own: a terminal's Ctrl-C reaches the server once, through stop(), and the group
            # still names the stubs when the server itself is gone.
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def _log_file(self) -> Path | None:
        if self._foreground:
            return None
        return self._log_path or (self._run_dir / "server.log" if self._run_dir else None)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        while not self._is_ready():
            code = self.process.poll()
            if code is not None:
                kind = _StartCrash if code in _CRASHES else LaunchError
                raise self._failure(f"exited with code {code} before it was ready", kind)
            if time.monotonic() > deadline:
                raise self._failure(f"is not ready after {self._ready_timeout_s:g} s")
            time.sleep(_POLL_S)
        models = self.api.models()
        if not models:
            raise LaunchError(f"--model-repository {self._model_repository}: holds no model")
        # A model without a state was not asked for (explicit model control).
        failed = [
            f"{model['name']}: {model.get('reason')}" for model in models if model.get("state", "READY") != "READY"
        ]
        if failed:
            raise self._failure(f"did not load {'; '.join(failed)}")

    def _failure(self, what: str, kind: type[LaunchError] = LaunchError) -> LaunchError:
        return kind(f"Triton server {what}\n{self.log_tail()}".rstrip())

    def _is_ready(self) -> bool:
        if not self.api.is_ready():
            return False
        # The metrics service is the last to start, unless the caller turned it off.
        has_metrics = not any(argument.startswith("--allow-metrics=") for argument in self._extra_args)
        return not has_metrics or self.api.has_metrics()

    def _remove_leftovers(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for region in _SHARED_MEMORY.glob(f"{self.shm_prefix}*"):
            region.unlink(missing_ok=True)
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            self._run_dir = None


def interrupt_on_signals() -> None:
    """SIGTERM and SIGHUP become KeyboardInterrupt, as Ctrl-C is: leaving the `with` stops the server and its stubs."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)


def choose_ports(host: str, wanted: dict[str, int]) -> dict[str, int]:
    """The port for each option; 0 becomes a free one. Raises LaunchError naming the option whose port is taken."""
    fixed = [port for port in wanted.values() if port]
    if len(set(fixed)) < len(fixed):
        raise LaunchError(f"{', '.join(wanted)} must differ, got {', '.join(map(str, wanted.values()))}")
    chosen = {}
    with ExitStack() as stack:  # all stay bound until the last is chosen, so that no port is given twice
        for option, port in wanted.items():
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
            except OSError as error:
                raise LaunchError(f"{option} {port}: can't listen on {host}:{port} ({error.strerror})") from error
            chosen[option] = listener.getsockname()[1]
    return chosen
