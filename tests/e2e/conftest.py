# SPDX-License-Identifier: Apache-2.0
"""One real Triton server with our model repository for all end-to-end tests of a run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tandem_backend.serving.launcher import TritonServer
from triton_calls import MODEL_REPOSITORY


@pytest.fixture(scope="session")
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "server.log"


@pytest.fixture(scope="session")
def server(server_log: Path) -> Iterator[TritonServer]:
    with TritonServer(MODEL_REPOSITORY, log_path=server_log) as running:
        yield running
