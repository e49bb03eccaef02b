# SPDX-License-Identifier: Apache-2.0
"""The modules under test import a module that exists only inside a Triton server: give them the fake."""

import os
import sys
from types import SimpleNamespace

import pytest
from fakes import pb_utils
from tandem_backend.serving import overlap

sys.modules["triton_python_backend_utils"] = pb_utils


@pytest.fixture(autouse=True)
def log() -> list[str]:
    """What was written to Triton's log during the test."""
    pb_utils.Logger.lines.clear()
    return pb_utils.Logger.lines


@pytest.fixture(autouse=True)
def own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stubs of one parent are one server's; the parent of all workers of a test run is the same."""
    monkeypatch.setattr(overlap, "os", SimpleNamespace(getppid=os.getpid))


@pytest.fixture(autouse=True)
def registry() -> dict[str, pb_utils.Metric]:
    """The server's metrics of the test by name and labels."""
    pb_utils.MetricFamily.series.clear()
    return pb_utils.MetricFamily.series
