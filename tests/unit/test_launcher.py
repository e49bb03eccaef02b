# SPDX-License-Identifier: Apache-2.0
"""The server process against a made-up Triton server: ports, command line, readiness, what stop() leaves."""

import json
import os
import signal
import socket
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from fakes.triton_installation import READY, SERVER_SCRIPT, make_wheel, write_binary
from tandem_backend.serving import installation
from tandem_backend.serving.launcher import LaunchError, TritonServer, choose_ports


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(installation, "_missing_libraries", lambda binaries, env: [])
    return make_wheel(tmp_path / "site-packages")


def _regions() -> set[Path]:
    """The shared memory of this process's servers."""
    return set(Path("/dev/shm").glob(f"tandem_{os.getpid()}_*"))


@pytest.fixture
def others() -> set[Path]:
    """The shared memory of servers that other tests of this process keep running."""
    return _regions()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def test_no_model_repository(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"--model-repository .*/nowhere: no such folder"):
        TritonServer(tmp_path / "nowhere").start()


def test_taken_port_names_its_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"--grpc-port {port}: can't listen on 127\.0\.0\.1:{port} \(Address"):
            choose_ports("127.0.0.1", {"--http-port": 0, "--grpc-port": port})


def test_free_ports_differ() -> None:
    ports = choose_ports("127.0.0.1", {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0})
    assert len(set(ports.values()) - {0}) == 3


def _logged(log: Path, key: str) -> str:
    return next(line.split(" ", 1)[1] for line in log.read_text().splitlines() if line.startswith(f"{key} "))


def _wait_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_start_and_stop(tmp_path: Path, wheel: Path, repository: Path, others: set[Path]) -> None:
    log = tmp_path / "server.log"
    server = TritonServer(repository, triton_server=str(wheel), log_path=log, extra_args=["--log-verbose=1"])
    with server:
        arguments = _logged(log, "ARGS")
        for expected in (
            f"--model-repository={repository}",
            "--backend-config=python,thread-pool-size=320",
            "--exit-timeout-secs=15",  # the models answer what runs past 5
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            "--metrics-address=127.0.0.1",
            f"--http-port={server.http_url.split(':')[1]}",
            f"--grpc-port={server.grpc_url.split(':')[1]}",
            f"--metrics-port={server.metrics_url.split(':')[1]}",
            "--log-verbose=1",
        ):
            assert f'"{expected}"' in arguments
        assert "nvidia_pytriton.libs" in _logged(log, "ENV")
        assert _regions() - others
        child = int(_logged(log, "CHILD"))
        assert psutil.pid_exists(child)
    assert server.process.returncode == -signal.SIGTERM
    assert _wait_gone(child)
    assert _regions() == others


def test_a_server_that_ignores_sigterm_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, repository: Path, others: set[Path]
) -> None:
    for name in ("_ANSWER_S", "_EXIT_GRACE_S"):
        monkeypatch.setattr(f"tandem_backend.serving.launcher.{name}", 0.2)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    write_binary(wheel, deaf + READY + textwrap.dedent(SERVER_SCRIPT))
    log = tmp_path / "server.log"
    with TritonServer(repository, triton_server=str(wheel), log_path=log, exit_timeout_s=0) as server:
        child = int(_logged(log, "CHILD"))
    assert server.process.returncode == -signal.SIGKILL
    assert _wait_gone(child)
    assert _regions() == others


def _start_script(wheel: Path, repository: Path, script: str, **options: float) -> TritonServer:
    write_binary(wheel, script)
    server = TritonServer(repository, triton_server=str(wheel), **options)
    server.start()
    return server


# Each start adds a character to the file {starts}.
CRASH = """
    with open("{starts}", "a") as starts:
        starts.write(".")
        count = starts.tell()
    if count <= {crashes}:
        print("terminate called after throwing a lock_exception", flush=True)
        os.abort()
"""


