# SPDX-License-Identifier: Apache-2.0
"""What a step costs on a CUDA device beside the time that reading the weights takes, and the price of exactness."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tandem_kernels as kernels
import torch

from tandem_backend.benchmarks.environment import num_usable_cores, provenance
from tandem_backend.benchmarks.library_ops import library_ops
from tandem_backend.benchmarks.passes import bushy_tree
from tandem_backend.config import EngineConfig
from tandem_backend.engine import Engine
from tandem_backend.errors import ConfigError
from tandem_backend.model.batch import RowBatch, SequenceRows, build_batch
from tandem_backend.model.config import load_model_config
from tandem_backend.model.graphs import CudaRecorder, GraphLimits, GraphPasses
from tandem_backend.model.passes import LaunchedPasses, Passes
from tandem_backend.model.random_weights import RandomWeights
from tandem_backend.model.state import KV_BLOCK
from tandem_backend.types import Prompt, Request, SamplingParams

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1024, 8192, 32768)
PREFILLS = (1024, 8192)
CHUNK = 1024  # prompt rows of a pass
STEP_CONTEXT = 1024
COPY_BYTES = 4 << 30
ROOM = 256  # tokens beyond a context: the rows of a step, and the tokens of the rounds that are timed
SLOT = 0  # of the sequence that is measured, and of its blocks

Say = Callable[[str], None]


class GpuBench:
    """One model on one device. Medians of `repeats`; every figure of a table comes from the same run."""

    def __init__(self, checkpoint: Path, *, random_weights: bool, repeats: int, say: Say) -> None:
        self.repeats, self.say = repeats, say
        try:
            self.device = kernels.find_device("cuda")
        except RuntimeError as error:
            raise ConfigError(f"tandem bench gpu: {error}") from error
        context = load_model_config(checkpoint).max_position
        self.contexts, self.prefills = ([n for n in sizes if n + ROOM <= context] for sizes in (CONTEXTS, PREFILLS))
        longest = max(self.contexts) + ROOM
        config = EngineConfig(
            checkpoint=checkpoint,
            device="cuda",
            drafters=(),
            max_active=4,
            max_sessions=4,
            max_prefill_rows=CHUNK,
            max_graph_rows=max(ROWS),
            kv_cache_bytes=8 << 30,
            prefix_cache_bytes=0,
            max_context_len=longest,
            request_log="off",
        )
        begun = time.perf_counter()
        self.engine = Engine(config, weights=RandomWeights(self.device) if random_weights else None)
        self.load_s = time.perf_counter() - begun
        self.decoder, self.state = self.engine.model, self.engine.rounds.state
        self.blocks = range(-(-longest // KV_BLOCK))
        for layer in self.state.kv_layers():  # of the size of real keys; what they are does not change the time
            for part in (layer.keys, layer.values):
                part[: len(self.blocks)].normal_()
        say(f"loaded in {self.load_s:.0f} s; self-test {self.engine.self_test}")

    def run(self) -> dict[str, Any]:
        copy_bytes_s = self._copy_bandwidth()
        step_bytes = self.decoder.num_weight_bytes()
        floor_ms = 1e3 * step_bytes / copy_bytes_s
        self.say(f"copy {copy_bytes_s / 1e9:.0f} GB/s, weights {step_bytes / 1e9:.2f} GB, floor {floor_ms:.3f} ms")
        ours = self._steps(self.engine.rounds.passes, STEP_CONTEXT)
        prefill = {n: self._prefill(n) for n in self.prefills}
        others = [n for n in self.contexts if n != STEP_CONTEXT]
        contexts = {n: self._steps(self.engine.rounds.passes, n, (1, 8, 16)) for n in others}
        attention = {n: self._attention(n) for n in self.contexts}
        round_ms = self._round_ms()
        library = self._library_steps()
        return {
            "benchmark": "gpu",
            **provenance(num_usable_cores()),
            "device": torch.cuda.get_device_name(self.device),
            "model": self.engine.config.checkpoint.name,
            "load_s": self.load_s,
            "self_test_rows": self.engine.self_test.num_rows if self.engine.self_test else 0,
            "copy_gb_s": copy_bytes_s / 1e9,
            "step_bytes": step_bytes,
            "floor_ms": floor_ms,
            "steps": [
                {
                    "rows": rows,
                    "forward_ms": ours[rows][0],
                    "commit_ms": ours[rows][1],
                    "share": floor_ms / ours[rows][0],
                    "library_ms": library[rows][0],
                    "price": ours[rows][0] / library[rows][0],
                }
                for rows in ROWS
            ],
            "prefill": [{"tokens": n, "tokens_s": 1e3 * n / ms, "ms": ms} for n, ms in prefill.items()],
            "contexts": [
                {"context": n, "rows": rows, "forward_ms": ms[0]}
                for n, times in contexts.items()
                for rows, ms in times.items()
            ],
            "attention": [
                {"context": n, "rows": rows, "us": us} for n, times in attention.items() for rows, us in times.items()
            ],
            "round": {"round_ms": round_ms, "graph_ms": sum(ours[1]), "ratio": round_ms / sum(ours[1])},
            "memory": {name: int(value) for name, value in self.engine.statistics().items() if name.endswith("_bytes")},
        }

    def _copy_bandwidth(self) -> float:
        """Bytes read and written a second by a copy within the device's memory."""
        source = torch.ones(COPY_BYTES, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2e3 * COPY_BYTES / self._median_ms(lambda: target.copy_(source), 1)

    def _batch(self, rows: int, context: int) -> RowBatch:
        token_ids = [7919 * i % self.decoder.config.vocab_size for i in range(rows)]
        return build_batch([SequenceRows(token_ids, context, SLOT, self.blocks, bushy_tree(rows))])

    def _steps(self, passes: Passes, context: int, rows: Sequence[int] = ROWS) -> dict[int, tuple[float, float]]:
        """Milliseconds of forward and of commit on the device, by rows: replays of a tree at a context."""
        assert isinstance(passes, GraphPasses)
        measured = {}
        for n in rows:
            batch = self._batch(n, context)
            result = passes.forward(batch)
            passes.commit(result, batch, [[0]])
            captured = passes.last
            assert captured is not None, "every bucket was captured"
            measured[n] = (self._median_ms(captured.forward, 3), self._median_ms(captured.commit, 3))
            self.say(f"context {context}, {n} rows: forward {measured[n][0]:.3f} ms, commit {measured[n][1]:.3f} ms")
        return measured

    def _library_steps(self) -> dict[int, tuple[float, float]]:
        """The same on cuBLAS and SDPA."""
        limits = GraphLimits(max(ROWS), STEP_CONTEXT, 300)
        with library_ops(STEP_CONTEXT):
            passes = GraphPasses(self.decoder, self.state, limits, CudaRecorder(self.device))
        return self._steps(passes, STEP_CONTEXT)

    def _prefill(self, tokens: int) -> float:
        """Milliseconds of a prompt, its chunks committed, logits for its last row."""
        passes = LaunchedPasses(self.decoder, self.state)
        chunks = []
        for start in range(0, tokens, CHUNK):
            ids = [7919 * i % self.decoder.config.vocab_size for i in range(start, start + CHUNK)]
            ends = start + CHUNK == tokens
            rows = SequenceRows(ids, start, SLOT, self.blocks, logit_rows=[CHUNK - 1] if ends else [])
            chunks.append(build_batch([rows]))

        def run() -> None:
            for batch in chunks:
                passes.commit(passes.forward(batch), batch, [range(CHUNK)])

        run()
        ms = self._median_ms(run, 1, repeats=max(3, self.repeats // 4))
        self.say(f"prefill of {tokens}: {ms:.1f} ms, {1e3 * tokens / ms:.0f} tokens/s")
        return ms

    def _attention(self, context: int, rows: Sequence[int] = (1, 8, 16, 32)) -> dict[int, float]:
        """Microseconds of one layer's attention, partials and merge, in a graph of ten."""
        c, layer = self.decoder.config, self.state.kv_layers()[0]
        measured = {}
        for n in rows:
            batch = self._batch(n, context).to(self.device)
            q, k, v = (
                torch.randn(n, heads, c.head_dim, dtype=torch.bfloat16, device=self.device)
                for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)
            )
            trees = kernels.plan_trees(batch.parents, batch.row_seqs)

            def run(q=q, k=k, v=v, batch=batch, trees=trees) -> None:  # type: ignore[no-untyped-def]
                for _ in range(10):
                    kernels.attention(
                        q, k, v.flatten(1), layer.keys, layer.values, batch.block_tables[:, : -(-context // KV_BLOCK)],
                        batch.prefix_lens, batch.parents, batch.row_seqs, c.head_dim**-0.5, trees,
                    )  # fmt: skip

            replay = CudaRecorder(self.device).record(run)
            measured[n] = 100 * self._median_ms(replay, 3)
        self.say(f"attention at {context}: " + ", ".join(f"{n} rows {us:.1f} us" for n, us in measured.items()))
        return measured

    def _round_ms(self) -> float:
        """Wall time of a round of plain decoding by the engine, streaming aside."""
        prompt = Prompt(token_ids=tuple(range(STEP_CONTEXT)))
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        self.engine.add(self.engine.prepare(Request(request_id="bench", prompt=prompt, params=params)))
        times = []
        while self.engine.has_work():
            begun = time.perf_counter()
            self.engine.step()
            times.append(1e3 * (time.perf_counter() - begun))
        torch.cuda.synchronize()
        return float(statistics.median(times[20:]))

    def _median_ms(self, run: Callable[[], Any], warm_ups: int, repeats: int | None = None) -> float:
        for _ in range(warm_ups):
            run()
        torch.cuda.synchronize()
        gc.disable()
        times = []
        for _ in range(repeats or self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        gc.enable()
        return float(statistics.median(times))
