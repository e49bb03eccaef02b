# SPDX-License-Identifier: Apache-2.0
"""Segment: a stretch of the log with its own index, in three mapped files of 32-bit words.

    N.tokens   [1 + capacity]  word 0: how many words are in use, itself included; then documents, each closed by END
    N.links    [1 + capacity]  at a position: the position before with the same hash of the GRAM tokens that precede it
    N.heads    [power of two]  by hash: the latest such position; 0: none

A position names the token that followed, and every link points backwards. Appending writes tokens, links, the count
and the heads in this order, so whatever is lost with a killed process leaves a log that reads as a shorter one. Nothing
in the files is trusted: hits are compared token by token, links must fall, and token ids must be the vocabulary's.
"""

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GRAM = 4  # tokens that must agree at least
MAX_MATCH = 8  # as far as agreement is counted
MAX_CANDIDATES = 48  # places looked at in one segment
END = 0xFFFFFFFF  # no vocabulary has it
WORD = 4
SUFFIXES = (".tokens", ".links", ".heads")

Words = NDArray[np.uint32]
Match = tuple[int, tuple[int, ...]]  # (tokens in common, up to MAX_MATCH; the continuation)


def num_heads(capacity: int) -> int:
    return 1 << max(capacity - 1, 1).bit_length()


def segment_bytes(capacity: int) -> int:
    """Size of a segment's files."""
    return WORD * (2 * (1 + capacity) + num_heads(capacity))


class Segment:
    """One segment, writable or not. One thread may append while another looks up."""

    def __init__(self, path: Path, capacity: int | None = None, *, writable: bool) -> None:
        """path: the files' common name. capacity creates them. Raises OSError, or ValueError where sizes don't fit."""
        self.path = path
        self._maps: list[mmap.mmap] = []
        if capacity is not None:
            for suffix, words in zip(SUFFIXES, (1 + capacity, 1 + capacity, num_heads(capacity)), strict=True):
                _create(path.with_suffix(suffix), WORD * words)
        self._tokens, self._links, self._heads = (self._map(path.with_suffix(s), writable) for s in SUFFIXES)
        self.capacity = len(self._tokens) - 1
        if len(self._links) != len(self._tokens) or len(self._heads) != num_heads(self.capacity):
            raise ValueError("the files' sizes don't belong together")
        self._shift = np.uint64(64 - num_heads(self.capacity).bit_length() + 1)
        if capacity is not None:
            self._tokens[0] = 1

    def _map(self, path: Path, writable: bool) -> Words:
        with path.open("r+b" if writable else "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self._maps.append(mapped)
        return np.frombuffer(mapped, dtype=np.uint32, count=len(mapped) // WORD)

    @property
    def num_words(self) -> int:
        """Words in use: 1 more than tokens and document ends."""
        return min(int(self._tokens[0]), len(self._tokens)) or 1

    @property
    def num_bytes(self) -> int:
        return segment_bytes(self.capacity)

    def has_room(self, num_tokens: int) -> bool:
        return self.num_words + num_tokens + 1 <= len(self._tokens)

    def append(self, document: Words) -> None:
        """Add a document; the caller has seen that there is room."""
        start = self.num_words
        end = start + len(document)
        self._tokens[start:end] = document
        self._tokens[end] = END
        if len(document) <= GRAM:
            self._tokens[0] = end + 1
            return
        hashes = self._hash(np.lib.stride_tricks.sliding_window_view(document[:-1], GRAM))
        positions = np.arange(start + GRAM, end, dtype=np.uint32)
        order = np.argsort(hashes, kind="stable")
        hashes, positions = hashes[order], positions[order]
        is_same = hashes[1:] == hashes[:-1]
        before = self._heads[hashes]
        before[1:][is_same] = positions[:-1][is_same]
        self._links[positions] = before
        self._tokens[0] = end + 1
        is_last = np.append(~is_same, True)
        self._heads[hashes[is_last]] = positions[is_last]

    def matches(self, tail: Words, depth: int, vocab_size: int) -> list[Match]:
        """Places that follow the same tokens as `tail` ends with (at least GRAM), the latest first.

        Continuations have up to `depth` tokens and end with their document.
        """
        places = self._candidates(self._hash(tail[None, -GRAM:]).item())
        if not places:
            return []
        # Row by row the words before a place, the nearest first; before the log's start lies its count, never a match
        # of a token by itself: lengths are counted from the nearest on and GRAM of them must agree.
        reach = min(len(tail), MAX_MATCH)
        offsets = np.arange(1, reach + 1)
        before = self._tokens[np.maximum(np.array(places)[:, None] - offsets, 0)]
        lengths = np.logical_and.accumulate(before == tail[::-1][:reach], axis=1).sum(axis=1)
        last = self.num_words
        matches = []
        for place, length in zip(places, lengths.tolist(), strict=True):
            if length >= GRAM:
                text = self._tokens[place : min(place + depth, last)].tolist()
                cut = next((i for i, token_id in enumerate(text) if token_id >= vocab_size), len(text))
                if cut:
                    matches.append((length, tuple(text[:cut])))
        return matches

    def _candidates(self, hashed: int) -> list[int]:
        places: list[int] = []
        limit, place = self.num_words, self._heads.item(hashed)
        links = self._links
        while 0 < place < limit and len(places) < MAX_CANDIDATES:
            places.append(place)
            limit, place = place, links.item(place)
        return places

    def _hash(self, grams: Words) -> NDArray[np.uint64]:
        """Of GRAM tokens along the last axis."""
        value = np.zeros(grams.shape[:-1], dtype=np.uint64)
        for i in range(GRAM):
            value = (value ^ grams[..., i]) * np.uint64(0x9E3779B97F4A7C15)
            value ^= value >> np.uint64(29)
        hashed: NDArray[np.uint64] = (value * np.uint64(0x9E3779B97F4A7C15)) >> self._shift
        return hashed

    def flush(self) -> None:
        for mapped in self._maps:
            mapped.flush()

    def remove(self) -> None:
        """Delete the files; a reader keeps what it has mapped."""
        for suffix in SUFFIXES:
            self.path.with_suffix(suffix).unlink(missing_ok=True)


def _create(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    try:
        os.truncate(descriptor, size)
    finally:
        os.close(descriptor)
