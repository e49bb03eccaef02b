# SPDX-License-Identifier: Apache-2.0
"""Compiles the CPU kernels with the Zig compiler of the `ziglang` wheel: hatchling's build hook, and a script.

All C files of tandem_kernels/cpu become one shared library for each x86-64 level. No compiler of the user's is needed,
and every machine gets the same bits: one compiler version, no fused multiply-adds but those written in the source.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LEVELS = ("v3", "v4")  # x86-64-v3: AVX2 and FMA; x86-64-v4: AVX-512
FLAGS = ("-O3", "-g0", "-shared", "-fPIC", "-std=gnu11", "-Wall", "-Wno-psabi", "-ffp-contract=off", "-fno-math-errno")
TARGET = ("-target", "x86_64-linux-gnu.2.28")
WHEEL_TAG = "py3-none-manylinux_2_28_x86_64"


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the libraries before a wheel (editable ones included) is packed, and tags the wheel for the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_kernels(Path(self.root) / "kernels" / "tandem_kernels" / "cpu")
        build_data["pure_python"] = False
        build_data["tag"] = WHEEL_TAG


def build_kernels(folder: Path) -> list[Path]:
    """Compile what is older than its sources; returns the libraries that were built.

    Raises FileNotFoundError without C files, CalledProcessError when the compiler fails (its messages are on stderr).
    """
    sources = sorted(folder.glob("*.c"))
    if not sources:
        raise FileNotFoundError(f"{folder}: no .c file to build the CPU kernels from")
    newest = max(path.stat().st_mtime for path in [*sources, *folder.glob("*.h"), Path(__file__)])
    libraries = {level: folder / f"tandem_cpu_{level}.so" for level in LEVELS}
    stale = {level: path for level, path in libraries.items() if not path.exists() or path.stat().st_mtime < newest}
    with tempfile.TemporaryDirectory(prefix="tandem-kernels-") as scratch:
        for level, library in stale.items():
            print(f"building {library.name} from {', '.join(source.name for source in sources)}", file=sys.stderr)
            _compile(sources, level, library, Path(scratch))
    return list(stale.values())


def _compile(sources: list[Path], level: str, library: Path, scratch: Path) -> None:
    # Zig's caches go to the scratch folder, so that a read-only home does not matter.
    env = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(scratch / "cache"), "ZIG_LOCAL_CACHE_DIR": str(scratch / "cache")}
    # Renamed into place: a process that has the old library mapped keeps it whole.
    fresh = library.with_suffix(f".{os.getpid()}.tmp")
    command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, *TARGET, f"-mcpu=x86_64_{level}"]
    try:
        subprocess.run([*command, "-o", fresh, *sources, "-lm", "-lpthread"], env=env, check=True)
        fresh.replace(library)
    finally:
        fresh.unlink(missing_ok=True)


if __name__ == "__main__":
    build_kernels(Path(__file__).parent / "tandem_kernels" / "cpu")
