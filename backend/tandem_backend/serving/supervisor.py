# SPDX-License-Identifier: Apache-2.0
"""Watches over a Triton server: a dead or stuck model is loaded anew, a dead server is started anew.

Triton server keeps saying "ready" when a model's stub is gone, and never starts it again.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tandem_backend.serving.launcher import LaunchError, TritonServer

_POLL_S = 1.0
_UNLOAD_S = 5.0  # a dead stub's streams never end, and its unloading with them
_FIRST_DELAY_S = 1.0
_LAST_DELAY_S = 60.0
_MAX_RECOVERIES = 8  # in a row
_CALM_S = 300.0  # without a recovery: the next one is the first again


class Supervisor:
    """Runs in place of waiting for the server's process.

    A model whose heartbeat is older than `heartbeat_timeout_s` loses its stub and is unloaded and loaded; so is a front
    that forwards to it, because its requests wait for that stub. Where that fails, or the server died by a signal,
    the server is started again. `say` gets a line about each of it; `on_restart` is called when the server is ready.
    """

    def __init__(
        self,
        server: TritonServer,
        heartbeat_timeout_s: float,
        *,
        load_timeout_s: float,
        say: Callable[[str], None],
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._server = server
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._load_timeout_s = load_timeout_s
        self._say = say
        self._on_restart = on_restart
        self._heartbeats: dict[str, float] = {}
        self._num_recoveries = 0
        self._recovered_s = 0.0

    def run(self) -> None:
        """Returns when the server has exited by itself. Raises LaunchError after too many recoveries in a row."""
        while True:
            code = self._server.process.poll()
            if code is not None and code >= 0:
                return
            if code is not None:
                self._restart(f"died by signal {-code}")
            elif stale := self._stale():
                self._recover(stale)
            else:
                time.sleep(_POLL_S)

    def _stale(self) -> list[str]:
        with suppress(OSError):  # a server that does not answer lets the heartbeats grow old
            heartbeats = self._server.api.heartbeats()
            # Where nobody else can unload, a heartbeat that is gone is that of an engine which gave itself up.
            kept = self._heartbeats if self._server.api.key else {}
            self._heartbeats = kept | heartbeats
        oldest_s = time.time() - self._heartbeat_timeout_s
        return [model for model, beat_s in self._heartbeats.items() if beat_s < oldest_s]

    def _recover(self, stale: list[str]) -> None:
        names = ", ".join(stale)
        if self._server.api.key is None:
            self._restart(f"has no heartbeat of {names}, and its --model-control-mode is not ours")
            return
        self._say(f"no heartbeat of {names} for {self._heartbeat_timeout_s:g} s: loading anew")
        self._back_off()
        try:
            fronts = [model for model in self._heartbeats if self._server.api.forwards_to(model) in stale]
            models = list(dict.fromkeys([*stale, *fronts]))
            begun_s = time.time()
            for model in models:
                self._kill_stubs(model)
                self._reload(model)
            self._wait_for_heartbeats(models, begun_s)
        except OSError as error:
            self._restart(f"could not load {names} anew ({error})")
        else:
            self._say(f"{', '.join(models)} loaded anew")

    def _reload(self, model: str) -> None:
        api = self._server.api
        api.unload(model)
        deadline_s = time.monotonic() + _UNLOAD_S
        while time.monotonic() < deadline_s and any(
            item["name"] == model and item.get("state") == "UNLOADING" for item in api.models()
        ):
            time.sleep(0.1)
        api.load(model, self._load_timeout_s)

    def _wait_for_heartbeats(self, models: list[str], begun_s: float) -> None:
        deadline_s = time.monotonic() + self._heartbeat_timeout_s
        while True:
            self._heartbeats = self._server.api.heartbeats()
            silent = [model for model in models if self._heartbeats.get(model, 0) < begun_s]
            if not silent:
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no heartbeat of {', '.join(silent)} after loading")
            time.sleep(0.1)

    def _kill_stubs(self, model: str) -> None:
        """A stuck stub would keep the model's memory; a dead one does not mind."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._server.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if any(_is_model_file(argument, model) for argument in process.cmdline()):
                        process.kill()

    def _restart(self, why: str) -> None:
        self._say(f"Triton server {why}: starting it anew")
        self._server.kill()
        self._heartbeats = {}
        while True:
            self._back_off()
            try:
                self._server.start()
            except LaunchError as error:
                self._say(str(error))
            else:
                self._on_restart()
                return

    def _back_off(self) -> None:
        """Wait before a recovery: not at all before the first, then 1, 2, 4 ... 60 s."""
        now_s = time.monotonic()
        if now_s - self._recovered_s > _CALM_S:
            self._num_recoveries = 0
        if self._num_recoveries >= _MAX_RECOVERIES:
            raise LaunchError(f"gave up after {self._num_recoveries} recoveries in a row")
        if self._num_recoveries:
            time.sleep(min(_FIRST_DELAY_S * 2 ** (self._num_recoveries - 1), _LAST_DELAY_S))
        self._num_recoveries += 1
        self._recovered_s = time.monotonic()


def _is_model_file(argument: str, model: str) -> bool:
    parts = Path(argument).parts
    return len(parts) > 2 and parts[-1] == "model.py" and parts[-3] == model
