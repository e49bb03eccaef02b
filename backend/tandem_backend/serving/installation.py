# SPDX-License-Identifier: Apache-2.0
"""Finds a Triton server, checks that this Python can serve with it, and says how to start it.

Two layouts are known: NVIDIA's container (/opt/tritonserver, one stub for the container's Python) and the
`nvidia-pytriton` wheel (one stub for each Python minor version, libraries in a folder of the wheel's own).
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem_backend.errors import TandemError

CONTAINER_ROOT = Path("/opt/tritonserver")
SERVER_VARIABLE = "TANDEM_TRITON_SERVER"
STUB_NAME = "triton_python_backend_stub"
_SYSTEM_LIBRARY_DIRS = ("/lib", "/usr/lib")  # where the loader looks by itself


class LaunchError(TandemError):
    """Triton server can't be started; the message names what to install or change."""

    code = "UNAVAILABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonInstallation:
    """Where the parts of a Triton server lie; `backend_dir` holds python/libtriton_python.so, not always a stub."""

    root: Path
    binary: Path
    backend_dir: Path
    stub: Path
    library_dirs: tuple[Path, ...]
    needs_numpy_below_2: bool

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with the libraries and this Python in front: the stub takes its prefix from PATH's first python3."""
        libraries = [*map(str, self.library_dirs), base.get("LD_LIBRARY_PATH", "")]
        path = [str(Path(sys.executable).parent), base.get("PATH", os.defpath)]
        found = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)), "PATH": os.pathsep.join(path)}
        return {**base, **found}

    def assemble_backend_dir(self, run_dir: Path) -> Path:
        """A backend directory with the right stub: the installation's, or one of links in `run_dir`.

        The installation is not written to, so that several servers may share it and it may be read-only.
        """
        if self.stub.parent == self.backend_dir / "python":
            return self.backend_dir
        assembled = run_dir / "backends"
        (assembled / "python").mkdir(parents=True)
        for entry in self.backend_dir.iterdir():
            if entry.name != "python":
                (assembled / entry.name).symlink_to(entry)
        for entry in (self.backend_dir / "python").iterdir():
            if entry.name != "__pycache__":
                (assembled / "python" / entry.name).symlink_to(entry)
        (assembled / "python" / STUB_NAME).symlink_to(self.stub)
        return assembled

    def check(self) -> None:
        """Raises LaunchError when this Python, its numpy or a library does not fit the server's Python backend."""
        linked = re.search(rb"libpython(\d+\.\d+)\.so", self.stub.read_bytes())
        if linked and linked[1].decode() != _python_version():
            raise LaunchError(
                f"Triton server in {self.root} runs models with Python {linked[1].decode()}, this is Python "
                f"{_python_version()}: install Tandem into a virtual environment of Python {linked[1].decode()}"
            )
        numpy = importlib.metadata.version("numpy")
        if self.needs_numpy_below_2 and int(numpy.split(".")[0]) >= 2:
            raise LaunchError(
                f"numpy {numpy} is too new for the Python backend of Triton server in {self.root}, which loses "
                "outputs with numpy 2: pip install 'numpy<2'"
            )
        missing = _missing_libraries((self.binary, self.stub), self.environment(os.environ))
        if any(name.startswith("libpython") for name in missing):
            raise LaunchError(
                f"{', '.join(missing)} not found, which Triton server's Python backend links: install it "
                f"(Debian: apt-get install libpython{_python_version()}) or use a Python built with a shared library"
            )
        if missing:
            raise LaunchError(f"Triton server in {self.root} needs libraries that are not there: {', '.join(missing)}")


def find_triton_server(explicit: str | None = None) -> TritonInstallation:
    """The server named by `explicit` or $TANDEM_TRITON_SERVER, else the container's, else the wheel's.

    Raises LaunchError when there is none, or when it has no Python backend for this Python.
    """
    named = explicit or os.environ.get(SERVER_VARIABLE)
    if named:
        return _read_installation(_root_of(Path(named)))
    if (CONTAINER_ROOT / "bin" / "tritonserver").is_file():
        return _read_installation(CONTAINER_ROOT)
    wheel = _wheel_root()
    if wheel is not None:
        return _read_installation(wheel)
    raise LaunchError(
        f"no Triton server found: install the wheel (pip install 'tandem-backend[server]'), run in NVIDIA's "
        f"tritonserver container ({CONTAINER_ROOT}), or name an installation with --triton-server or {SERVER_VARIABLE}"
    )


def _root_of(named: Path) -> Path:
    root = named.resolve().parent.parent if named.is_file() else named
    if not (root / "bin" / "tritonserver").is_file():
        raise LaunchError(
            f"--triton-server {named}: no Triton server there; allowed are the path of tritonserver itself "
            "or of the folder that holds bin/tritonserver"
        )
    return root.absolute()


def _wheel_root() -> Path | None:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent / "tritonserver"
    return root if (root / "bin" / "tritonserver").is_file() else None


def _read_installation(root: Path) -> TritonInstallation:
    stubs = root / "python_backend_stubs"
    is_wheel = stubs.is_dir()
    stub = (stubs / _python_version() if is_wheel else root / "backends" / "python") / STUB_NAME
    if not stub.is_file():
        if not is_wheel:
            raise LaunchError(f"Triton server in {root} has no Python backend: install one that has backends/python")
        versions = sorted((path.name for path in stubs.iterdir()), key=lambda name: int(name.split(".")[1]))
        raise LaunchError(
            f"Triton server in {root} has no Python backend stub for Python {_python_version()}, only for "
            f"{', '.join(versions)}: install Tandem into a virtual environment of Python 3.12 or 3.11"
        )
    wheel_libraries = root.parent.parent / "nvidia_pytriton.libs"
    return TritonInstallation(
        root=root,
        binary=root / "bin" / "tritonserver",
        backend_dir=root / "backends",
        stub=stub,
        library_dirs=tuple(path for path in (wheel_libraries, _libpython_dir()) if path is not None and path.is_dir()),
        needs_numpy_below_2=is_wheel,
    )


def _libpython_dir() -> Path | None:
    """Where this Python's own shared library lies; None when the loader finds it by itself, or there is none."""
    folder = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    if str(folder).startswith(_SYSTEM_LIBRARY_DIRS) or not (folder / f"libpython{_python_version()}.so.1.0").exists():
        return None
    return folder


def _missing_libraries(binaries: tuple[Path, ...], env: Mapping[str, str]) -> list[str]:
    listed = subprocess.run(["ldd", *map(str, binaries)], env=env, capture_output=True, text=True, check=False).stdout
    return sorted(set(re.findall(r"^\s*(\S+) => not found", listed, flags=re.MULTILINE)))


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