@pytest.mark.parametrize("crashes", [1, 2, 3])
def test_a_server_that_crashes_before_it_is_ready_is_started_anew_twice(
    crashes: int, tmp_path: Path, wheel: Path, repository: Path, others: set[Path]
) -> None:
    starts = tmp_path / "starts"
    crash = textwrap.dedent(CRASH.format(starts=starts, crashes=crashes))
    script = f"import os\n{crash}\n{READY}{textwrap.dedent(SERVER_SCRIPT)}"
    if crashes == 3:
        with pytest.raises(LaunchError, match=r"(?s)exited with code -6 before it was ready.*lock_exception"):
            _start_script(wheel, repository, script)
    else:
        _start_script(wheel, repository, script).stop()
    assert len(starts.read_text()) == min(crashes + 1, 3)
    assert _regions() == others


def test_an_exit_shows_why(wheel: Path, repository: Path) -> None:
    script = """
        print("I1129 21:45:23.386349 7 server.cc:604] notice")
        print("| a | table |")
        print("E1129 21:45:23.386349 7 server.cc:241] CudaDriverHelper has not been initialized.")
        print("E1129 21:45:23.386349 7 lifecycle.cc:642] failed to load 'tandem': engine.json: max_active")
        raise SystemExit(3)
    """
    with pytest.raises(LaunchError) as caught:
        _start_script(wheel, repository, script)
    assert str(caught.value).splitlines() == [
        "Triton server exited with code 3 before it was ready",
        "E1129 21:45:23.386349 7 lifecycle.cc:642] failed to load 'tandem': engine.json: max_active",
    ]


def test_a_model_that_did_not_load_is_named(wheel: Path, repository: Path, others: set[Path]) -> None:
    models = [{"name": "tandem", "state": "UNAVAILABLE", "reason": "no weights"}, {"name": "unasked"}]
    with pytest.raises(LaunchError, match="did not load tandem: no weights"):
        _start_script(wheel, repository, f"MODELS = {models}" + textwrap.dedent(SERVER_SCRIPT))
    assert _regions() == others


def test_a_server_that_never_gets_ready(wheel: Path, repository: Path) -> None:
    with pytest.raises(LaunchError, match=r"is not ready after 0\.5 s"):
        _start_script(wheel, repository, "import time\ntime.sleep(60)", ready_timeout_s=0.5)


def test_an_empty_repository_is_refused(wheel: Path, repository: Path, others: set[Path]) -> None:
    with pytest.raises(LaunchError, match=rf"--model-repository {repository}: holds no model"):
        _start_script(wheel, repository, "MODELS = []" + textwrap.dedent(SERVER_SCRIPT))
    assert _regions() == others


def test_models_are_told_to_drain_before_the_server_stops(tmp_path: Path, wheel: Path, repository: Path) -> None:
    log = tmp_path / "server.log"
    with TritonServer(repository, triton_server=str(wheel), log_path=log, exit_timeout_s=7) as server:
        drain_file = Path(json.loads(_logged(log, "ENV"))["TANDEM_DRAIN_FILE"])
        assert not drain_file.exists()
        told: list[str] = []
        terminate = server.process.terminate

        def note_then_terminate() -> None:
            told.append(drain_file.read_text())
            terminate()

        server.process.terminate = note_then_terminate  # type: ignore[method-assign]
    assert told == ["7"]


def test_only_the_launcher_may_load_and_unload(tmp_path: Path, wheel: Path, repository: Path) -> None:
    log = tmp_path / "server.log"
    with TritonServer(repository, triton_server=str(wheel), log_path=log) as server:
        arguments = json.loads(_logged(log, "ARGS"))
        assert {"--model-control-mode=explicit", "--load-model=*"} <= set(arguments)
        assert f"--http-restricted-api=model-repository:tandem-model-repository-key={server.api.key}" in arguments
        assert f"--grpc-restricted-protocol=model-repository:tandem-model-repository-key={server.api.key}" in arguments


def test_a_control_mode_of_the_user_stays(tmp_path: Path, wheel: Path, repository: Path) -> None:
    log = tmp_path / "server.log"
    own = ["--model-control-mode=none"]
    with TritonServer(repository, triton_server=str(wheel), log_path=log, extra_args=own) as server:
        arguments = json.loads(_logged(log, "ARGS"))
        assert server.api.key is None
        assert not [argument for argument in arguments if "restricted" in argument or "--load-model" in argument]
