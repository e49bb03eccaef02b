# SPDX-License-Identifier: Apache-2.0
"""RowBatch: all rows of one pass, of any mix of sequences, as the tensors that the kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """What one sequence brings to a pass: a draft tree in pre-order, or a chunk of prompt (a chain)."""

    token_ids: Sequence[int]
    prefix_len: int  # tokens whose KV and state are committed
    slot: int  # recurrent state slot
    block_table: Sequence[int]
    parents: Sequence[int] | None = None  # local indices, -1 for the root; None: a chain
    logit_rows: Sequence[int] | None = None  # local indices of the rows that need logits; None: all


@dataclass(frozen=True, slots=True)
class PackedRows:
    """int32 tensors that are views of one, `packed`, so that one copy brings all to a device."""

    packed: Tensor

    def to(self, device: torch.device) -> Self:
        """The same on `device`."""
        if self.packed.device == device:
            return self
        packed = self.packed.to(device, non_blocking=True)
        tensors = {item.name: getattr(self, item.name) for item in fields(self)}
        views = {
            name: packed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor)
        }
        return replace(self, **views)


def pack_ints(*parts: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """An int32 tensor of all parts, and its view of each: making tensors costs more than filling them."""
    # By numpy, which reads a list in half the time.
    packed = torch.from_numpy(np.array([value for part in parts for value in part], dtype=np.int32))
    views: tuple[Tensor, ...] = packed.split_with_sizes([len(part) for part in parts])
    return packed, views


@dataclass(frozen=True, slots=True)
class RowBatch(PackedRows):
    """Rows of sequence s lie in [seq_starts[s], seq_starts[s + 1]); parents are row indices of this batch."""

    token_ids: Tensor  # [rows] int32
    positions: Tensor  # [rows] int32, prefix length + depth
    parents: Tensor  # [rows] int32, -1 for a sequence's first row
    row_seqs: Tensor  # [rows] int32
    row_slots: Tensor  # [rows] int32
    seq_starts: Tensor  # [seqs + 1] int32
    slots: Tensor  # [seqs] int32
    prefix_lens: Tensor  # [seqs] int32
    block_tables: Tensor  # [seqs, longest] int32
    logit_rows: Tensor | None  # [n] int32; None: every row
    sequences: tuple[SequenceRows, ...]
    starts: tuple[int, ...]  # seq_starts on the host

    @property
    def num_rows(self) -> int:
        return self.starts[-1]


def build_batch(sequences: Sequence[SequenceRows]) -> RowBatch:
    """Lay out the rows of `sequences` one after the other."""
    starts = [0]
    token_ids: list[int] = []
    parents: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    row_seqs: list[int] = []
    row_slots: list[int] = []
    tables: list[int] = []
    longest = max(len(seq.block_table) for seq in sequences)
    for i, seq in enumerate(sequences):
        base, n = starts[-1], len(seq.token_ids)
        token_ids.extend(seq.token_ids)
        if seq.parents is None:
            parents.append(-1)
            parents.extend(range(base, base + n - 1))
            positions.extend(range(seq.prefix_len, seq.prefix_len + n))
        else:
            parents.extend([parent if parent < 0 else base + parent for parent in seq.parents])
            positions.extend([seq.prefix_len + depth for depth in tree_depths(seq.parents)])
        logit_rows.extend(range(base, base + n) if seq.logit_rows is None else [base + row for row in seq.logit_rows])
        row_seqs.extend([i] * n)
        row_slots.extend([seq.slot] * n)
        tables.extend(seq.block_table)
        tables.extend([0] * (longest - len(seq.block_table)))
        starts.append(base + n)
    slots, prefix_lens = [seq.slot for seq in sequences], [seq.prefix_len for seq in sequences]
    packed, parts = pack_ints(
        token_ids, positions, parents, row_seqs, row_slots, starts, slots, prefix_lens, tables, logit_rows
    )
    return RowBatch(
        packed=packed,
        token_ids=parts[0],
        positions=parts[1],
        parents=parts[2],
        row_seqs=parts[3],
        row_slots=parts[4],
        seq_starts=parts[5],
        slots=parts[6],
        prefix_lens=parts[7],
        block_tables=parts[8].view(len(sequences), longest),
        logit_rows=None if len(logit_rows) == starts[-1] else parts[9],
        sequences=tuple(sequences),
        starts=tuple(starts),
    )


def tree_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node of a tree in pre-order, 0 for the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass(frozen=True, slots=True)
class AcceptedRows(PackedRows):
    """The rows a round keeps, root first; a sequence that keeps none is left out."""

    slots: Tensor  # [kept seqs] int32
    path_starts: Tensor  # [kept seqs + 1] int32
    path_rows: Tensor  # [rows kept] int32
    places: Tensor  # [rows kept] int32, block index * block + offset


def accept_rows(
    batch: RowBatch, paths: Sequence[Sequence[int]], block: int, offsets: Sequence[int] | None = None
) -> AcceptedRows:
    """Collect each sequence's accepted path (local row indices, root first, maybe empty) for commit.

    offsets: rows of each path that were committed before and that `paths` does not have any more; None: none were.
    """
    slots: list[int] = []
    rows: list[int] = []
    places: list[int] = []
    starts = [0]
    for i, (seq, base, path) in enumerate(zip(batch.sequences, batch.starts, paths, strict=False)):
        if not path:
            continue
        start = seq.prefix_len + (offsets[i] if offsets is not None else 0)
        slots.append(seq.slot)
        rows.extend([base + row for row in path])
        for position in range(start, start + len(path)):
            places.append(seq.block_table[position // block] * block + position % block)
        starts.append(len(rows))
    packed, parts = pack_ints(slots, starts, rows, places)
    return AcceptedRows(packed, *parts)
