# SPDX-License-Identifier: Apache-2.0
"""Writes Triton model folders: an engine's with its checkpoint, and that of its stateless front."""

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_backend.errors import ConfigError
from tandem_backend.model.checkpoint import weight_files

# config.pbtxt of the repository's own models, whose names are put in place of these.
TEMPLATES = Path(__file__).parent / "templates"
ENGINE_NAME, FRONT_NAME = "tandem", "tandem_generate"
FRONT_SUFFIX = "_generate"
WARMUP_TOKENS = 16  # what config.pbtxt's model_warmup reads its max_tokens from
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".md")  # of a checkpoint's files beside its weights
_FRONT_OF = re.compile(r'key: "model_name" value \{ string_value: "(.*?)" \}')

MODEL_PY = '''# SPDX-License-Identifier: Apache-2.0
"""Triton server loads its Python models from here; the model is in the package."""

from tandem_backend.serving.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What to write to `folder`, whose name is the model's.

    engine: the content of engine.json. checkpoints: directories by the name that engine.json gives them. With `link`
    they are relative symbolic links, else copies of the files that are read.
    """

    folder: Path
    version: int
    engine: Mapping[str, Any]
    checkpoints: Mapping[str, Path]
    link: bool = False
    with_front: bool = True
    replace: bool = False

    @property
    def front(self) -> Path:
        return self.folder.with_name(self.folder.name + FRONT_SUFFIX)

    def check(self) -> None:
        """Raises ConfigError where the folder's name is no model's, or something else stands in its place."""
        if not MODEL_NAME.fullmatch(self.folder.name):
            raise ConfigError(
                f"{self.folder}: the folder's name is the model's: letters, digits and . _ -, beginning with one of "
                f"the first two; got {self.folder.name!r}"
            )
        version = self.folder / str(self.version)
        if version.exists() and not self.replace:
            raise ConfigError(f"{version}: is there already; --force replaces it, --version adds another")
        for folder in (self.folder, self.front) if self.with_front else (self.folder,):
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"{folder}: is no folder")
            if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.pbtxt").exists():
                raise ConfigError(f"{folder}: is there already and no Triton model: it has no config.pbtxt")
        if self.with_front and (self.front / "config.pbtxt").exists():
            name = _FRONT_OF.search((self.front / "config.pbtxt").read_text(encoding="utf-8"))
            if name is None or name[1] != self.folder.name:
                raise ConfigError(f"{self.front}: is there already and no front of {self.folder.name}; see --no-front")

    def write(self) -> list[Path]:
        """Write what is missing, all or nothing; returns it. An existing config.pbtxt or front stays as it is.

        Raises ConfigError as `check`, and OSError.
        """
        self.check()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the model, so that all of it can be moved into place at once.
        staging = Path(tempfile.mkdtemp(dir=self.folder.parent, prefix=f".{self.folder.name}."))
        try:
            self._stage(staging / "model")
            moves = _moves(staging / "model", self.folder, str(self.version))
            if self.with_front and not (self.front / "config.pbtxt").exists():
                _stage_front(staging / "front", self.front.name, self.folder.name)
                moves += _moves(staging / "front", self.front, "1")
            with _undone_on_error(staging / "replaced") as move:
                for source, target in moves:
                    move(source, target)
            return [target for _, target in moves]
        finally:
            shutil.rmtree(staging)

    def _stage(self, folder: Path) -> None:
        version = folder / str(self.version)
        version.mkdir(parents=True)
        _write_model(folder, version, ENGINE_NAME, {ENGINE_NAME: self.folder.name}, "model")
        (version / "engine.json").write_text(json.dumps(self.engine) + "\n", encoding="utf-8")
        for name, checkpoint in self.checkpoints.items():
            if self.link:
                final = self.folder.resolve() / str(self.version)
                (version / name).symlink_to(os.path.relpath(checkpoint.resolve(), final))
            else:
                _copy_checkpoint(checkpoint, version / name)
        (folder / "warmup").mkdir()
        (folder / "warmup" / "max_tokens").write_bytes(struct.pack("<i", WARMUP_TOKENS))


def _stage_front(folder: Path, name: str, engine: str) -> None:
    (folder / "1").mkdir(parents=True)
    _write_model(folder, folder / "1", FRONT_NAME, {FRONT_NAME: name, ENGINE_NAME: engine}, "front")


def _write_model(folder: Path, version: Path, template: str, names: Mapping[str, str], module: str) -> None:
    """config.pbtxt with `names` in place of the template's, and model.py."""
    config = (TEMPLATES / f"{template}.pbtxt").read_text(encoding="utf-8")
    for old, new in names.items():
        config = config.replace(f'"{old}"', f'"{new}"').replace(f"`{old}`", f"`{new}`")
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    (version / "model.py").write_text(MODEL_PY.format(module=module), encoding="utf-8")


def _copy_checkpoint(source: Path, target: Path) -> None:
    """The safetensors files that are read, and the texts beside them: configuration, tokenizer, template, licences."""
    texts = [path.name for path in source.iterdir() if path.is_file() and _is_text(path)]
    target.mkdir()
    for name in {*texts, *weight_files(source)}:
        shutil.copyfile(source / name, target / name)


def _is_text(path: Path) -> bool:
    return not path.name.startswith(".") and (path.suffix in _TEXT_SUFFIXES or path.name.startswith("LICENSE"))


def _moves(staged: Path, folder: Path, version: str) -> list[tuple[Path, Path]]:
    """What of a staged model goes where: all of it, or to an existing model its version and what that lacks."""
    if not folder.exists():
        return [(staged, folder)]
    missing = [path for path in sorted(staged.iterdir()) if path.name == version or not (folder / path.name).exists()]
    return [(path, folder / path.name) for path in missing]


@contextmanager
def _undone_on_error(replaced: Path) -> Iterator[Any]:
    """Gives a function that moves a path into place; after an exception all is where it was."""
    replaced.mkdir()
    undo: list[tuple[Path, Path]] = []

    def move(source: Path, target: Path) -> None:
        if target.exists() or target.is_symlink():
            kept = replaced / str(len(undo))
            target.rename(kept)
            undo.append((kept, target))
        source.rename(target)
        undo.append((target, source))

    try:
        yield move
    except BaseException:
        for source, target in reversed(undo):
            source.rename(target)
        raise
