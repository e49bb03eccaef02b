# SPDX-License-Identifier: Apache-2.0
"""Kernels over draft trees, as cases for the general tests: random passes, inputs, state, calls, reference twins."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import tandem_kernels as kernels
import torch
from tandem_kernels.attention import attention_reference
from tandem_kernels.causal_conv import causal_conv_reference
from tandem_kernels.gated_delta import gated_delta_reference
from torch import Tensor


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


@dataclass(frozen=True)
class TreePass:
    """Rows of several sequences, each a tree in pre-order, and the state that the tree kernels read."""

    starts: tuple[int, ...]  # rows of sequence s: [starts[s], starts[s + 1])
    parents: Tensor  # [rows] int32
    row_seqs: Tensor  # [rows] int32
    slots: Tensor  # [seqs] int32
    prefix_lens: Tensor  # [seqs] int32
    block_tables: Tensor  # [seqs, n] int32

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    @property
    def row_slots(self) -> Tensor:
        return self.slots[self.row_seqs.long()]

    @property
    def seq_starts(self) -> Tensor:
        return torch.tensor(self.starts, dtype=torch.int32)

    def path(self, row: int) -> list[int]:
        """Rows from the root to `row`."""
        path = [row]
        while self.parents[path[0]] >= 0:
            path.insert(0, int(self.parents[path[0]]))
        return path

    def one_row(self, seq: int, prefix_len: int | None = None) -> "TreePass":
        """The pass of a single root row of sequence `seq`."""
        length = int(self.prefix_lens[seq]) if prefix_len is None else prefix_len
        return TreePass(
            starts=(0, 1),
            parents=torch.tensor([-1], dtype=torch.int32),
            row_seqs=torch.zeros(1, dtype=torch.int32),
            slots=self.slots[seq : seq + 1],
            prefix_lens=torch.tensor([length], dtype=torch.int32),
            block_tables=self.block_tables[seq : seq + 1],
        )


BLOCK = 8  # small blocks: short trees straddle them
NUM_BLOCKS, NUM_SLOTS = 40, 9


def random_tree(generator: torch.Generator, num_nodes: int) -> list[int]:
    """Parents in pre-order: a node hangs below the one before it or below one of that one's ancestors."""
    parents = [-1]
    for node in range(1, num_nodes):
        ancestors = [node - 1]
        while parents[ancestors[-1]] >= 0:
            ancestors.append(parents[ancestors[-1]])
        up = min(int(torch.randint(0, 4, (), generator=generator)), len(ancestors) - 1)
        parents.append(ancestors[up])
    return parents


def random_pass(generator: torch.Generator, tree_sizes: list[int]) -> TreePass:
    """A tree a size; prefixes of 0 to 3 blocks, pages and slots scattered."""
    parents: list[int] = []
    starts = [0]
    for size in tree_sizes:
        parents.extend(p if p < 0 else p + starts[-1] for p in random_tree(generator, size))
        starts.append(starts[-1] + size)
    seqs, counts = len(tree_sizes), torch.tensor(tree_sizes)
    pages = torch.randperm(NUM_BLOCKS, generator=generator)[: seqs * 12].reshape(seqs, -1)
    return TreePass(
        starts=tuple(starts),
        parents=torch.tensor(parents, dtype=torch.int32),
        row_seqs=torch.arange(seqs, dtype=torch.int32).repeat_interleave(counts),
        slots=torch.randperm(NUM_SLOTS, generator=generator)[:seqs].int(),
        prefix_lens=torch.randint(0, 3 * BLOCK, (seqs,), generator=generator, dtype=torch.int32),
        block_tables=pages.int(),
    )


@dataclass(frozen=True)
class TreeCase:
    """A kernel over trees: `rows` are its inputs by row, `state` its cache or slots."""

    name: str
    rows: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
    run: Callable[[TreePass, tuple[Tensor, ...], tuple[Tensor, ...]], Tensor]
    reference: Callable[[TreePass, tuple[Tensor, ...], tuple[Tensor, ...]], Tensor]
    commit: Callable[[TreePass, tuple[Tensor, ...], tuple[Tensor, ...]], None]  # one root row, in place
    poison: Callable[[TreePass, tuple[Tensor, ...]], None]  # NaN into all state that the pass must not read
    # Allowed error over the largest output. The kernels chain many roundings of different sizes (softmax; a recurrence
    # over the path), for which no tight bound is at hand: this is some ten times what is seen.
    tolerance: float = 4e-6

    def with_state_copied(self) -> "TreeCase":
        return replace(self, state=tuple(part.clone() for part in self.state))


