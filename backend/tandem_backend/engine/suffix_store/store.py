# SPDX-License-Identifier: Apache-2.0
"""SuffixStore: segments in a directory of mode 0700, under a byte cap that forgets the oldest whole documents first."""

import fcntl
import json
import logging
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from tandem_backend.engine.suffix_store.segment import (
    GRAM,
    MAX_MATCH,
    SUFFIXES,
    Match,
    Segment,
    segment_bytes,
)
from tandem_backend.errors import ConfigError

logger = logging.getLogger(__name__)

DESCRIPTION = "store.json"
MIN_CAPACITY, MAX_CAPACITY = 1 << 12, 1 << 23  # tokens of a segment
NUM_SEGMENTS = 8  # a full store forgets this part of itself at a time
MIN_BYTES = 2 * segment_bytes(MIN_CAPACITY)


class _Description(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    tokenizer: str


class SuffixStore:
    """What a directory holds; with `writable` it grows by `add`. A directory takes one writer at a time.

    The engine's thread looks up; a thread of the store's own writes, so that no round waits for a disk.
    """

    def __init__(
        self, directory: Path, tokenizer: str, vocab_size: int, *, max_bytes: int = 0, writable: bool, key: str
    ) -> None:
        """tokenizer: its fingerprint; key: the configuration's name for the directory, for errors.

        Raises ConfigError naming key where the directory can't be used or was written with another tokenizer.
        """
        self._directory, self._vocab_size, self._max_bytes = directory, vocab_size, max_bytes
        self._lock_file: int | None = None
        self._segments: list[Segment] = []  # oldest first; replaced as a whole, so readers need no lock
        self._documents: queue.SimpleQueue[Sequence[int] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        try:
            if writable:
                self._prepare_directory(tokenizer)
                writable = self._lock()
            self._check(tokenizer, key)
            self._segments = self._open_segments(writable)
        except OSError as error:
            raise ConfigError(f"{key}: {directory}: {error.strerror or error}") from error
        if writable:
            self._writer = threading.Thread(target=self._write_documents, name="suffix-store", daemon=True)
            self._writer.start()

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_words - 1 for segment in self._segments)

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self._segments)

    def matches(self, token_ids: Sequence[int], depth: int, count: int) -> list[Match]:
        """At most `count` places whose text before agrees with the end of token_ids: longest first, then the latest."""
        if len(token_ids) < GRAM:
            return []
        tail = np.array(token_ids[-MAX_MATCH:], dtype=np.uint32)
        found: list[Match] = []
        for segment in reversed(self._segments):
            found += segment.matches(tail, depth, self._vocab_size)
            if sum(length == MAX_MATCH for length, _ in found) >= count:
                break
        return sorted(found, key=lambda match: -match[0])[:count]

    def add(self, document: Sequence[int]) -> None:
        """Remember a text, soon and on another thread. Nothing happens in a store that isn't written."""
        if self._writer is not None and len(document) > GRAM:
            self._documents.put(tuple(document))

    def close(self) -> None:
        """Write what waits and let another process have the directory."""
        if self._writer is not None:
            self._documents.put(None)
            self._writer.join()
            self._writer = None
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _prepare_directory(self, tokenizer: str) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self._directory, 0o700)
        path = self._directory / DESCRIPTION
        if not path.exists():
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(_Description(tokenizer=tokenizer).model_dump_json(), encoding="utf-8")
            scratch.chmod(0o600)
            scratch.replace(path)

    def _lock(self) -> bool:
        """Whether this process is the directory's writer now."""
        descriptor = os.open(self._directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            logger.warning("%s: another process writes this suffix store; it is only read here", self._directory)
            return False
        self._lock_file = descriptor
        return True

    def _check(self, tokenizer: str, key: str) -> None:
        path = self._directory / DESCRIPTION
        try:
            description = _Description.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError) as error:
            raise ConfigError(f"{key}: {self._directory} is no suffix store: {DESCRIPTION}: {error}") from error
        if description.tokenizer != tokenizer:
            raise ConfigError(f"{key}: {self._directory} was written with another tokenizer; name another directory")

    def _open_segments(self, writable: bool) -> list[Segment]:
        segments = []
        for path in sorted(self._directory.glob(f"*{SUFFIXES[0]}")):
            try:
                segments.append(Segment(path, writable=writable))
            except (OSError, ValueError) as error:
                logger.warning("%s: not a whole segment of a suffix store (%s); left out", path, error)
                if writable:
                    _remove_segment(path)
        return segments

    def _write_documents(self) -> None:
        while (document := self._documents.get()) is not None:
            try:
                self._append(np.array(document, dtype=np.uint32))
            except Exception:
                logger.exception("%s: a text could not be stored; the suffix store stays as it is", self._directory)
                return
        for segment in self._segments[-1:]:
            segment.flush()

    def _append(self, document: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
        capacity = self._capacity()
        # A document longer than a segment is kept in parts that overlap, so that no place loses the tokens before it.
        for start in range(0, max(len(document) - MAX_MATCH, 1), capacity - 1 - MAX_MATCH):
            part = document[start : start + capacity - 1]
            if not self._segments or not self._segments[-1].has_room(len(part)):
                self._add_segment(capacity)
            self._segments[-1].append(part)

    def _capacity(self) -> int:
        """Tokens of a new segment: an eighth of the cap."""
        capacity = MIN_CAPACITY
        while capacity < MAX_CAPACITY and (
            not self._max_bytes or NUM_SEGMENTS * segment_bytes(2 * capacity) <= self._max_bytes
        ):
            capacity *= 2
        return capacity

    def _add_segment(self, capacity: int) -> None:
        segments = list(self._segments)
        while segments and self._max_bytes:
            if sum(segment.num_bytes for segment in segments) + segment_bytes(capacity) <= self._max_bytes:
                break
            segments.pop(0).remove()
        number = int(segments[-1].path.stem) + 1 if segments else 1
        segments.append(Segment(self._directory / f"{number:08d}", capacity, writable=True))
        self._segments = segments


def _remove_segment(path: Path) -> None:
    for suffix in SUFFIXES:
        path.with_suffix(suffix).unlink(missing_ok=True)


def build_corpus(directory: Path, tokenizer: str, vocab_size: int, documents: Iterable[Sequence[int]]) -> int:
    """Write a new store with these documents; returns its tokens. Raises ConfigError where the directory has one."""
    if (directory / DESCRIPTION).exists():
        raise ConfigError(f"{directory}: holds a corpus already; name an empty or new directory")
    store = SuffixStore(directory, tokenizer, vocab_size, writable=True, key=str(directory))
    try:
        for document in documents:
            store.add(document)
    finally:
        store.close()
    return store.num_tokens
