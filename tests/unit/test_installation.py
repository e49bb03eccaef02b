# SPDX-License-Identifier: Apache-2.0
"""Installations of Triton server: where they are found, what is refused, how they are started."""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
from fakes.triton_installation import STUB, THIS_PYTHON, make_container, make_wheel, write_stub
from tandem_backend.serving import installation as installation_module
from tandem_backend.serving.installation import SERVER_VARIABLE, LaunchError, find_triton_server


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "site-packages")


@pytest.fixture
def container(tmp_path: Path) -> Path:
    return make_container(tmp_path / "opt" / "tritonserver")


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what a test asks for can be found, and the made-up stubs miss no library."""
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)
    monkeypatch.setattr(installation_module, "CONTAINER_ROOT", tmp_path / "no-container")
    monkeypatch.setattr(installation_module, "_wheel_root", lambda: None)
    monkeypatch.setattr(installation_module, "_missing_libraries", lambda binaries, env: [])


def _set_numpy(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "numpy" else real(name))


def test_lookup_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, container: Path) -> None:
    named = make_container(tmp_path / "named")
    monkeypatch.setattr(installation_module, "_wheel_root", lambda: wheel)
    assert find_triton_server().root == wheel
    monkeypatch.setattr(installation_module, "CONTAINER_ROOT", container)
    assert find_triton_server().root == container
    monkeypatch.setenv(SERVER_VARIABLE, str(named))
    assert find_triton_server().root == named
    assert find_triton_server(str(wheel)).root == wheel


def test_the_binary_names_its_installation(wheel: Path) -> None:
    assert find_triton_server(str(wheel / "bin" / "tritonserver")).root == wheel


def test_the_wheel_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    monkeypatch.undo()
    (wheel.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(wheel.parent.parent))
    monkeypatch.delitem(sys.modules, "pytriton", raising=False)
    monkeypatch.setattr(installation_module, "CONTAINER_ROOT", wheel / "no-container")
    assert find_triton_server().root == wheel


def test_a_link_to_the_binary_is_followed(tmp_path: Path, container: Path) -> None:
    link = tmp_path / "tritonserver"
    link.symlink_to(container / "bin" / "tritonserver")
    assert find_triton_server(str(link)).root == container


def test_no_server() -> None:
    with pytest.raises(LaunchError, match=r"no Triton server found: .*tandem-backend\[server\].*--triton-server"):
        find_triton_server()


def test_named_server_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"--triton-server .*/nowhere: no Triton server there"):
        find_triton_server(str(tmp_path / "nowhere"))


def test_no_stub_for_this_python(wheel: Path) -> None:
    (wheel / "python_backend_stubs" / THIS_PYTHON / STUB).unlink()
    (wheel / "python_backend_stubs" / THIS_PYTHON).rmdir()
    with pytest.raises(LaunchError, match=rf"no Python backend stub for Python {THIS_PYTHON}, only for 3\.8: .*3\.11"):
        find_triton_server(str(wheel))


def test_container_without_python_backend(container: Path) -> None:
    (container / "backends" / "python" / STUB).unlink()
    with pytest.raises(LaunchError, match="has no Python backend"):
        find_triton_server(str(container))


def test_container_of_another_python(container: Path) -> None:
    write_stub(container / "backends" / "python" / STUB, "3.7")
    with pytest.raises(LaunchError, match=rf"runs models with Python 3\.7, this is Python {THIS_PYTHON}: install"):
        find_triton_server(str(container)).check()


def test_numpy_is_too_new_for_the_wheel_only(monkeypatch: pytest.MonkeyPatch, wheel: Path, container: Path) -> None:
    _set_numpy(monkeypatch, "2.3.5")
    with pytest.raises(LaunchError, match=r"numpy 2\.3\.5 is too new .*pip install 'numpy<2'"):
        find_triton_server(str(wheel)).check()
    find_triton_server(str(container)).check()
    _set_numpy(monkeypatch, "1.26.4")
    find_triton_server(str(wheel)).check()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ([f"libpython{THIS_PYTHON}.so.1.0"], rf"libpython{THIS_PYTHON}\.so\.1\.0 not found.*apt-get install libpython"),
        (["libdcgm.so.3"], r"needs libraries that are not there: libdcgm\.so\.3"),
    ],
)
def test_missing_library(monkeypatch: pytest.MonkeyPatch, wheel: Path, missing: list[str], message: str) -> None:
    monkeypatch.setattr(installation_module, "_missing_libraries", lambda binaries, env: missing)
    with pytest.raises(LaunchError, match=message):
        find_triton_server(str(wheel)).check()


def test_ldd_output_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    ldd = tmp_path / "ldd"
    ldd.write_text(
        "#!/bin/sh\nprintf '\\tlibpython3.11.so.1.0 => not found\\n\\tlibm.so.6 => /lib/libm.so.6 (0x0)\\n'\n"
        "[ \"$LD_LIBRARY_PATH\" = /somewhere ] || echo '\tlibother.so => not found'\n"
    )
    ldd.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    env = {**os.environ, "LD_LIBRARY_PATH": "/somewhere"}
    assert installation_module._missing_libraries((Path("/bin/true"),), env) == ["libpython3.11.so.1.0"]


def test_environment(wheel: Path) -> None:
    installation = find_triton_server(str(wheel))
    env = installation.environment({"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/mine", "HOME": "/h"})
    assert env["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    libraries = env["LD_LIBRARY_PATH"].split(":")
    assert libraries[0] == str(wheel.parent.parent / "nvidia_pytriton.libs")
    assert libraries[-1] == "/mine"
    assert env["HOME"] == "/h"


def test_python_library_of_its_own_prefix_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / f"libpython{THIS_PYTHON}.so.1.0").touch()
    monkeypatch.setattr(installation_module.sysconfig, "get_config_var", {"LIBDIR": str(tmp_path / "lib")}.get)
    assert find_triton_server(str(wheel)).library_dirs[-1] == tmp_path / "lib"
    monkeypatch.setattr(installation_module.sysconfig, "get_config_var", {"LIBDIR": "/usr/lib"}.get)
    assert find_triton_server(str(wheel)).library_dirs == (wheel.parent.parent / "nvidia_pytriton.libs",)


def test_wheel_backends_are_linked_elsewhere(tmp_path: Path, wheel: Path) -> None:
    before = sorted(wheel.rglob("*"))
    installation = find_triton_server(str(wheel))
    first, second = (installation.assemble_backend_dir(tmp_path / name) for name in ("first", "second"))
    assert first != second
    for assembled in (first, second):
        assert (assembled / "python" / STUB).resolve() == wheel / "python_backend_stubs" / THIS_PYTHON / STUB
        assert (assembled / "python" / "libtriton_python.so").is_file()
    assert sorted(wheel.rglob("*")) == before


def test_container_backends_are_used_as_they_are(tmp_path: Path, container: Path) -> None:
    installation = find_triton_server(str(container))
    assert installation.assemble_backend_dir(tmp_path) == container / "backends"
