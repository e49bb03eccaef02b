# SPDX-License-Identifier: Apache-2.0
"""For all tests: hypothesis measures no time, since a busy machine would fail tests that are right; who runs which."""

from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")

# Files of tests/e2e that start servers of their own; the others share three.
OWN_SERVERS = ("demo_command", "lifecycle", "new_models", "replicas", "serve_command", "smoke_script")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes the longest comes first, so that workers end together."""
    longest = ("e2e", "kernels")
    items.sort(key=lambda item: (*longest, item.path.parent.name).index(item.path.parent.name))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2` a file's tests stay with one worker, and so do all that share Triton servers; `--dist` as it says."""
    if config.option.dist != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            is_shared = file.startswith("tests/e2e/") and not file.removesuffix(".py").endswith(OWN_SERVERS)
            return "tests/e2e" if is_shared else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)
