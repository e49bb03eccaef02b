# SPDX-License-Identifier: Apache-2.0
"""Captured passes: a CUDA graph per bucket of rows and context class, made at load and replayed in every round."""

import gc
import logging
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import tandem_kernels as kernels
import torch
from torch import Tensor

from tandem_backend.model.batch import RowBatch, accept_rows
from tandem_backend.model.decoder import Decoder, ForwardResult
from tandem_backend.model.layers import AttentionRows, DeltaRows
from tandem_backend.model.passes import LaunchedPasses, Passes, Paths, nothing
from tandem_backend.model.state import KV_BLOCK, ModelState
from tandem_backend.model.static_rows import (
    MAX_LOGIT_ROWS,
    Bucket,
    StaticAccepted,
    StaticBatch,
    needed_blocks,
    num_logit_rows,
)

NUM_TIMED = 7  # replays of a bucket at load
FIRST_CONTEXT = 1024  # tokens of the shortest context class; each holds four times as many as the one before

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """Turns work on a device into something that can be replayed."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once, and return what runs it again on the same memory."""

    def wait(self) -> None:
        """Until all that was launched is done."""

    def host_ints(self, count: int) -> Tensor:
        """[count] int32 on the host that the device copies from and to in its own time."""

    def num_bytes(self) -> int:
        """Device memory taken since the recorder was made, by recording alone."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: a graph of an engine that is gone, freed in a capture, makes that capture fail."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaRecorder:
    """CUDA graphs that share one memory pool: what a graph leaves there is void once another has been replayed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._recorded: list[Callable[[], None]] = []  # a graph knows addresses alone: these keep what they read alive
        torch.cuda.empty_cache()
        self._free_before = torch.cuda.mem_get_info(device)[0]

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            run()  # compiles the kernels
            self._stream.synchronize()
            with _no_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self._recorded.append(run)
        return graph.replay

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def host_ints(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32).pin_memory()

    def num_bytes(self) -> int:
        torch.cuda.empty_cache()
        return max(self._free_before - torch.cuda.mem_get_info(self.device)[0], 0)


