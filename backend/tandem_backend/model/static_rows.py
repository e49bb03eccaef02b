# SPDX-License-Identifier: Apache-2.0
"""Inputs of captured passes: memory that stays where it is, which any batch that fits is laid out in."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tandem_kernels import PADDING
from torch import Tensor

from tandem_backend.model.batch import AcceptedRows, RowBatch

IntArray = npt.NDArray[np.int32]

NOWHERE = -1  # place of a padding row's key and value
MAX_LOGIT_ROWS = 64  # a pass of more rows holds prompt rows, of which few need logits


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """What a captured pass has room for."""

    rows: int
    blocks: int  # of a sequence's committed prefix

    @property
    def sequences(self) -> int:
        return min(self.rows, MAX_LOGIT_ROWS)

    @property
    def logit_rows(self) -> int:
        return min(self.rows, MAX_LOGIT_ROWS)

    def num_ints(self) -> int:
        """Of the larger of the two kinds of inputs."""
        return max(sum(_batch_sizes(self).values()), sum(_accepted_sizes(self).values()))


def _batch_sizes(bucket: Bucket) -> dict[str, int]:
    rows, seqs = bucket.rows, bucket.sequences
    return {
        **dict.fromkeys(("token_ids", "positions", "parents", "row_seqs", "row_slots"), rows),
        "seq_starts": seqs + 1,
        "slots": seqs,
        "prefix_lens": seqs,
        "logit_rows": bucket.logit_rows,
        "block_tables": seqs * bucket.blocks,
    }


def _accepted_sizes(bucket: Bucket) -> dict[str, int]:
    return {
        "slots": bucket.sequences,
        "path_starts": bucket.sequences + 1,
        "path_rows": bucket.rows,
        "places": bucket.rows,
    }


class StaticInts:
    """Named int32 parts of one tensor on the host and of its copy on the device."""

    def __init__(self, sizes: Mapping[str, int], host: Tensor, device: Tensor) -> None:
        total = sum(sizes.values())
        self._host, self.packed = host[:total], device[:total]
        parts = self._host.split_with_sizes(list(sizes.values()))
        self.host: dict[str, IntArray] = {name: part.numpy() for name, part in zip(sizes, parts, strict=True)}
        views = self.packed.split_with_sizes(list(sizes.values()))
        self.device: dict[str, Tensor] = dict(zip(sizes, views, strict=True))

    def upload(self) -> None:
        """Copy the host's numbers to the device, in its own time."""
        self.packed.copy_(self._host, non_blocking=True)


class StaticBatch:
    """A RowBatch of a bucket's size. Rows past a batch's own are padding, sequences past its own have no rows."""

    def __init__(self, bucket: Bucket, host: Tensor, device: Tensor) -> None:
        self.bucket = bucket
        self.ints = StaticInts(_batch_sizes(bucket), host, device)
        self._tables = self.ints.host["block_tables"].reshape(bucket.sequences, bucket.blocks)
        parts = dict(self.ints.device)
        parts["block_tables"] = parts["block_tables"].view(bucket.sequences, bucket.blocks)
        logit_rows = parts.pop("logit_rows")
        self.batch = RowBatch(
            packed=self.ints.packed,
            **parts,
            logit_rows=logit_rows if bucket.rows > bucket.logit_rows else None,
            sequences=(),
            starts=(0, bucket.rows),
        )
        self.clear()

    def clear(self) -> None:
        """All padding. The block tables may hold anything below the number of blocks."""
        for name, part in self.ints.host.items():
            part[:] = PADDING if name == "parents" else 0

    def fill(self, batch: RowBatch) -> None:
        """Take the numbers of a batch on the host that fits."""
        host, rows, seqs = self.ints.host, batch.num_rows, len(batch.sequences)
        for name in ("token_ids", "positions", "parents", "row_seqs", "row_slots"):
            part = host[name]
            part[:rows] = getattr(batch, name).numpy()
            part[rows:] = PADDING if name == "parents" else 0
        host["seq_starts"][: seqs + 1] = batch.seq_starts.numpy()
        host["seq_starts"][seqs + 1 :] = rows
        for name in ("slots", "prefix_lens"):
            host[name][:seqs] = getattr(batch, name).numpy()
            host[name][seqs:] = 0
        width = min(batch.block_tables.shape[1], self.bucket.blocks)
        self._tables[:seqs, :width] = batch.block_tables.numpy()[:, :width]
        if self.batch.logit_rows is not None:
            wanted = _logit_rows(batch)
            host["logit_rows"][: len(wanted)] = wanted
            host["logit_rows"][len(wanted) :] = 0


class StaticAccepted:
    """AcceptedRows of a bucket's size. Sequences past those that keep rows have empty paths."""

    def __init__(self, bucket: Bucket, host: Tensor, device: Tensor) -> None:
        self.ints = StaticInts(_accepted_sizes(bucket), host, device)
        self.accepted = AcceptedRows(packed=self.ints.packed, **self.ints.device)
        self.clear()

    def clear(self) -> None:
        for name, part in self.ints.host.items():
            part[:] = NOWHERE if name == "places" else 0

    def fill(self, accepted: AcceptedRows) -> None:
        """Take the numbers of accepted rows on the host that fit."""
        host, seqs, rows = self.ints.host, len(accepted.slots), len(accepted.path_rows)
        host["slots"][:seqs] = accepted.slots.numpy()
        host["slots"][seqs:] = 0
        host["path_starts"][: seqs + 1] = accepted.path_starts.numpy()
        host["path_starts"][seqs + 1 :] = rows
        host["path_rows"][:rows] = accepted.path_rows.numpy()
        host["path_rows"][rows:] = 0
        host["places"][:rows] = accepted.places.numpy()
        host["places"][rows:] = NOWHERE


def num_logit_rows(batch: RowBatch) -> int:
    return batch.num_rows if batch.logit_rows is None else len(batch.logit_rows)


def needed_blocks(batch: RowBatch, block: int) -> int:
    """Blocks of the longest committed prefix: the table's others are not read."""
    return max(1, -(-max(seq.prefix_len for seq in batch.sequences) // block))


def _logit_rows(batch: RowBatch) -> IntArray:
    return np.arange(batch.num_rows, dtype=np.int32) if batch.logit_rows is None else batch.logit_rows.numpy()
