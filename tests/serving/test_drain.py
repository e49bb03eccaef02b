# SPDX-License-Identifier: Apache-2.0
"""The drain signal: a file that appears while a model serves."""

import queue
from pathlib import Path

import pytest
from tandem_backend.serving.drain import DRAIN_FILE_VARIABLE, on_drain


def test_the_file_calls_once_with_its_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "drain"
    monkeypatch.setenv(DRAIN_FILE_VARIABLE, str(path))
    calls: queue.SimpleQueue[float] = queue.SimpleQueue()
    on_drain(calls.put)
    path.touch()  # being written
    with pytest.raises(queue.Empty):
        calls.get(timeout=0.3)
    path.write_text("2.5\n")
    assert calls.get(timeout=10) == 2.5
    with pytest.raises(queue.Empty):
        calls.get(timeout=0.3)


def test_without_the_variable_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DRAIN_FILE_VARIABLE, raising=False)
    on_drain(lambda seconds: pytest.fail("called"))
