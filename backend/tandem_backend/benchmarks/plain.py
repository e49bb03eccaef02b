# SPDX-License-Identifier: Apache-2.0
"""Plain decoding and prefill, beside transformers in the same run."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem_backend.benchmarks.engine_runs import Run, bench_config, run_together
from tandem_backend.benchmarks.environment import provenance
from tandem_backend.benchmarks.passes import PassTimer, chain
from tandem_backend.benchmarks.table import table
from tandem_backend.benchmarks.transformers_side import TransformersModel
from tandem_backend.engine import Engine
from tandem_backend.types import Prompt, Request, SamplingParams

PARALLEL = (1, 4, 8, 16, 32)
PROMPT_LEN = 128  # longer prompts are cut
PREFILL_LEN = 512
PASS_ROWS = (1, 8)
NUM_PASSES = 20  # a repeat
WARM_UP_TOKENS = 8
NO_STORES = "none: every request starts from nothing, so a repeat is as slow as a first time"


class PlainBench:
    """Both sides loaded. Raises TandemError."""

    def __init__(self, checkpoint: Path, prompts: Sequence[Prompt], max_tokens: int, num_threads: int) -> None:
        self.checkpoint, self.max_tokens, self.num_threads = checkpoint, max_tokens, num_threads
        self.engine = Engine(bench_config(checkpoint, (), num_threads, max(PARALLEL)))
        self.theirs = TransformersModel(checkpoint, num_threads)
        self.passes = PassTimer(self.engine.model, max(PASS_ROWS))
        prompt_ids = [self.engine.prompts.encode(prompt) for prompt in prompts]
        longest = self.engine.max_context_len
        self.prompts = [ids[: min(PROMPT_LEN, longest - max_tokens)] for ids in prompt_ids]
        joined = [token_id for ids in prompt_ids for token_id in ids]
        num_prefill = min(PREFILL_LEN, longest - 1)
        self.prefill_prompt = (joined * (num_prefill // len(joined) + 1))[:num_prefill]

    def run(self, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
        """The result as a JSON object: medians over repeats."""
        say("warming up")
        self._repeat(0, WARM_UP_TOKENS)
        figures: dict[str, list[float]] = defaultdict(list)
        for repeat in range(repeats):
            say(f"repeat {repeat + 1} of {repeats}")
            for name, figure in self._repeat(repeat, self.max_tokens).items():
                figures[name].append(figure)
        medians = {name: statistics.median(values) for name, values in figures.items()}
        pass_ms = self.passes.median_ms({n: chain(n) for n in PASS_ROWS}, repeats * NUM_PASSES)
        return {
            "benchmark": "plain",
            **provenance(self.num_threads),
            "checkpoint": self.checkpoint.name,
            "max_tokens": self.max_tokens,
            "repeats": repeats,
            "stores": NO_STORES,
            "decode_tokens_per_s": {str(n): medians[f"decode {n}"] for n in PARALLEL},
            "prefill_tokens_per_s": medians["prefill"],
            "transformers_decode_tokens_per_s": medians["transformers decode"],
            "transformers_prefill_tokens_per_s": medians["transformers prefill"],
            "decode_ratio": medians["decode 1"] / medians["transformers decode"],
            "prefill_ratio": medians["prefill"] / medians["transformers prefill"],
            "pass_ms": {str(n): pass_ms[n] for n in PASS_ROWS},
            "pass_ratio": pass_ms[PASS_ROWS[1]] / pass_ms[PASS_ROWS[0]],
        }

    def _repeat(self, repeat: int, max_tokens: int) -> dict[str, float]:
        """Every figure once, in tokens/s; the sides take turns."""
        figures = {}
        for is_theirs in (False, True) if repeat % 2 == 0 else (True, False):
            if is_theirs:
                decoded = self.theirs.generate(self._prompt(repeat), max_tokens)
                figures["transformers decode"] = decoded.tokens_per_s
                prefilled = self.theirs.generate(self.prefill_prompt, 1)
                figures["transformers prefill"] = len(self.prefill_prompt) / prefilled.prefill_s
            else:
                figures["decode 1"] = self._decode([self._prompt(repeat)], max_tokens).tokens_per_s
                figures["prefill"] = len(self.prefill_prompt) / self._decode([self.prefill_prompt], 1).prefill_s
        for n in PARALLEL[1:]:
            prompts = [self._prompt(repeat + i) for i in range(n)]
            figures[f"decode {n}"] = self._decode(prompts, max_tokens).tokens_per_s
        return figures

    def _prompt(self, index: int) -> list[int]:
        return self.prompts[index % len(self.prompts)]

    def _decode(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        requests = [
            Request(request_id=str(i), prompt=Prompt(token_ids=tuple(ids)), params=params)
            for i, ids in enumerate(prompts)
        ]
        return run_together(self.engine, [self.engine.prepare(request) for request in requests])


def render_plain(result: dict[str, Any]) -> str:
    decode, pass_ms = result["decode_tokens_per_s"], result["pass_ms"]
    theirs, their_prefill = (result[f"transformers_{part}_tokens_per_s"] for part in ("decode", "prefill"))
    one = decode[str(PARALLEL[0])]
    sides = [
        ["decode, one sequence", one, theirs, f"{result['decode_ratio']:.2f}x"],
        ["prefill", result["prefill_tokens_per_s"], their_prefill, f"{result['prefill_ratio']:.2f}x"],
    ]
    rows = [[n, rate, f"{rate / one:.2f}x"] for n, rate in decode.items()]
    few, many = pass_ms
    return "\n\n".join(
        [
            table(["tokens/s", "tandem", "transformers", "ratio"], sides),
            table(["sequences in parallel", "tokens/s", "of one"], rows),
            f"one pass: {pass_ms[few]:.2f} ms for {few} row, {pass_ms[many]:.2f} ms for {many} rows, "
            f"ratio {result['pass_ratio']:.2f}",
            f"stores that could raise figures: {result['stores']}",
        ]
    )
