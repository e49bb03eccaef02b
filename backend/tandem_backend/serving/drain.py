# SPDX-License-Identifier: Apache-2.0
"""The drain signal: a file by which whoever stops Triton server tells its models first.

Triton server itself tells a model nothing until its last stream has ended, and cuts what runs past the exit timeout
without an answer.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

DRAIN_FILE_VARIABLE = "TANDEM_DRAIN_FILE"
POLL_INTERVAL_S = 0.1


def on_drain(drain: Callable[[float], None]) -> None:
    """Call `drain` once with the seconds that the file named by TANDEM_DRAIN_FILE holds, when it appears."""
    name = os.environ.get(DRAIN_FILE_VARIABLE)
    if not name:
        return

    def watch() -> None:
        while (timeout_s := _read_seconds(Path(name))) is None:
            time.sleep(POLL_INTERVAL_S)
        drain(timeout_s)

    threading.Thread(target=watch, name="drain-watch", daemon=True).start()


def _read_seconds(path: Path) -> float | None:
    """None where there is no file, or one that is not written yet."""
    try:
        return max(float(path.read_text()), 0.0)
    except (OSError, ValueError):
        return None
