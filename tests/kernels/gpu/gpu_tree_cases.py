# SPDX-License-Identifier: Apache-2.0
"""GPU kernels over draft trees as cases: random passes, inputs, state, calls, reference twins."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import tandem_kernels as kernels
import torch
from gpu_cases import BF16, Source
from tandem_kernels.attention import attention_reference
from tandem_kernels.causal_conv import causal_conv_reference
from tandem_kernels.device import IS_INTERPRETED
from tandem_kernels.gated_delta import gated_delta_reference
from torch import Tensor

PAGE = 8 if IS_INTERPRETED else 64
NUM_SLOTS = 5


@dataclass(frozen=True)
class Pass:
    """Rows of several sequences on a device; `paths` is the rows from the root to each row."""

    parents: Tensor
    row_seqs: Tensor
    seq_starts: Tensor
    slots: Tensor
    prefix_lens: Tensor
    block_tables: Tensor
    paths: list[list[int]]

    @property
    def row_slots(self) -> Tensor:
        return self.slots[self.row_seqs.long()]


def make_pass(
    device: torch.device, trees: list[list[int]], prefix_lens: list[int], tables: Tensor, slots: list[int]
) -> Pass:
    """A tree of parents (local, -1 the root) a sequence."""
    parents: list[int] = []
    starts, paths = [0], []
    for tree in trees:
        base = starts[-1]
        for node, parent in enumerate(tree):
            parents.append(parent if parent < 0 else base + parent)
            paths.append([*(paths[base + parent] if parent >= 0 else []), base + node])
        starts.append(base + len(tree))
    row_seqs = [seq for seq, tree in enumerate(trees) for _ in tree]
    ints = (parents, row_seqs, starts, slots, prefix_lens)
    tensors = (torch.tensor(part, dtype=torch.int32, device=device) for part in ints)
    return Pass(*tensors, tables, paths)


def scattered_tables(device: torch.device, seqs: int, length: int) -> Tensor:
    order = torch.randperm(seqs * length, generator=torch.Generator().manual_seed(3))
    return order.reshape(seqs, length).int().to(device)


@dataclass(frozen=True)
class GpuTreeCase:
    rows: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
    run: Callable[[Pass, tuple[Tensor, ...], tuple[Tensor, ...]], Tensor]
    reference: Callable[[Pass, tuple[Tensor, ...], tuple[Tensor, ...]], Tensor]
    commit: Callable[[Pass, tuple[Tensor, ...], tuple[Tensor, ...], int], None]  # one root row at a position
    poison: Callable[[Pass, tuple[Tensor, ...]], None]
    tolerance: float

    def copied(self) -> "GpuTreeCase":
        return replace(self, state=tuple(torch.empty_like(x).copy_(x) for x in self.state))


def attention_case(source: Source, num_rows: int, num_pages: int, heads: int, kv_heads: int, dim: int) -> GpuTreeCase:
    scale = 2.0 * dim**-0.5
    cache = (num_pages, kv_heads, PAGE, dim)

    def args(batch: Pass) -> tuple[Tensor, ...]:
        return batch.block_tables, batch.prefix_lens, batch.parents, batch.row_seqs

    def commit(batch: Pass, rows: tuple[Tensor, ...], state: tuple[Tensor, ...], position: int) -> None:
        place = int(batch.block_tables[0, position // PAGE]) * PAGE + position % PAGE
        device = batch.parents.device
        indices = torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([place], device=device)
        kernels.store_kv(rows[1], rows[2], *state, *indices)

    def poison(batch: Pass, state: tuple[Tensor, ...]) -> None:
        is_valid = torch.zeros(num_pages, PAGE, dtype=torch.bool)
        for table, length in zip(batch.block_tables.tolist(), batch.prefix_lens.tolist(), strict=True):
            for position in range(length):
                is_valid[table[position // PAGE], position % PAGE] = True
        for part in state:
            part.masked_fill_(~is_valid[:, None, :, None].to(part.device), float("nan"))

    def reference(batch: Pass, rows: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> Tensor:
        on_cpu = [x.cpu() for x in (*rows, *state, *args(batch))]
        return attention_reference(*(x.double() for x in on_cpu[:5]), *on_cpu[5:], scale)

    return GpuTreeCase(
        (
            source(num_rows, heads, dim, dtype=BF16),
            source(num_rows, kv_heads, dim, dtype=BF16),
            source(num_rows, kv_heads * dim, dtype=BF16),
        ),
        (source(*cache, dtype=BF16), source(*cache, dtype=BF16)),
        lambda batch, rows, state: kernels.attention(*rows, *state, *args(batch), scale),
        reference,
        commit,
        poison,
        2.0**-7,  # weights and outputs are rounded to bfloat16
    )


def one_path(device: torch.device) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    return starts, torch.zeros(1, dtype=torch.int32, device=device)


def _poison_slots(batch: Pass, state: tuple[Tensor, ...]) -> None:
    others = [slot for slot in range(NUM_SLOTS) if slot not in batch.slots.tolist()]
    for part in state:
        part[others] = float("nan")


def conv_case(source: Source, num_rows: int, channels: int, taps: int) -> GpuTreeCase:
    weight, device = source(taps, channels), source.device

    def reference(batch: Pass, rows: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> Tensor:
        x, kept = rows[0].cpu().double(), state[0].cpu().double()
        return causal_conv_reference(x, kept, weight.cpu(), batch.parents.cpu(), batch.row_slots.cpu())

    return GpuTreeCase(
        (source(num_rows, channels, dtype=BF16),),
        (source(NUM_SLOTS, taps - 1, channels, dtype=BF16),),
        lambda batch, rows, state: kernels.causal_conv(*rows, *state, weight, batch.parents, batch.row_slots),
        reference,
        lambda batch, rows, state, _: kernels.update_conv_state(*rows, *state, batch.slots, *one_path(device)),
        _poison_slots,
        2.0**-18,
    )


def delta_case(source: Source, num_rows: int, key_heads: int, value_heads: int, dk: int, dv: int) -> GpuTreeCase:
    a_log, dt_bias, device = source(value_heads) * 0.7 - 1, source(value_heads), source.device
    channels = 2 * key_heads * dk + value_heads * dv

    def args(batch: Pass, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return a_log, dt_bias, *state, batch.slots, batch.seq_starts, batch.parents

    def reference(batch: Pass, rows: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> Tensor:
        on_cpu = [x.cpu() for x in args(batch, state)]
        return gated_delta_reference(*(x.cpu().double() for x in rows), *on_cpu, key_heads)[0]

    return GpuTreeCase(
        (source(num_rows, channels), 2 * source(num_rows, 2 * value_heads, dtype=BF16)),
        (source(NUM_SLOTS, value_heads, dk, dv),),
        lambda batch, rows, state: kernels.gated_delta(*rows, *args(batch, state), key_heads),
        reference,
        lambda batch, rows, state, _: kernels.gated_delta_commit(
            *rows, a_log, dt_bias, *state, batch.slots, *one_path(device), key_heads
        ),
        _poison_slots,
        2.0**-16,
    )


def make_case(kernel: str, source: Source, num_rows: int, num_pages: int) -> GpuTreeCase:
    if kernel == "attention":
        heads, kv_heads, dim = (6, 2, 20) if IS_INTERPRETED else (24, 4, 256)
        return attention_case(source, num_rows, num_pages, heads, kv_heads, dim)
    if kernel == "causal_conv":
        return conv_case(source, num_rows, 37 if IS_INTERPRETED else 10240, 4)
    sizes = (1, 2, 12, 20) if IS_INTERPRETED else (16, 48, 128, 128)
    return delta_case(source, num_rows, *sizes)


def walk(case: GpuTreeCase, batch: Pass, path: list[int]) -> Tensor:
    """Outputs of the rows of `path`, each alone in its pass, committed before the next."""
    case = case.copied()
    seq, device = int(batch.row_seqs[path[0]]), batch.parents.device
    outputs = []
    for depth, row in enumerate(path):
        position = int(batch.prefix_lens[seq]) + depth
        tables, slots = batch.block_tables[seq : seq + 1], [int(batch.slots[seq])]
        alone = make_pass(device, [[-1]], [position], tables, slots)
        inputs = tuple(part[row : row + 1] for part in case.rows)
        outputs.append(case.run(alone, inputs, case.state))
        case.commit(alone, inputs, case.state, position)
    return torch.cat(outputs)
