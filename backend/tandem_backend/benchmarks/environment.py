# SPDX-License-Identifier: Apache-2.0
"""Where figures come from: the build and the machine."""

import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

DISTRIBUTION = "tandem-backend"


def num_usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def provenance(num_threads: int) -> dict[str, Any]:
    """The part that every result has in common."""
    return {"commit": commit(), "machine": {"cpu": cpu_model(), "threads": num_threads}}


def commit() -> str:
    """`git describe` of the checkout that this module belongs to; outside of one the package's version."""
    module = Path(__file__)
    git = ["git", "--no-optional-locks", "-C", str(module.parent)]
    try:
        # An installed package may lie in a folder of someone else's checkout.
        subprocess.run([*git, "ls-files", "--error-unmatch", module.name], check=True, capture_output=True)
        described = subprocess.run(
            [*git, "describe", "--always", "--tags", "--dirty"], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return version(DISTRIBUTION)
    return described.stdout.strip()


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"
