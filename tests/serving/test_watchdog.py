# SPDX-License-Identifier: Apache-2.0
"""The stub must not outlive its server."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import os, time
from tandem_backend.serving.watchdog import exit_with_parent
exit_with_parent(interval_s=0.05)
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"  # nobody may be there to reap it


def test_the_child_ends_when_its_parent_is_killed() -> None:
    region = Path("/dev/shm") / f"tandem_test_{os.getpid()}"
    region.touch()
    command = [sys.executable, "-c", PARENT, CHILD, f"/{region.name}"]  # as a stub is told its region
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.3)
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 5
        while is_running(child):
            assert time.monotonic() < deadline, "the child outlived its parent"
            time.sleep(0.02)
    assert not region.exists()
