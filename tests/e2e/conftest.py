# SPDX-License-Identifier: Apache-2.0
"""One real Triton server with our model repository for all end-to-end tests of a run."""

from collections.abc import Iterator

import pytest
from tandem_backend.serving.launcher import TritonServer
from triton_calls import MODEL_REPOSITORY


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with TritonServer(MODEL_REPOSITORY, log_path=tmp_path_factory.mktemp("server") / "server.log") as running:
        yield running
