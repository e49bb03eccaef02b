# SPDX-License-Identifier: Apache-2.0
"""Pools of KV blocks and recurrent slots: who owns which index. The memory itself is model.state's."""

from collections import Counter
from collections.abc import Iterable


class IndexPool:
    """Indices [0, size) handed out one by one and counted by reference."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._references = [0] * size

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """An index with one reference; IndexError when none is free (callers ask `num_free` first)."""
        index = self._free.pop()
        self._references[index] = 1
        return index

    def share(self, index: int) -> None:
        """Take one more reference on an index that has an owner."""
        assert self._references[index] > 0, f"index {index} is free and can't be shared"
        self._references[index] += 1

    def num_references(self, index: int) -> int:
        return self._references[index]

    def release(self, index: int) -> None:
        assert self._references[index] > 0, f"index {index} is released more often than it was taken"
        self._references[index] -= 1
        if self._references[index] == 0:
            self._free.append(index)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raises AssertionError unless free + owned is the whole pool and every reference has an owner."""
        counts = Counter(owned)
        assert len(set(self._free)) == len(self._free), "an index is free twice"
        assert not set(self._free) & set(counts), "an index is both free and owned"
        assert len(self._free) + len(counts) == self.size, (
            f"{len(self._free)} free + {len(counts)} owned indices of {self.size}"
        )
        for index, count in counts.items():
            assert self._references[index] == count, (
                f"index {index} has {self._references[index]} references and {count} owners"
            )
