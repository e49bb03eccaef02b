# SPDX-License-Identifier: Apache-2.0
"""Time to first token of a prompt: cold, resumed from the prefix cache, and from disk after a restart."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem_backend.benchmarks.environment import provenance
from tandem_backend.benchmarks.table import table
from tandem_backend.config import MIB, EngineConfig
from tandem_backend.engine import Engine
from tandem_backend.errors import ConfigError, TandemError
from tandem_backend.types import Prompt, Request, SamplingParams

PREFILL_ROWS = 512
NUM_ADDED = 16  # tokens that a resumed prompt has more than the one before


class ResumeBench:
    """Prompts of each length are asked cold, then again with some tokens more: a next turn, sent as a whole.

    The engine is shut down then, and its successor is asked for another next turn.
    """

    def __init__(self, checkpoint: Path, disk_cache: Path, lengths: Sequence[int], num_threads: int) -> None:
        self._config = EngineConfig(
            checkpoint=checkpoint,
            num_threads=num_threads,
            self_test_rows=0,
            max_sessions=1,
            max_active=1,
            max_prefill_rows=PREFILL_ROWS,
            kv_cache_bytes=2048 * MIB,
            prefix_cache_bytes=1024 * MIB,
            disk_cache=disk_cache,
        )
        self.lengths = lengths
        self._open_engine()

    def _open_engine(self) -> None:
        self.engine = Engine(self._config)
        self._first_token_ms(self._tokens(0, 64))  # warms code and memory

    def run(self, repeats: int, say: Callable[[str], None]) -> list[dict[str, float]]:
        """One line a length; medians."""
        return [self._measure(length, repeats, say) for length in self.lengths]

    def _measure(self, length: int, repeats: int, say: Callable[[str], None]) -> dict[str, float]:
        cold, resumed, from_disk, saved = [], [], [], 0
        for repeat in range(repeats):
            self.engine.clear_caches()
            prompt = self._tokens(repeat, length)
            cold.append(self._first_token_ms(prompt)[0])
            milliseconds, saved = self._first_token_ms([*prompt, *self._tokens(repeat + 1, NUM_ADDED)])
            resumed.append(milliseconds)
            self.engine.close()
            self._open_engine()
            milliseconds, from_disk_saved = self._first_token_ms([*prompt, *self._tokens(repeat + 2, NUM_ADDED)])
            from_disk.append(milliseconds)
            if from_disk_saved < length - 1:
                raise TandemError(f"after a restart {from_disk_saved} of {length} tokens were there")
            times = f"cold {cold[-1]:.1f} ms, resumed {resumed[-1]:.1f} ms, from disk {from_disk[-1]:.1f} ms"
            say(f"{length} tokens, repeat {repeat + 1}: {times}")
        cold_ms, resumed_ms = statistics.median(cold), statistics.median(resumed)
        from_disk_ms = statistics.median(from_disk)
        return {
            "tokens": length,
            "cached_tokens": saved,
            "cold_ms": cold_ms,
            "resumed_ms": resumed_ms,
            "speedup": cold_ms / resumed_ms,
            "from_disk_ms": from_disk_ms,
            "from_disk_speedup": cold_ms / from_disk_ms,
        }

    def _first_token_ms(self, token_ids: Sequence[int]) -> tuple[float, int]:
        """From the request's arrival to its only token, and how many prompt tokens were there already."""
        begun = time.perf_counter()
        prompt, params = Prompt(token_ids=tuple(token_ids)), SamplingParams(max_tokens=1, ignore_eos=True)
        self.engine.add(self.engine.prepare(Request(request_id="resume", prompt=prompt, params=params)))
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                if output.is_last and output.stats is not None:
                    return 1e3 * (time.perf_counter() - begun), output.stats.num_cached_tokens
        raise TandemError("the request was never answered")

    def _tokens(self, seed: int, count: int) -> list[int]:
        vocab_size = self.engine.model.config.vocab_size
        return [(7919 * i + 104_729 * (seed + 1) + i * i) % vocab_size for i in range(count)]


def measure_resume(
    checkpoint: Path, lengths: Sequence[int], repeats: int, num_threads: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The benchmark's result. A checkpoint of a shorter context is given a longer one: time is the same."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as disk_cache:
        longer = _with_context(checkpoint, Path(folder), max(lengths) + NUM_ADDED + 1)
        bench = ResumeBench(longer, Path(disk_cache), lengths, num_threads)
        lines = bench.run(repeats, say)
        bench.engine.close()
    return {
        "benchmark": "resume",
        **provenance(num_threads),
        "checkpoint": checkpoint.name,
        "repeats": repeats,
        "lengths": lines,
    }


def render_resume(result: dict[str, Any]) -> str:
    headings = ["prompt tokens", "cached", "cold ms", "resumed ms", "speed-up", "from disk ms", "speed-up"]
    keys = ("tokens", "cached_tokens", "cold_ms", "resumed_ms", "speedup", "from_disk_ms", "from_disk_speedup")
    return table(headings, [[str(line["tokens"]), *(line[key] for key in keys[1:])] for line in result["lengths"]])


def _with_context(checkpoint: Path, folder: Path, context: int) -> Path:
    """The checkpoint, or a copy by links whose config.json has a context of at least so many tokens."""
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{checkpoint / 'config.json'}: can't be read: {error}") from error
    text = config.get("text_config", config)
    if text.get("max_position_embeddings", 0) >= context:
        return checkpoint
    text["max_position_embeddings"] = context
    for path in checkpoint.resolve().iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