def tree_cases(generator: torch.Generator, num_rows: int, group: int = 3, dim: int = 20) -> list[TreeCase]:
    return [
        attention_case(generator, num_rows, group, dim),
        conv_case(generator, num_rows),
        delta_case(generator, num_rows, group),
    ]


def attention_case(generator: torch.Generator, num_rows: int, group: int, dim: int) -> TreeCase:
    kv_heads = 2
    shape, scale = (NUM_BLOCKS, kv_heads, BLOCK, dim), 2.0 * dim**-0.5

    def arguments(batch: TreePass) -> tuple[Tensor, ...]:
        return batch.block_tables, batch.prefix_lens, batch.parents, batch.row_seqs

    def commit(batch: TreePass, rows: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> None:
        position = int(batch.prefix_lens[0])
        place = int(batch.block_tables[0, position // BLOCK]) * BLOCK + position % BLOCK
        kernels.store_kv(rows[1], rows[2], *state, torch.zeros(1, dtype=torch.int32), torch.tensor([place]))

    def poison(batch: TreePass, state: tuple[Tensor, ...]) -> None:
        is_valid = torch.zeros(NUM_BLOCKS, BLOCK, dtype=torch.bool)
        for table, length in zip(batch.block_tables.tolist(), batch.prefix_lens.tolist(), strict=True):
            for position in range(length):
                is_valid[table[position // BLOCK], position % BLOCK] = True
        for part in state:
            part.masked_fill_(~is_valid[:, None, :, None], float("nan"))

    return TreeCase(
        "attention",
        (
            _randn(generator, num_rows, kv_heads * group, dim),
            _randn(generator, num_rows, kv_heads, dim),
            _randn(generator, num_rows, kv_heads * dim),
        ),
        (_randn(generator, *shape), _randn(generator, *shape)),
        lambda batch, rows, state: kernels.attention(*rows, *state, *arguments(batch), scale),
        lambda batch, rows, state: attention_reference(*rows, *state, *arguments(batch), scale),
        commit,
        poison,
    )


def _poison_other_slots(batch: TreePass, state: tuple[Tensor, ...]) -> None:
    others = [slot for slot in range(NUM_SLOTS) if slot not in batch.slots.tolist()]
    for part in state:
        part[others] = float("nan")


ONE_PATH = (torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))  # path_starts, path_rows


def conv_case(generator: torch.Generator, num_rows: int, taps: int = 4, channels: int = 37) -> TreeCase:
    weight = _randn(generator, taps, channels)
    return TreeCase(
        "causal_conv",
        (_randn(generator, num_rows, channels),),
        (_randn(generator, NUM_SLOTS, taps - 1, channels),),
        lambda batch, rows, state: kernels.causal_conv(*rows, *state, weight, batch.parents, batch.row_slots),
        lambda batch, rows, state: causal_conv_reference(*rows, *state, weight, batch.parents, batch.row_slots),
        lambda batch, rows, state: kernels.update_conv_state(*rows, *state, batch.slots, *ONE_PATH),
        _poison_other_slots,
    )


def delta_case(generator: torch.Generator, num_rows: int, group: int, dk: int = 12, dv: int = 75) -> TreeCase:
    """75 columns: one of the step's tiles of 64, and a narrow rest."""
    key_heads, value_heads = 2, 2 * group
    channels = 2 * key_heads * dk + value_heads * dv
    a_log, dt_bias = _randn(generator, value_heads) * 0.7 - 1, _randn(generator, value_heads)

    def run(batch: TreePass, rows: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> Tensor:
        return kernels.gated_delta(
            *rows, a_log, dt_bias, *state, batch.slots, batch.seq_starts, batch.parents, key_heads
        )

    def reference(batch: TreePass, rows: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> Tensor:
        args = (*rows, a_log, dt_bias, *state, batch.slots, batch.seq_starts, batch.parents, key_heads)
        return gated_delta_reference(*args)[0]

    return TreeCase(
        "gated_delta",
        (_randn(generator, num_rows, channels), 2 * _randn(generator, num_rows, 2 * value_heads)),
        (_randn(generator, NUM_SLOTS, value_heads, dk, dv),),
        run,
        reference,
        lambda batch, rows, state: kernels.gated_delta_commit(
            *rows, a_log, dt_bias, *state, batch.slots, *ONE_PATH, key_heads
        ),
        _poison_other_slots,
    )
