# SPDX-License-Identifier: Apache-2.0
"""Drives a decoder over sequences by hand: passes of any mix of rows, on a state that is NaN where it is not valid."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from tandem_backend.model.batch import SequenceRows, build_batch
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.passes import LaunchedPasses, Passes
from tandem_backend.model.state import KVLayer, ModelState, RecurrentLayer, allocate_state
from torch import Tensor


@dataclass
class Place:
    """A sequence's place in the state, and how much of it is committed."""

    slot: int
    block_table: list[int]
    prefix_len: int = 0


@dataclass(frozen=True)
class Rows:
    """What a sequence brings to a pass."""

    seq: Place
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    logit_rows: Sequence[int] | None = None
    accepted: Sequence[int] | None = None  # local rows to commit; None: all (of a chain)


@dataclass
class Driver:
    """A decoder and a state whose free blocks, free slots and positions past the valid ones hold NaN."""

    decoder: Decoder
    block: int
    max_len: int
    num_sequences: int = 1
    seed: int = 0
    make_passes: Callable[[Decoder, ModelState], Passes] = LaunchedPasses
    state: ModelState = field(init=False)
    passes: Passes = field(init=False)

    def __post_init__(self) -> None:
        blocks_each = -(-self.max_len // self.block)
        num_blocks, num_slots = self.num_sequences * blocks_each + 3, self.num_sequences + 2
        self.state = allocate_state(self.decoder.config, num_blocks, num_slots, self.block, self.decoder.device)
        self.passes = self.make_passes(self.decoder, self.state)
        for part in _tensors(self.state):
            part.fill_(float("nan"))
        rng = random.Random(self.seed)
        pages, slots = rng.sample(range(num_blocks), num_blocks), rng.sample(range(num_slots), num_slots)
        self.sequences = [
            Place(slots[i], pages[i * blocks_each : (i + 1) * blocks_each]) for i in range(self.num_sequences)
        ]
        for seq in self.sequences:
            self.state.clear_slot(seq.slot)

    def forward(self, *passed: Rows, commit: bool = True) -> list[Tensor]:
        """One pass. Returns each sequence's logits [its logit rows, vocab]."""
        batch = build_batch(
            [
                SequenceRows(r.token_ids, r.seq.prefix_len, r.seq.slot, r.seq.block_table, r.parents, r.logit_rows)
                for r in passed
            ]
        )
        result = self.passes.forward(batch)
        logits = result.logits.clone()  # the next pass may reuse their memory
        if commit:
            paths = [range(len(r.token_ids)) if r.accepted is None else r.accepted for r in passed]
            self.passes.commit(result, batch, paths)
            for r, path in zip(passed, paths, strict=True):
                r.seq.prefix_len += len(path)
        counts = [len(r.token_ids if r.logit_rows is None else r.logit_rows) for r in passed]
        return list(logits.split(counts))

    def tensors(self) -> list[Tensor]:
        return _tensors(self.state)

    def copy(self) -> "Driver":
        """The same sequences on a state of their own, launched op by op."""
        other = Driver(self.decoder, self.block, self.max_len, self.num_sequences, self.seed)
        for mine, theirs in zip(_tensors(self.state), _tensors(other.state), strict=True):
            theirs.copy_(mine)
        other.sequences = [replace(seq) for seq in self.sequences]
        return other


def _tensors(state: ModelState) -> list[Tensor]:
    parts: list[Tensor] = []
    for layer in state.layers:
        if isinstance(layer, KVLayer):
            parts += [layer.keys, layer.values]
        elif isinstance(layer, RecurrentLayer):
            parts += [layer.conv, layer.delta]
    return parts


def continue_greedily(decoder: Decoder, prompt: Sequence[int], num_tokens: int, block: int) -> Tensor:
    """Logits of the prompt's last row and of `num_tokens` greedy tokens: alone, the prompt in one pass."""
    driver = Driver(decoder, block, len(prompt) + num_tokens)
    seq = driver.sequences[0]
    rows = [driver.forward(Rows(seq, prompt, logit_rows=[len(prompt) - 1]))[0]]
    for _ in range(num_tokens):
        rows.append(driver.forward(Rows(seq, [int(rows[-1].argmax())]))[0])
    return torch.cat(rows)
