# SPDX-License-Identifier: Apache-2.0
"""Passes of the multi-token-prediction head over its KV: launched op by op, or captured at load and replayed.

A draft begins with no rows; each run adds some, which read those of the runs before.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tandem_kernels as kernels
import torch
from tandem_kernels import PADDING
from torch import Tensor

from tandem_backend.model.graphs import CudaRecorder, GraphLimits, Recorder
from tandem_backend.model.layers import AttentionRows
from tandem_backend.model.mtp import MtpHead, MtpRows
from tandem_backend.model.state import KV_BLOCK, KVLayer
from tandem_backend.model.static_rows import NOWHERE, Bucket, StaticInts

MAX_EARLIER = 127  # rows of a captured draft before those of a run
SPARE = MAX_EARLIER  # where padding rows' keys go

Guesses = tuple[list[list[int]], list[list[float]]]  # by row: token ids, and their probabilities


class MtpPasses(Protocol):
    """How the head runs. What it gives is the same to the bit whichever way."""

    def begin(self, max_rows: int, rows_at_once: int, longest_prefix: int) -> None:
        """A draft of at most max_rows rows, at most rows_at_once a run, over prefixes of at most so many positions."""

    def run(self, hidden: Tensor, rows: MtpRows, places: Sequence[int] = ()) -> Tensor:
        """Outputs of the next rows, valid until the next run; their keys and values go to `places` of the KV."""

    def guess(self, hidden: Tensor, count: int) -> Guesses:
        """The `count` likeliest tokens after each row of outputs."""


class LaunchedMtp:
    """Every op is launched when its turn comes."""

    def __init__(self, head: MtpHead, kv: KVLayer) -> None:
        self.head, self.kv = head, kv
        self._memory = head.attention.new_rows(0)

    def begin(self, max_rows: int, rows_at_once: int, longest_prefix: int) -> None:
        if len(self._memory.keys) < max_rows:
            self._memory = self.head.attention.new_rows(max_rows)

    def run(self, hidden: Tensor, rows: MtpRows, places: Sequence[int] = ()) -> Tensor:
        out = self.head.forward(hidden, rows, self.kv, self._memory)
        if places:
            self.head.store(self._memory, places, self.kv)
        return out

    def guess(self, hidden: Tensor, count: int) -> Guesses:
        return self.head.top_tokens(hidden, count)


def _sizes(bucket: Bucket) -> dict[str, int]:
    rows = bucket.rows
    return {
        **dict.fromkeys(("token_ids", "positions", "kept_at", "places", "prefix_lens"), rows),
        **dict.fromkeys(("parents", "row_seqs"), MAX_EARLIER + 1 + rows),
        "block_tables": rows * bucket.blocks,
    }


@dataclass(frozen=True, slots=True)
class _Captured:
    bucket: Bucket
    ints: StaticInts
    replay: Callable[[], None]


class CapturedMtp:
    """Replays the smallest captured run that fits; a draft that may outgrow them is launched as a whole.

    A run's rows lie after the place of MAX_EARLIER + 1 earlier ones, to which their keys and values are copied.
    """

    def __init__(self, head: MtpHead, kv: KVLayer, limits: GraphLimits, recorder: Recorder) -> None:
        self.head, self.kv, self.recorder = head, kv, recorder
        self.launched = LaunchedMtp(head, kv)
        buckets, device = limits.buckets(), head.decoder.device
        most = max(sum(_sizes(bucket).values()) for bucket in buckets)
        rows, hidden = buckets[0].rows, head.decoder.config.hidden_size
        self._host_ints = recorder.host_ints(most)
        self._device_ints = torch.zeros(most, dtype=torch.int32, device=device)
        self._memory = head.attention.new_rows(MAX_EARLIER + 1 + rows)
        self._hidden, self._out = torch.zeros(2, rows, hidden, dtype=kernels.row_dtype(device), device=device)
        self._best = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self._host_best = recorder.host_ints(2 * rows).view(2, rows)
        self._runs = {bucket: self._capture(bucket) for bucket in buckets}
        self._guesses = {rows: recorder.record(self._guess_of(rows)) for rows in {bucket.rows for bucket in buckets}}
        self._row_counts = sorted(self._guesses)
        self._num_earlier: int | None = None  # rows of the draft so far; None: it is launched
        self._last: Tensor | None = None  # the outputs whose guesses are known

    def begin(self, max_rows: int, rows_at_once: int, longest_prefix: int) -> None:
        self._last = None
        fits = max_rows <= MAX_EARLIER and self._fit(rows_at_once, longest_prefix) is not None
        self._num_earlier = 0 if fits else None
        if not fits:
            self.launched.begin(max_rows, rows_at_once, longest_prefix)

    def run(self, hidden: Tensor, rows: MtpRows, places: Sequence[int] = ()) -> Tensor:
        if self._num_earlier is None:
            return self.launched.run(hidden, rows, places)
        count = len(rows.token_ids)
        captured = self._fit(max(count, len(rows.prefix_lens)), int(rows.prefix_lens.max()))
        assert captured is not None, "begin looked for it"
        self._fill(captured, rows, places)
        self._hidden[:count].copy_(hidden)
        captured.replay()
        self.recorder.wait()
        self._num_earlier += count
        self._last = self._out[:count]
        return self._last

    def guess(self, hidden: Tensor, count: int) -> Guesses:
        if count > 1 or len(hidden) > self._row_counts[-1]:
            return self.launched.guess(hidden, count)
        if hidden is not self._last:
            self._out[: len(hidden)].copy_(hidden)
            self._guesses[self._row_counts[bisect_left(self._row_counts, len(hidden))]]()
            self.recorder.wait()
        ids, bits = self._host_best[:, : len(hidden)]
        return [[token_id] for token_id in ids.tolist()], [
            [math.exp(value)] for value in bits.view(torch.float32).tolist()
        ]

    def _fit(self, rows: int, longest_prefix: int) -> _Captured | None:
        for bucket in sorted(self._runs):
            if bucket.rows >= rows and bucket.blocks * KV_BLOCK >= longest_prefix:
                return self._runs[bucket]
        return None

    def _fill(self, captured: _Captured, rows: MtpRows, places: Sequence[int]) -> None:
        assert self._num_earlier is not None
        host, own, count = captured.ints.host, MAX_EARLIER + 1, len(rows.token_ids)
        earlier, seqs = self._num_earlier, len(rows.prefix_lens)
        for name, padding in (("token_ids", 0), ("positions", 0)):
            host[name][:count], host[name][count:] = getattr(rows, name).numpy(), padding
        host["kept_at"][:count], host["kept_at"][count:] = np.arange(earlier, earlier + count), SPARE
        host["places"][: len(places)], host["places"][len(places) :] = places, NOWHERE
        host["prefix_lens"][:seqs], host["prefix_lens"][seqs:] = rows.prefix_lens.numpy(), 0
        parents, row_seqs = rows.parents.numpy(), rows.row_seqs.numpy()
        host["parents"][:] = PADDING
        host["parents"][:earlier] = parents[:earlier]
        new = parents[earlier:]
        host["parents"][own : own + count] = np.where(new >= earlier, new - earlier + own, new)
        host["row_seqs"][:] = 0
        host["row_seqs"][:earlier] = row_seqs[:earlier]
        host["row_seqs"][own : own + count] = row_seqs[earlier:]
        width = min(rows.block_tables.shape[1], captured.bucket.blocks)
        tables = host["block_tables"].reshape(captured.bucket.rows, captured.bucket.blocks)
        tables[:seqs, :width] = rows.block_tables.numpy()[:, :width]

    def _capture(self, bucket: Bucket) -> _Captured:
        ints = StaticInts(_sizes(bucket), self._host_ints, self._device_ints)
        for name, part in ints.host.items():
            part[:] = {"parents": PADDING, "places": NOWHERE, "kept_at": SPARE}.get(name, 0)
        own, n = MAX_EARLIER + 1, bucket.rows
        memory = AttentionRows(self._memory.keys[: own + n], self._memory.values[: own + n])
        numbers = torch.arange(own, own + n, dtype=torch.int32, device=self._device_ints.device)
        parts = dict(ints.device)
        kept_at, places = parts.pop("kept_at"), parts.pop("places")
        parts["block_tables"] = parts["block_tables"].view(n, bucket.blocks)
        rows = MtpRows(packed=ints.packed, **parts)
        guess = self._guess_of(n)

        def run() -> None:
            ints.upload()
            self._out[:n].copy_(self.head.forward(self._hidden[:n], rows, self.kv, memory))
            for part in (memory.keys, memory.values):
                part.index_copy_(0, kept_at.long(), part[own:].clone())
            kernels.store_kv(
                memory.keys, memory.values.flatten(1), self.kv.keys, self.kv.values, numbers, places.long()
            )
            guess()

        return _Captured(bucket, ints, self.recorder.record(run))

    def _guess_of(self, rows: int) -> Callable[[], None]:
        """The likeliest token after each of the first outputs, brought to the host."""

        def guess() -> None:
            token_ids, logprobs = kernels.mtp_guess(self.head.kernel, self._out[:rows])
            self._best[0, :rows].copy_(token_ids)
            self._best[1, :rows].view(torch.float32).copy_(logprobs)
            self._host_best.copy_(self._best, non_blocking=True)

        return guess


def make_mtp_passes(head: MtpHead, kv: KVLayer, limits: GraphLimits) -> MtpPasses:
    """Captured ones where the device has graphs and the limits allow them."""
    if head.decoder.device.type == "cuda" and limits.max_rows:
        return CapturedMtp(head, kv, limits, CudaRecorder(head.decoder.device))
    return LaunchedMtp(head, kv)
