# SPDX-License-Identifier: Apache-2.0
"""End the process when its parent has gone."""

import os
import threading
import time
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def exit_with_parent(interval_s: float = 1.0) -> None:
    """Start a thread that ends this process once its parent is another one.

    After a forced exit of Triton server the Python stub stays for ever, stuck in a send and deaf to SIGTERM, with the
    model's memory. prctl(PR_SET_PDEATHSIG) is no way out: a loader thread forks the stub, and its end would fire
    the signal.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval_s)
        _remove_shared_memory()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()


def _remove_shared_memory() -> None:
    """Of a stub: the region that its server made for it is an argument of its command line."""
    for argument in Path("/proc/self/cmdline").read_bytes().split(b"\0"):
        name = os.fsdecode(argument).lstrip("/")
        if name and "/" not in name:
            (_SHARED_MEMORY / name).unlink(missing_ok=True)
