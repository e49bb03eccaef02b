# SPDX-License-Identifier: Apache-2.0
"""Fingerprint: everything that bits may depend on. Stored results and states are good for an equal one only."""

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import tandem_kernels
import torch
from pydantic import BaseModel, ConfigDict
from tandem_kernels.device import CPU

import tandem_backend.model
from tandem_backend.errors import CheckpointError
from tandem_backend.model.state import KV_BLOCK

WEIGHT_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SOURCE_FILES = ("**/*.py", "**/*.c", "**/*.h")
LIBRARY_FILES = ("**/*.so",)
PACKAGES = ("tandem-backend", "numpy", "safetensors", "tokenizers", "torch", "transformers")
GPU_PACKAGES = ("triton",)  # compiles the kernels


class Fingerprint(BaseModel):
    """Hashes are SHA-256 in hex, over names and contents of the files they cover."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: str  # config.json and the safetensors files
    tokenizer: str  # tokenizer files and the chat template
    kernels: str  # sources of the kernels, and of the model, which fixes the order of the ops
    libraries: str  # the compiled kernels; the same sources compiled again may differ here and give the same bits
    arithmetic: dict[str, str | int]  # settings that are part of the arithmetic
    device: str  # its model; all x86-64 processors that can run the kernels give the same bits
    versions: dict[str, str]  # distribution -> version

    def differing(self, other: "Fingerprint") -> list[str]:
        """Names of the fields that differ."""
        return [name for name in type(self).model_fields if getattr(self, name) != getattr(other, name)]


def take_fingerprint(checkpoint: Path, device: torch.device = CPU) -> Fingerprint:
    """Of a checkpoint under this installation; reads all its files. Raises CheckpointError where that fails."""
    try:
        weights, tokenizer = (_hash_files(checkpoint, patterns) for patterns in (WEIGHT_FILES, TOKENIZER_FILES))
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: can't be read: {error}") from error
    return Fingerprint(
        weights=weights,
        tokenizer=tokenizer,
        kernels=_hash_packages(SOURCE_FILES),
        libraries=_hash_packages(LIBRARY_FILES),
        arithmetic={"kv_block": KV_BLOCK, "state_dtype": "float32", "prefill": "exact"},
        device=_device_name(device),
        versions={name: version(name) for name in (*PACKAGES, *(GPU_PACKAGES if device.type == "cuda" else ()))},
    )


def _device_name(device: torch.device) -> str:
    return "cpu x86-64" if device.type == "cpu" else f"{device.type} {torch.cuda.get_device_name(device)}"


def _hash_packages(patterns: Sequence[str]) -> str:
    total = hashlib.sha256()
    for package in (tandem_kernels, tandem_backend.model):
        assert package.__file__ is not None, "both are packages with an __init__.py"
        total.update(_hash_files(Path(package.__file__).parent, patterns).encode())
    return total.hexdigest()


def _hash_files(folder: Path, patterns: Sequence[str]) -> str:
    """Of the files under `folder` that match, in the order of their names; none match: of nothing."""
    total = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()}\n{digest}\n".encode())
    return total.hexdigest()
