# SPDX-License-Identifier: Apache-2.0
"""An anchor as a safetensors file: its tokens, its recurrent state, and the KV rows behind the anchor before it.

A conversation's anchors lie behind each other, so each file brings only what the one before (its `parent`) has not.
The checksum covers every byte of the file.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

MAX_HEADER_BYTES = 16 << 20
LENGTH_BYTES = 8  # of the header's length, in front of it
NO_CHECKSUM = "?" * 64  # stands in the checksum's place while it is computed
HEADER, CHECKSUM = "tandem_anchor", "checksum"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32"}


class BadFileError(Exception):
    """What lies there is no whole anchor file."""


class AnchorHeader(BaseModel):
    """What an index needs to know of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    fingerprint: str  # of all that the bits depend on
    tenant: str  # SHA-256 of the tenant's name
    position: int = Field(gt=0)  # tokens of the prefix
    start: int = Field(ge=0)  # KV rows before are the parent's; but for the last one, see first_row
    parent: str  # digest of the prefix of `start` tokens; empty where there is none
    num_drafter_rows: int = Field(ge=0)  # rows from the prefix's first that hold a block drafter's KV too
    has_hidden: bool

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.start >= self.position or bool(self.parent) != bool(self.start):
            raise ValueError("start, position and parent do not belong together")
        return self

    @property
    def first_row(self) -> int:
        """A block drafter's row depends on the token after it, so the parent's last row comes again."""
        return max(self.start - 1, 0)


def write_file(path: Path, header: AnchorHeader, tensors: Mapping[str, Tensor]) -> int:
    """Write and sync a new file of mode 0600; returns its bytes. Raises OSError, FileExistsError among them.

    tensors: on the CPU. Written piece by piece, since hashing and writing let other threads run and a copy does not.
    """
    parts = [_bytes_of(tensor) for tensor in tensors.values()]
    ends = list(accumulate(len(part) for part in parts))
    entries = {
        name: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end - len(part), end]}
        for (name, tensor), part, end in zip(tensors.items(), parts, ends, strict=True)
    }
    metadata = {HEADER: header.model_dump_json(), CHECKSUM: NO_CHECKSUM}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    start = struct.pack("<Q", len(text)) + text
    total = hashlib.sha256(start)
    for part in parts:
        total.update(part)
    start = start.replace(NO_CHECKSUM.encode(), total.hexdigest().encode(), 1)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(start)
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    return len(start) + sum(len(part) for part in parts)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_header(path: Path) -> tuple[AnchorHeader, int, float]:
    """The header, the file's bytes, and when it was used last. The checksum is not looked at.

    Raises OSError, and BadFileError where the file is torn or another one.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        start = file.read(LENGTH_BYTES)
        content = start + file.read(min(_header_bytes(start), status.st_size))
    entries, header, _ = _parse(content)
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if status.st_size != len(content) + end:
        raise BadFileError(f"has {status.st_size} bytes of {len(content) + end}")
    return header, status.st_size, status.st_mtime


def read_file(path: Path) -> tuple[AnchorHeader, dict[str, Tensor]]:
    """The whole file, on the CPU. Raises OSError, and BadFileError where a byte is not as it was written."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        data = file.read()
    _, header, checksum = _parse(data[: LENGTH_BYTES + _header_bytes(data[:LENGTH_BYTES])])
    place, rest = data.find(checksum.encode()), memoryview(data)
    found = hashlib.sha256(rest[:place])
    found.update(NO_CHECKSUM.encode())
    found.update(rest[place + len(NO_CHECKSUM) :])
    if found.hexdigest() != checksum:
        raise BadFileError("the checksum is another one")
    try:
        return header, load(data)
    except (SafetensorError, ValueError) as error:
        raise BadFileError(str(error)) from error


def _header_bytes(start: bytes) -> int:
    if len(start) != LENGTH_BYTES or not 0 < (length := struct.unpack("<Q", start)[0]) <= MAX_HEADER_BYTES:
        raise BadFileError("does not begin as a safetensors file")
    return int(length)


def _parse(content: bytes) -> tuple[dict[str, Any], AnchorHeader, str]:
    """Of a file's beginning up to its tensors: their entries, our header and the checksum."""
    try:
        entries = json.loads(content[LENGTH_BYTES:])
        metadata = entries.pop("__metadata__")
        header, checksum = AnchorHeader.model_validate_json(metadata[HEADER]), metadata[CHECKSUM]
        if len(checksum) != len(NO_CHECKSUM) or checksum.encode() not in content:
            raise ValueError("its checksum is written in another way")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFileError(f"its header is none of ours: {error}") from error
    return entries, header, checksum
