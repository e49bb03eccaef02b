# SPDX-License-Identifier: Apache-2.0
"""Real Triton servers for all end-to-end tests of a run: one with our model repository, two with small limits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running_server import running_server
from small_server import small_repository
from tandem_backend.serving.launcher import TritonServer
from triton_calls import MODEL_REPOSITORY


@pytest.fixture(scope="session")
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "server.log"


@pytest.fixture(scope="session")
def server(server_log: Path) -> Iterator[TritonServer]:
    with running_server(MODEL_REPOSITORY, log_path=server_log) as running:
        yield running


@contextmanager
def running_small_server(folder: Path) -> Iterator[TritonServer]:
    repository = small_repository(folder / "repository")
    control = ("--model-control-mode=explicit", "--load-model=*")
    with running_server(repository, log_path=folder / "server.log", extra_args=control) as running:
        yield running


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with running_small_server(tmp_path_factory.mktemp("small")) as running:
        yield running


@pytest.fixture(scope="session")
def reloaded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One like it whose models tests may load anew: an old instance's metrics stay until Triton server lets it go."""
    with running_small_server(tmp_path_factory.mktemp("reloaded")) as running:
        yield running
