# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels, on a CUDA device (`make test-gpu`) or, where TRITON_INTERPRET=1, small and in the interpreter."""

from pathlib import Path

import pytest
import torch
from tandem_kernels.device import IS_INTERPRETED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not IS_INTERPRETED:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")
