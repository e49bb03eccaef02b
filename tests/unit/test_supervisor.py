# SPDX-License-Identifier: Apache-2.0
"""The supervisor against a server that exists only as its answers: who is loaded anew, when, and when it gives up."""

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_backend.serving import supervisor as supervisor_module
from tandem_backend.serving.launcher import LaunchError
from tandem_backend.serving.supervisor import Supervisor, _is_model_file

TIMEOUT_S = 5.0


@dataclass
class Process:
    codes: list[int | None]

    def poll(self) -> int | None:
        """The next code; the last one for ever."""
        return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]


@dataclass
class Api:
    """Heartbeats are ages in seconds; a model that is loaded beats at once, unless it is named in `broken`."""

    ages: dict[str, float]
    key: str | None = "secret"
    broken: tuple[str, ...] = ()
    calls: list[str] = field(default_factory=list)

    def heartbeats(self) -> dict[str, float]:
        return {model: time.time() - age for model, age in self.ages.items()}

    def forwards_to(self, model: str) -> str | None:
        return "tandem" if model == "front" else None

    def models(self) -> list[dict[str, Any]]:
        return [{"name": model, "state": "UNAVAILABLE"} for model in self.ages]

    def unload(self, model: str) -> None:
        self.calls.append(f"unload {model}")

    def load(self, model: str, timeout_s: float) -> None:
        self.calls.append(f"load {model}")
        if model in self.broken:
            raise OSError("no weights")
        self.ages[model] = 0


@dataclass
class Server:
    api: Api
    process: Process
    pid: int = 2**22 + 1  # of no process
    failures: list[LaunchError] = field(default_factory=list)

    def kill(self) -> None:
        self.api.calls.append("kill")

    def start(self) -> None:
        self.api.calls.append("start")
        if self.failures:
            raise self.failures.pop(0)
        self.api.ages = dict.fromkeys(self.api.ages, 0.0)


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time passes at once, for the supervisor alone; what was slept, in seconds."""
    naps: list[float] = []
    clock = SimpleNamespace(sleep=naps.append, time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr(supervisor_module, "time", clock)
    return naps


def supervise(server: Server) -> list[str]:
    said: list[str] = []
    Supervisor(server, TIMEOUT_S, load_timeout_s=60, say=said.append).run()  # type: ignore[arg-type]
    return said


def test_nothing_is_done_while_all_beat() -> None:
    server = Server(Api({"tandem": 0, "front": TIMEOUT_S - 2}), Process([None, None, None, 0]))
    assert supervise(server) == []
    assert server.api.calls == []


def test_a_silent_front_is_loaded_anew_alone() -> None:
    server = Server(Api({"tandem": 0, "front": TIMEOUT_S + 1}), Process([None, None, 0]))
    supervise(server)
    assert server.api.calls == ["unload front", "load front"]


def test_a_silent_engine_takes_its_front_along() -> None:
    server = Server(Api({"tandem": TIMEOUT_S + 1, "front": 0, "other": 0}), Process([None, None, 0]))
    said = supervise(server)
    assert server.api.calls == ["unload tandem", "load tandem", "unload front", "load front"]
    assert said == ["no heartbeat of tandem for 5 s: loading anew", "tandem, front loaded anew"]


def test_an_engine_that_unloaded_itself_is_loaded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(Api({"tandem": TIMEOUT_S - 0.5}), Process([None, None, None, None, 0]))
    beats = [server.api.heartbeats(), {}]
    monkeypatch.setattr(server.api, "heartbeats", lambda: beats.pop(0) if beats else Api.heartbeats(server.api))
    monkeypatch.setattr(supervisor_module.time, "sleep", lambda seconds: time.sleep(0.6))
    supervise(server)
    assert server.api.calls == ["unload tandem", "load tandem"]


def test_a_model_that_does_not_load_restarts_the_server() -> None:
    server = Server(Api({"tandem": TIMEOUT_S + 1}, broken=("tandem",)), Process([None, None, 0]))
    supervise(server)
    assert server.api.calls == ["unload tandem", "load tandem", "kill", "start"]


def test_a_server_without_our_model_control_is_restarted() -> None:
    server = Server(Api({"tandem": TIMEOUT_S + 1}, key=None), Process([None, None, 0]))
    supervise(server)
    assert server.api.calls == ["kill", "start"]


def test_a_crashed_server_is_started_until_it_is_ready(slept: list[float]) -> None:
    failures = [LaunchError("port taken"), LaunchError("port taken")]
    server = Server(Api({"tandem": 0}), Process([-11, None, 0]), failures=failures)
    assert supervise(server) == ["Triton server died by signal 11: starting it anew", "port taken", "port taken"]
    assert server.api.calls == ["kill", "start", "start", "start"]
    assert slept[:2] == [1, 2]


def test_recoveries_in_a_row_are_bounded_and_slower_each_time(slept: list[float]) -> None:
    server = Server(Api({"tandem": 0}), Process([-6]))
    with pytest.raises(LaunchError, match="gave up after 8 recoveries"):
        supervise(server)
    assert slept == [1, 2, 4, 8, 16, 32, 60]
    assert server.api.calls.count("start") == 8


def test_an_exit_of_its_own_ends_it() -> None:
    server = Server(Api({"tandem": 100}), Process([3]))
    assert supervise(server) == []


def test_stubs_are_told_by_their_model_file() -> None:
    assert _is_model_file("/repository/tandem/1/model.py", "tandem")
    assert not _is_model_file("/repository/tandem_generate/1/model.py", "tandem")
    assert not _is_model_file("model.py", "tandem")
