# SPDX-License-Identifier: Apache-2.0
"""A Triton server for tests that don't ask how it stops."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem_backend.serving.launcher import TritonServer


@contextmanager
def running_server(repository: Path, **options: Any) -> Iterator[TritonServer]:
    """Killed at the end: streams that a test left open would hold up its stop."""
    server = TritonServer(repository, **options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
