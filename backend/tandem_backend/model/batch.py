# SPDX-License-Identifier: Apache-2.0
"""RowBatch: all rows of one pass, of any mix of sequences, as the tensors that the kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass

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
class RowBatch:
    """Rows of sequence s lie in [seq_starts[s], seq_starts[s + 1]); parents are row indices of this batch."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int32, prefix length + depth
    parents: Tensor  # [rows] int32, -1 for a sequence's first row
    row_seqs: Tensor  # [rows] int32
    row_slots: Tensor  # [rows] int32
    seq_starts: Tensor  # [seqs + 1] int32
    slots: Tensor  # [seqs] int32
    prefix_lens: Tensor  # [seqs] int32
    block_tables: Tensor  # [seqs, longest] int32
    logit_rows: Tensor | None  # [n] int64; None: every row
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
    for seq in sequences:
        base, n = starts[-1], len(seq.token_ids)
        token_ids.extend(seq.token_ids)
        if seq.parents is None:
            parents.append(-1)
            parents.extend(range(base, base + n - 1))
            positions.extend(range(seq.prefix_len, seq.prefix_len + n))
        else:
            parents.extend(parent if parent < 0 else base + parent for parent in seq.parents)
            depths: list[int] = []
            for parent in seq.parents:
                depths.append(0 if parent < 0 else depths[parent] + 1)
            positions.extend(seq.prefix_len + depth for depth in depths)
        logit_rows.extend(base + row for row in (range(n) if seq.logit_rows is None else seq.logit_rows))
        starts.append(base + n)
    counts = np.diff(starts)
    slots = np.array([seq.slot for seq in sequences], dtype=np.int32)
    tables = np.zeros((len(sequences), max(1, *(len(seq.block_table) for seq in sequences))), dtype=np.int32)
    for i, seq in enumerate(sequences):
        tables[i, : len(seq.block_table)] = seq.block_table
    return RowBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions, dtype=torch.int32),
        parents=torch.tensor(parents, dtype=torch.int32),
        row_seqs=torch.from_numpy(np.repeat(np.arange(len(sequences), dtype=np.int32), counts)),
        row_slots=torch.from_numpy(np.repeat(slots, counts)),
        seq_starts=torch.tensor(starts, dtype=torch.int32),
        slots=torch.from_numpy(slots),
        prefix_lens=torch.tensor([seq.prefix_len for seq in sequences], dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        logit_rows=None if len(logit_rows) == starts[-1] else torch.tensor(logit_rows, dtype=torch.int64),
        starts=tuple(starts),
    )


@dataclass(frozen=True, slots=True)
class AcceptedRows:
    """The rows a round keeps, root first; a sequence that keeps none is left out of `seqs`."""

    seqs: tuple[int, ...]  # indices into the batch
    slots: Tensor  # [kept seqs] int32
    path_starts: Tensor  # [kept seqs + 1] int32
    path_rows: Tensor  # [rows kept] int32
    places: Tensor  # [rows kept] int64, block index * block + offset


def accept_rows(batch: RowBatch, paths: Sequence[Sequence[int]], block: int) -> AcceptedRows:
    """Collect each sequence's accepted path (local row indices, root first, maybe empty) for commit."""
    seqs = tuple(i for i, path in enumerate(paths) if path)
    rows: list[int] = []
    places: list[int] = []
    starts = [0]
    prefix_lens, tables = batch.prefix_lens.tolist(), batch.block_tables
    for i in seqs:
        table = tables[i].tolist()
        rows.extend(batch.starts[i] + row for row in paths[i])
        for position in range(prefix_lens[i], prefix_lens[i] + len(paths[i])):
            places.append(table[position // block] * block + position % block)
        starts.append(len(rows))
    return AcceptedRows(
        seqs=seqs,
        slots=batch.slots[list(seqs)],
        path_starts=torch.tensor(starts, dtype=torch.int32),
        path_rows=torch.tensor(rows, dtype=torch.int32),
        places=torch.tensor(places, dtype=torch.int64),
    )
