# SPDX-License-Identifier: Apache-2.0
"""A server under mixed requests for long: nothing is lost, nothing leaks, no answer is another's.

`make soak` runs it for 10 minutes, `make soak SECONDS=60` for one. A third of the time models are reloaded beside the
requests; a third warms the last instances up; over the last one memory must not grow. `tandem verify` runs beside both.
"""

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from soak.ledger import Ledger
from soak.traffic import NUM_WORKERS, Traffic
from tandem_backend.serving.launcher import TritonServer

SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "60"))
ROOT = Path(__file__).parents[2]
MAX_GROWTH = 0.03
MODELS = ("tandem", "tandem_generate")
LOAD_S = 120.0
IDLE_S = 60.0
RELOAD_PAUSE_S = 3.0
PARALLEL = 16


@dataclass(frozen=True)
class Usage:
    """What the server and its stubs hold, by process: "server" or the model's name."""

    rss_bytes: dict[str, int]
    num_threads: dict[str, int]
    num_regions: int

    @classmethod
    def of(cls, server: TritonServer) -> "Usage":
        root = psutil.Process(server.pid)
        processes = {"server": root}
        for child in root.children():
            if child.status() != psutil.STATUS_ZOMBIE:
                processes[Path(child.cmdline()[1]).parts[-3]] = child
        return cls(
            {name: process.memory_info().rss for name, process in processes.items()},
            {name: process.num_threads() for name, process in processes.items()},
            len(regions(server)),
        )


def regions(server: TritonServer) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{server.shm_prefix}*"))


def gauges(server: TritonServer) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("tandem_num_"))
    return {name.split("{")[0]: float(value) for name, value in pairs}


def wait_until_idle(server: TritonServer) -> None:
    """Until nothing runs, waits, or is held for anybody; fails with what is held."""
    deadline_s = time.monotonic() + IDLE_S
    while True:
        now = gauges(server)
        held = {name: now[f"tandem_num_{name}"] for name in ("active", "queued", "sessions")}
        held |= {name: now[f"tandem_num_{name}"] - now[f"tandem_num_free_{name}"] for name in ("blocks", "slots")}
        if not any(held.values()):
            return
        assert time.monotonic() < deadline_s, f"held although nobody sends: {held}"
        time.sleep(0.5)


@contextmanager
def reloading(server: TritonServer, ledger: Ledger) -> Iterator[None]:
    """Unloads and loads one model after the other while the block runs; what runs then goes on in the old instance."""
    stopping = threading.Event()

    def run() -> None:
        for model in itertools.cycle(MODELS):
            if stopping.wait(RELOAD_PAUSE_S):
                return
            with ledger.reload():
                server.api.unload(model)
                server.api.load(model, LOAD_S)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


@contextmanager
def verifying(server: TritonServer, prompts: Path, outputs: list[subprocess.CompletedProcess[str]]) -> Iterator[None]:
    """Runs `tandem verify --server` at 16 parallel requests again and again while the block runs, once at least."""
    stopping = threading.Event()
    command = [Path(sys.executable).parent / "tandem", "verify", "--server", server.grpc_url]
    command += ["--prompts", prompts, "--parallel", str(PARALLEL), "--max-tokens", "24"]

    def run() -> None:
        while not outputs or not stopping.is_set():
            outputs.append(subprocess.run(command, capture_output=True, text=True, check=False))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


@contextmanager
def sending(traffic: Traffic, seconds: float) -> Iterator[None]:
    """Requests for so long, and until those under way have ended."""
    traffic.start()
    try:
        yield
        time.sleep(seconds)
    finally:
        traffic.stop()


def soak_repository(folder: Path) -> Path:
    """Our models with a prefix cache so small that it is full before memory is measured."""
    shutil.copytree(ROOT / "model_repository", folder, copy_function=os.symlink)
    config = folder / "tandem" / "config.pbtxt"
    text = config.read_text()
    config.unlink()
    config.write_text(text + 'parameters { key: "prefix_cache_bytes" value { string_value: "8388608" } }\n')
    return folder


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = (ROOT / "tests" / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    prompts.write_text("".join(lines[:PARALLEL]), encoding="utf-8")
    ledger = Ledger()
    verified: list[subprocess.CompletedProcess[str]] = []
    repository = soak_repository(tmp_path / "models")
    with TritonServer(repository, log_path=tmp_path / "server.log", exit_timeout_s=10) as server:
        traffic = Traffic(server.grpc_url, server.http_url, ledger, seed=1)
        with reloading(server, ledger), sending(traffic, SECONDS / 3):
            pass
        wait_until_idle(server)
        traffic.burst(4 * PARALLEL)
        with verifying(server, prompts, verified), sending(traffic, SECONDS / 3):
            pass
        wait_until_idle(server)
        before = Usage.of(server)
        with verifying(server, prompts, verified), sending(traffic, SECONDS / 3):
            pass
        wait_until_idle(server)
        after = Usage.of(server)
        traffic.close()
    report = f"{ledger.table()}\n  before {before}\n  after  {after}\n  verify {len(verified)} times"
    with capsys.disabled():
        print(f"\n{report}")

    assert ledger.problems == [], report
    assert ledger.total("done") > 3 * SECONDS, report
    assert ledger.total("refused") > 0, report  # reloads were beside requests
    for run in verified:  # not the status: beside so many requests the router may find that no draft pays
        assert "1 combinations, 0 different" in run.stdout, run.stdout + run.stderr
    assert set(before.rss_bytes) == set(after.rss_bytes) == {"server", *MODELS}
    growth = {name: after.rss_bytes[name] / size - 1 for name, size in before.rss_bytes.items()}
    assert max(growth.values()) < MAX_GROWTH, growth
    # A pool starts a thread where all others are busy, so one more may come with every request that runs at once.
    for name, number in before.num_threads.items():
        assert after.num_threads[name] - number <= NUM_WORKERS + PARALLEL, name
    assert before.num_regions == after.num_regions == len(MODELS)
    assert server.process.returncode == 0
    assert regions(server) == []
