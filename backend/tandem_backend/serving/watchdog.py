# SPDX-License-Identifier: Apache-2.0
"""End the process when its parent has gone."""

import os
import threading
import time


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
        os._exit(1)

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()
