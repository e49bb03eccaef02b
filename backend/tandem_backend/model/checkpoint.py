# SPDX-License-Identifier: Apache-2.0
"""Reads tensors of a Hugging Face directory: one safetensors file or several with an index, memory-mapped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem_backend.errors import CheckpointError
from tandem_backend.model.config import read_json

# Parts of a checkpoint that the decoder does not use; an unknown tensor outside them is refused.
SKIPPED_PREFIXES = ("mtp.", "model.visual.", "visual.")
SKIPPED_SUFFIXES = (".rotary_emb.inv_freq",)


class Weights(Protocol):
    """Where tensors come from."""

    directory: Path  # for messages

    def names(self) -> list[str]: ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...

    def refuse_unused(self) -> None: ...


class Checkpoint:
    """Tensors by name. `take` marks a tensor as used, so that `refuse_unused` can name what nothing asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, safe_open] = {}
        self._file_of: dict[str, str] = {}
        self._used: set[str] = set()
        for file, names in _list_files(directory):
            handle = self._open(file)
            present = set(handle.keys())
            missing = sorted(set(names) - present) if names is not None else []
            if missing:
                raise CheckpointError(f"{directory / file}: tensor {missing[0]!r} of the index is missing")
            self._file_of.update(dict.fromkeys(present if names is None else names, file))

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The stored type in safetensors' spelling: BF16, F16, F32."""
        return str(self._files[self._file_of[name]].get_slice(name).get_dtype())

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The memory-mapped tensor. Raises CheckpointError when it is missing or has another shape or type."""
        if name not in self._file_of:
            raise CheckpointError(f"{self.directory}: tensor {name!r} is missing")
        if self.shape(name) != shape:
            raise CheckpointError(f"{self.directory}: tensor {name!r} has shape {self.shape(name)}, expected {shape}")
        if self.dtype(name) not in ("BF16", "F16", "F32"):
            raise CheckpointError(
                f"{self.directory}: tensor {name!r} has type {self.dtype(name)}; supported: BF16, F16, F32"
            )
        self._used.add(name)
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def refuse_unused(self) -> None:
        """Raises CheckpointError naming tensors that belong to no known part: the layout would be misread."""
        extra = [
            name
            for name in self.names()
            if name not in self._used and not name.startswith(SKIPPED_PREFIXES) and not name.endswith(SKIPPED_SUFFIXES)
        ]
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise CheckpointError(f"{self.directory}: unexpected tensor {extra[0]!r}{more}")

    def _open(self, file: str) -> safe_open:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.directory / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.directory / file}: can't be read: {error}") from error
        return self._files[file]


def weight_files(directory: Path) -> list[str]:
    """Names of the safetensors files that hold the checkpoint. Raises CheckpointError."""
    return [file for file, _ in _list_files(directory)]


def _list_files(directory: Path) -> Iterator[tuple[str, list[str] | None]]:
    """Files with the tensor names an index puts into them (None: all that the file holds)."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        if not (directory / "model.safetensors").exists():
            raise CheckpointError(f"{directory}: has neither model.safetensors nor model.safetensors.index.json")
        yield "model.safetensors", None
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{index}: weight_map names {file!r}, which is not a plain file name")
        yield file, [name for name, where in weight_map.items() if where == file]
