# SPDX-License-Identifier: Apache-2.0
"""Kernels run on the pool's threads in these tests, so that sharing work out is part of what they check."""

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tandem_kernels as kernels
from tandem_kernels.cpu import library, ops


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    kernels.set_num_threads(4)


@pytest.fixture
def use_library(monkeypatch: pytest.MonkeyPatch) -> Callable[[ctypes.CDLL], None]:
    """Lets the ops call another compiled library until the test ends."""
    return lambda compiled: monkeypatch.setattr(ops, "_library", compiled)


@pytest.fixture
def private_library(tmp_path: Path) -> ctypes.CDLL:
    """A copy of the best library: it has a thread pool of its own, so its thread count is still to be fixed."""
    best = library.supported_levels()[0]
    source = Path(library.__file__).parent / f"tandem_cpu_{best}.so"
    copy = ctypes.CDLL(shutil.copy(source, tmp_path / source.name))
    for name, arguments in library.SIGNATURES.items():
        getattr(copy, name).argtypes = arguments
    return copy