@dataclass(frozen=True, slots=True)
class GraphLimits:
    max_rows: int  # of the largest bucket; 0: nothing is captured
    max_context: int  # tokens
    max_seconds: float  # of capturing; buckets are captured from the largest down, so any pass finds one that fits

    def buckets(self, block: int = KV_BLOCK) -> list[Bucket]:
        """From the largest down."""
        rows, blocks = [1], [-(-min(FIRST_CONTEXT, self.max_context) // block)]
        while rows[-1] * 2 <= self.max_rows:
            rows.append(rows[-1] * 2)
        while blocks[-1] * block < self.max_context:
            blocks.append(min(4 * blocks[-1], -(-self.max_context // block)))
        return [Bucket(r, b) for r in reversed(rows) for b in reversed(blocks)] if self.max_rows else []


@dataclass(frozen=True, slots=True)
class CapturedPass:
    batch: StaticBatch
    accepted: StaticAccepted
    forward: Callable[[], None]
    commit: Callable[[], None]


class GraphPasses:
    """Replays the smallest captured pass that a batch fits; launches what fits none."""

    def __init__(self, decoder: Decoder, state: ModelState, limits: GraphLimits, recorder: Recorder) -> None:
        self.decoder, self.state, self.recorder = decoder, state, recorder
        self.launched = LaunchedPasses(decoder, state)
        buckets, device = limits.buckets(state.block), decoder.device
        most_ints = max(bucket.num_ints() for bucket in buckets)
        # The inputs of forward and commit of all buckets share their memory: one pass runs at a time.
        self._ints = [recorder.host_ints(most_ints) for _ in range(2)]
        self._device_ints = torch.zeros(2, most_ints, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(
            buckets[0].rows, decoder.config.hidden_size, dtype=kernels.row_dtype(device), device=device
        )
        self._logits = torch.zeros(buckets[0].logit_rows, decoder.config.vocab_size, device=device)
        self._best = torch.zeros(2, MAX_LOGIT_ROWS, dtype=torch.int32, device=device)  # token ids; bits of log-probs
        self._host_best = recorder.host_ints(2 * MAX_LOGIT_ROWS).view(2, MAX_LOGIT_ROWS)
        self._captured = self._capture(buckets, limits.max_seconds)
        self._rows = sorted({bucket.rows for bucket in self._captured})
        self.last: CapturedPass | None = None  # of the last pass; None: it was launched

    def forward(self, batch: RowBatch, meanwhile: Callable[[], None] = nothing) -> ForwardResult:
        captured = self.last = self._fit(batch)
        if captured is None:
            return self.launched.forward(batch, meanwhile)
        captured.batch.fill(batch)
        captured.forward()
        meanwhile()
        self.recorder.wait()
        return self._result(batch, captured.batch.bucket)

    def commit(
        self, result: ForwardResult, batch: RowBatch, paths: Paths, offsets: Sequence[int] | None = None
    ) -> None:
        captured = self.last
        if captured is None:
            self.launched.commit(result, batch, paths, offsets)
            return
        if offsets is not None and any(offsets):
            self.recorder.wait()  # the device may still be reading the part before
        accepted = accept_rows(batch, paths, self.state.block, offsets)
        if len(accepted.slots):
            captured.accepted.fill(accepted)
            captured.commit()

    def num_bytes(self) -> int:
        return self.recorder.num_bytes()

    def row_costs(self) -> list[tuple[int, float]]:
        """Of passes of padding: the staircase of the buckets, each cost at its bucket's first and last row count."""
        costs: list[tuple[int, float]] = []
        for rows in self._rows:
            captured = next(each for bucket, each in self._captured.items() if bucket.rows == rows)
            captured.batch.clear()
            milliseconds = max(self._median_ms(captured.forward), costs[-1][1] if costs else 0.0)
            first = costs[-1][0] + 1 if costs else 1
            costs += [(n, milliseconds) for n in dict.fromkeys((first, rows))]
        return costs

    def _median_ms(self, replay: Callable[[], None]) -> float:
        times = []
        for _ in range(NUM_TIMED):
            begun = time.perf_counter()
            replay()
            self.recorder.wait()
            times.append(1e3 * (time.perf_counter() - begun))
        return statistics.median(times)

    def _result(self, batch: RowBatch, bucket: Bucket) -> ForwardResult:
        """What the last replay left, cut to the batch's own rows."""
        count = num_logit_rows(batch)
        logits, best = self._logits[:count], self._host_best[:, :count]
        if batch.logit_rows is not None and bucket.rows <= bucket.logit_rows:  # it has logits of every row
            chosen = batch.logit_rows.long()
            logits, best = self._logits[chosen.to(self._logits.device)], self._host_best[:, chosen]
        choices = (best[0], best[1].view(torch.float32))
        return ForwardResult(logits, self._hidden[: batch.num_rows], (), choices, is_lent=True)

    def _fit(self, batch: RowBatch) -> CapturedPass | None:
        if num_logit_rows(batch) > MAX_LOGIT_ROWS or len(batch.sequences) > MAX_LOGIT_ROWS:
            return None
        blocks = needed_blocks(batch, self.state.block)
        for rows in self._rows[bisect_left(self._rows, batch.num_rows) :]:
            for bucket, captured in self._captured.items():  # short contexts first
                if bucket.rows == rows and bucket.blocks >= blocks:
                    return captured
        return None

    def _capture(self, buckets: Sequence[Bucket], max_seconds: float) -> dict[Bucket, CapturedPass]:
        begun = time.perf_counter()
        captured: dict[Bucket, CapturedPass] = {}
        for bucket in buckets:
            if time.perf_counter() - begun > max_seconds:
                logger.warning("capturing took %.0f s: %d of %d passes are left out", max_seconds,
                               len(buckets) - len(captured), len(buckets))  # fmt: skip
                break
            captured[bucket] = self._capture_bucket(bucket)
        return dict(sorted(captured.items()))

    def _capture_bucket(self, bucket: Bucket) -> CapturedPass:
        batch = StaticBatch(bucket, self._ints[0], self._device_ints[0])
        accepted = StaticAccepted(bucket, self._ints[1], self._device_ints[1])
        layer_rows: list[tuple[AttentionRows | DeltaRows, ...]] = [()]
        count = bucket.logit_rows

        def forward() -> None:
            batch.ints.upload()
            result = self.decoder.forward(batch.batch, self.state)
            self._hidden[: bucket.rows].copy_(result.hidden)
            self._logits[:count].copy_(result.logits)
            token_ids, logprobs = kernels.argmax(result.logits)
            self._best[0, :count].copy_(token_ids)
            self._best[1, :count].view(torch.float32).copy_(logprobs)
            self._host_best.copy_(self._best, non_blocking=True)
            layer_rows[0] = result.layer_rows

        def commit() -> None:
            accepted.ints.upload()
            self.decoder.write(layer_rows[0], accepted.accepted, self.state)

        # Commit reads what forward left in the recorder's memory, so nothing may be recorded between the two. Then that
        # memory is given back, for the next bucket: replays of a bucket follow each other as its recordings did.
        captured = CapturedPass(batch, accepted, self.recorder.record(forward), self.recorder.record(commit))
        layer_rows[0] = ()
        return captured


def make_passes(decoder: Decoder, state: ModelState, limits: GraphLimits) -> Passes:
    """Captured passes where the device has graphs and the limits allow them."""
    if decoder.device.type == "cuda" and limits.max_rows:
        return GraphPasses(decoder, state, limits, CudaRecorder(decoder.device))
    return LaunchedPasses(decoder, state)
