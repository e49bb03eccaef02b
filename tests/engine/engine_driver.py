# SPDX-License-Identifier: Apache-2.0
"""Drives an engine by hand, keeps all that each request got, and holds it to plain decoding."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import torch
from tandem_backend.config import MIB, EngineConfig
from tandem_backend.engine import Engine
from tandem_backend.engine.choices import choice_ids
from tandem_backend.engine.drafters.base import Drafter
from tandem_backend.engine.drafters.draft_model import DraftModelDrafter
from tandem_backend.engine.drafters.mtp import MtpDrafter
from tandem_backend.engine.pools import IndexPool
from tandem_backend.engine.sequence import Sequence as EngineSequence
from tandem_backend.errors import TandemError
from tandem_backend.model.state import KVLayer, RecurrentLayer
from tandem_backend.types import (
    FinishReason,
    Prompt,
    PromptLogprob,
    Request,
    RequestStats,
    RoundTree,
    SamplingParams,
    StepOutput,
    TopLogprobs,
)
from torch import Tensor

DEVICE = os.environ.get("TANDEM_TEST_DEVICE", "cpu")  # `make test-gpu` sets it
VOCAB_SIZE = 31  # of the checkpoints `hybrid` and `small_draft_model`
MAX_STEPS = 2000  # more steps than any test needs: an engine that still has work by then is stuck


@dataclass
class Result:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)  # logits rows [vocab] that chose the tokens
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob | None] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: TandemError | None = None
    stats: RequestStats | None = None
    receipt: str | None = None
    rounds: list[RoundTree] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def take(self, output: StepOutput) -> None:
        assert not self.is_finished, "an output after the last one"
        assert (output.finish_reason is None) or (output.error is None)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.top_logprobs += output.top_logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.pieces.append(output.text)
        self.finish_reason, self.error, self.stats = output.finish_reason, output.error, output.stats
        self.receipt = output.receipt
        self.rounds += output.rounds


class EngineDriver:
    """An engine, its requests' results, and checks after every call."""

    def __init__(
        self, config: EngineConfig, extra_drafters: Mapping[str, Drafter] | None = None, *, poison: bool = False
    ) -> None:
        self.engine = Engine(config, extra_drafters=extra_drafters, record_logits=self._record)
        self.results: dict[str, Result] = {}
        self.poison = poison

    def _record(self, request_id: str, index: int, row: Tensor) -> None:
        rows = self.results[request_id].rows
        assert index == len(rows), "rows come in order, one a token"
        rows.append(row)

    def add(self, request: Request) -> None:
        prepared = self.engine.prepare(request)
        self.engine.add(prepared)
        self.results |= {name: Result() for name in choice_ids(request)}

    def step(self) -> list[StepOutput]:
        if self.poison:
            poison_unused(self.engine)
        outputs = self.engine.step()
        for output in outputs:
            self.results[output.request_id].take(output)
        self.engine.scheduler.check_integrity()
        return outputs

    def finish(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("the engine has work that it never does")

    def run(self, request: Request) -> Result:
        """A request from its arrival to its end."""
        self.add(request)
        self.finish()
        return self.results[request.request_id]


class Plain:
    """The reference: nothing drafted, one request at a time, one row a pass. Remembers what it decoded."""

    def __init__(self, checkpoint: Path, **overrides: Any) -> None:
        self.checkpoint = checkpoint
        self._driver = EngineDriver(engine_config(checkpoint, max_active=1, max_prefill_rows=1, **overrides))
        self._known: dict[Any, Result] = {}
        self._ids = (f"plain {n}" for n in count())

    def run(self, prompt: Sequence[int], params: SamplingParams) -> Result:
        key = (tuple(prompt), replace(params, drafter=None, num_draft_tokens=None))
        if key not in self._known:
            request = Request(request_id=next(self._ids), prompt=Prompt(token_ids=key[0]), params=key[1])
            self._known[key] = self._driver.run(request)
        return self._known[key]

    def continuation(self, prompt: Sequence[int]) -> list[int]:
        """What scripted drafters take for right."""
        return self.run(prompt, SamplingParams(max_tokens=48, ignore_eos=True)).token_ids

    @property
    def vocab_size(self) -> int:
        return self._driver.engine.model.config.vocab_size

    def encode(self, text: str) -> tuple[int, ...]:
        return self._driver.engine.prepare(Request(request_id="encode", prompt=Prompt(text=text))).prompt_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._driver.engine.tokenizer
        assert tokenizer is not None
        return tokenizer.decode(token_ids, skip_special_tokens=False)


def engine_config(checkpoint: Path, **overrides: Any) -> EngineConfig:
    """Small memory, no self-test, nothing drafted; as many threads as two busy cores give."""
    values: dict[str, Any] = {"drafters": (), "self_test_rows": 0, "kv_cache_bytes": 2 * MIB, "num_threads": 1}
    values |= {"device": DEVICE, "max_graph_rows": 32, "draft_graphs": True}
    return EngineConfig(checkpoint=checkpoint, **{**values, **overrides})


def num_different(result: Result, reference: Result) -> int:
    """Tokens, logits rows and logprobs that differ from the reference's; what only one side has differs too."""
    tokens = sum(a != b for a, b in zip_longest(result.token_ids, reference.token_ids))
    logprobs = sum(a != b for a, b in zip_longest(result.logprobs, reference.logprobs))
    rows = sum(not _is_same_row(a, b) for a, b in zip_longest(result.rows, reference.rows))
    tops = sum(a != b for a, b in zip_longest(result.top_logprobs, reference.top_logprobs))
    prompts = sum(a != b for a, b in zip_longest(result.prompt_logprobs, reference.prompt_logprobs))
    return tokens + logprobs + rows + tops + prompts


def _is_same_row(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def beginning(result: Result, num_tokens: int) -> Result:
    return Result(
        result.token_ids[:num_tokens],
        result.rows[:num_tokens],
        result.logprobs[:num_tokens],
        result.top_logprobs[:num_tokens],
        result.prompt_logprobs if num_tokens else [],
    )


def live_sequences(engine: Engine) -> list[EngineSequence]:
    running = [generation.sequence for generation in engine.scheduler.running]
    sessions = engine.scheduler.sessions.values()
    return running + [s.sequence for s in sessions if s.sequence is not None and s.running is None]


def limit_blocks(engine: Engine, num_blocks: int) -> None:
    """Let an engine that holds nothing yet have so few KV blocks."""
    engine.scheduler.cache.index.blocks = IndexPool(num_blocks)


def poison_unused(engine: Engine) -> None:
    """Write NaN over all memory of the target and its drafters that holds nothing committed and nothing cached."""
    sequences = live_sequences(engine)
    slots = {sequence.slot for sequence in sequences}
    nodes = list(engine.scheduler.cache.index.nodes())
    cached = [([node.block], len(node.token_ids)) for node in nodes]
    computed = [(s.block_table, s.num_computed) for s in sequences]
    _poison_layers(engine.rounds.state.layers, [*computed, *cached], slots)
    for drafter in engine.rounds.drafting.drafters.values():
        if isinstance(drafter, MtpDrafter):
            written = [(s.block_table, drafter._tracks[s.slot].num_written) for s in sequences]
            cached = [([node.block], node.num_drafter_rows) for node in nodes]
            _poison_layers([drafter.kv], [*written, *cached], slots)
        elif isinstance(drafter, DraftModelDrafter):
            computed = [(s.block_table, drafter._num_computed[s.slot]) for s in sequences]
            _poison_layers(drafter.state.layers, computed, slots)


def _poison_layers(
    layers: Iterable[KVLayer | RecurrentLayer], valid: Sequence[tuple[Sequence[int], int]], slots: set[int]
) -> None:
    for layer in layers:
        if isinstance(layer, KVLayer):
            num_blocks, _, block, _ = layer.keys.shape
            is_unused = torch.ones(num_blocks, block, dtype=torch.bool)
            for table, num_positions in valid:
                for first in range(0, num_positions, block):
                    is_unused[table[first // block], : num_positions - first] = False
            for part in (layer.keys, layer.values):
                part.transpose(1, 2)[is_unused] = float("nan")
        else:
            free = [slot for slot in range(len(layer.conv)) if slot not in slots]
            layer.conv[free], layer.delta[free] = float("nan"), float("nan")
