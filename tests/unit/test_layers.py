# SPDX-License-Identifier: Apache-2.0
"""The layers: kernels <- model <- engine <- serving <- commands. A module imports only to the left."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKEND = ROOT / "backend"
SHARED = ("tandem_backend.config", "tandem_backend.types", "tandem_backend.errors")
KERNELS = "tandem_kernels"
MODEL = "tandem_backend.model"
ENGINE = "tandem_backend.engine"
SERVING = "tandem_backend.serving"
VERIFICATION = "tandem_backend.verification"
BENCHMARKS = "tandem_backend.benchmarks"
COMMANDS = "tandem_backend.commands"

# Layer -> the packages of ours that it may import; itself is always allowed.
ALLOWED = {
    KERNELS: (),
    MODEL: (KERNELS, *SHARED),
    ENGINE: (KERNELS, MODEL, *SHARED),
    SERVING: (KERNELS, MODEL, ENGINE, *SHARED),
    VERIFICATION: (KERNELS, MODEL, ENGINE, *SHARED, "tandem_client"),
    BENCHMARKS: (KERNELS, MODEL, ENGINE, VERIFICATION, *SHARED, "tandem_client"),
    COMMANDS: (KERNELS, MODEL, ENGINE, SERVING, VERIFICATION, BENCHMARKS, *SHARED, "tandem_client"),
    "tandem_backend.config": SHARED,
    "tandem_backend.types": SHARED,
    "tandem_backend.errors": (),
    "tandem_client": (),
}
OURS = ("tandem_backend", "tandem_kernels", "tandem_client")

# Foreign package -> where alone it may be imported.
CONFINED = {
    "triton": (KERNELS, "tests.kernels.gpu"),
    "triton_python_backend_utils": (SERVING,),
    "tritonclient": ("tandem_client", "tandem_backend.serving.server_api", "tests.client", "tests.e2e"),
}


def _is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _imports(module: str, source: str, is_package: bool = False) -> set[str]:
    """Dotted names that `source` imports, relative ones resolved; `from a import b` counts as a.b, a submodule."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def _violations(module: str, imports: set[str]) -> set[str]:
    layer = next((name for name in ALLOWED if _is_within(module, (name,))), None)
    wrong = {
        name
        for name in imports
        for foreign, places in CONFINED.items()
        if _is_within(name, (foreign,)) and not _is_within(module, places)
    }
    if layer is not None:
        wrong |= {name for name in imports if _is_within(name, OURS) and not _is_within(name, (layer, *ALLOWED[layer]))}
    return wrong


def _modules() -> dict[str, Path]:
    bases = (BACKEND, ROOT / "kernels", ROOT / "client", ROOT)
    folders = (
        BACKEND / "tandem_backend",
        ROOT / "kernels" / KERNELS,
        ROOT / "client" / "tandem_client",
        ROOT / "tests",
    )
    found = {}
    for base, folder in zip(bases, folders, strict=True):
        for path in folder.rglob("*.py"):
            found[".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


MODULES = _modules()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_stay_within_the_layers(module: str) -> None:
    path = MODULES[module]
    imports = _imports(module, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py")
    assert _violations(module, imports) == set()


def test_every_layer_has_modules() -> None:
    assert {layer for layer in ALLOWED if not any(_is_within(module, (layer,)) for module in MODULES)} == set()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tandem_kernels.linear", "from tandem_backend.config import EngineConfig"),
        ("tandem_backend.model.decoder", "import tandem_backend.engine"),
        ("tandem_backend.model.decoder", "from ..engine import Engine"),
        ("tandem_backend.engine.engine", "def late():\n    from tandem_backend.serving import launcher"),
        ("tandem_backend.engine.engine", "import triton.language as tl"),
        ("tandem_backend.engine.engine", "import triton_python_backend_utils"),
        ("tandem_backend.serving.model", "from tandem_backend.commands import serve"),
        ("tandem_backend.serving.model", "import tandem_client"),
        ("tandem_backend.engine.engine", "from tandem_backend.verification.gate import verify"),
        ("tandem_backend.verification.gate", "from tandem_backend.commands import verify"),
        ("tandem_backend.commands.demo", "import tritonclient.grpc"),
        ("tandem_client.sync", "from tandem_backend.types import Request"),
        ("tests.unit.test_engine", "import tritonclient.http"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert _violations(module, _imports(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tandem_kernels.gpu.linear", "import triton.language as tl"),
        ("tandem_backend.model.decoder", "from tandem_kernels import linear\nfrom . import layout"),
        ("tandem_backend.engine.engine", "from tandem_backend.model.decoder import Decoder\nimport torch"),
        ("tandem_backend.serving.model", "import triton_python_backend_utils as pb_utils"),
        ("tandem_backend.commands.demo", "from tandem_client import TandemClient"),
        ("tests.e2e.test_streams", "import tritonclient.grpc"),
    ],
)
def test_a_right_import_is_accepted(module: str, source: str) -> None:
    assert _violations(module, _imports(module, source)) == set()
