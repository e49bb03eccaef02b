# SPDX-License-Identifier: Apache-2.0
"""GPU kernels over draft trees: near their reference, and every node with the bits of a walk to it row by row."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import tandem_kernels as kernels
import torch
from fakes.bits import assert_same_bits
from gpu_cases import BF16, Source
from tandem_kernels.attention import attention_reference
from tandem_kernels.causal_conv import causal_conv_reference
from tandem_kernels.device import IS_INTERPRETED
from tandem_kernels.gated_delta import gated_delta_reference
from torch import Tensor
from tree_cases import random_tree

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


KERNELS = ["attention", "causal_conv", "gated_delta"]
# Trees of a pass and their prefixes. Attention's blocks are 256 positions: prefixes near their borders.
if IS_INTERPRETED:
    PASSES = [([5, 1], [254, 3]), ([2, 3], [0, 256])]
    PAGES = 34
else:
    PASSES = [([16], [1000]), ([9, 1, 30], [254, 0, 8100]), ([1] * 5, [255, 256, 257, 511, 3000]), ([60, 4], [509, 40])]
    PAGES = 130


def _setup(kernel: str, device: torch.device, index: int, *, is_chain: bool = False) -> tuple[GpuTreeCase, Pass]:
    sizes, prefixes = PASSES[index]
    source = Source(device, index)
    trees = [list(range(-1, size - 1)) if is_chain else random_tree(source.generator, size) for size in sizes]
    tables = scattered_tables(device, len(sizes), PAGES)
    slots = torch.randperm(NUM_SLOTS, generator=source.generator)[: len(sizes)].tolist()
    batch = make_pass(device, trees, prefixes, tables, slots)
    case = make_case(kernel, source, sum(sizes), tables.numel())
    case.poison(batch, case.state)
    return case, batch


@pytest.mark.parametrize("index", range(len(PASSES)))
@pytest.mark.parametrize("kernel", KERNELS)
def test_near_the_float64_reference(kernel: str, index: int, device: torch.device) -> None:
    case, batch = _setup(kernel, device, index)
    got = case.run(batch, case.rows, case.state).cpu().double()
    expected = case.reference(batch, case.rows, case.state)
    assert (got - expected).abs().max() <= case.tolerance * expected.abs().max()


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("index", range(len(PASSES)))
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tree_equals_its_paths_row_by_row(kernel: str, index: int, is_chain: bool, device: torch.device) -> None:
    case, batch = _setup(kernel, device, index, is_chain=is_chain)
    outputs = case.run(batch, case.rows, case.state)
    leaves = set(range(len(batch.paths))) - set(batch.parents.tolist())
    for leaf in sorted(leaves):
        path = batch.paths[leaf]
        assert_same_bits(walk(case, batch, path), outputs[path])


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_off_the_path_may_be_nan(kernel: str, device: torch.device) -> None:
    case, batch = _setup(kernel, device, 0)
    outputs = case.run(batch, case.rows, case.state)
    for path in batch.paths[:: 3 if IS_INTERPRETED else 4]:
        poisoned = []
        for i, x in enumerate(case.rows):
            # Values are finite, as attention_layer writes them: what a row does not see may weigh 0 times them.
            others = torch.full_like(x, 1e30 if (kernel, i) == ("attention", 2) else float("nan"))
            others[path] = x[path]
            poisoned.append(others)
        assert_same_bits(case.run(batch, tuple(poisoned), case.state)[path], outputs[path])


@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_rows_change_nothing(kernel: str, device: torch.device) -> None:
    case, batch = _setup(kernel, device, 0)
    expected = case.run(batch, case.rows, case.state)
    extra = 2 if IS_INTERPRETED else 7
    ints = torch.zeros(extra, dtype=torch.int32, device=device)
    padded = replace(
        batch,
        parents=torch.cat([batch.parents, ints + kernels.PADDING]),
        row_seqs=torch.cat([batch.row_seqs, ints]),
    )
    rows = tuple(
        torch.cat([x, torch.full_like(x[:1], float("nan")).repeat(extra, *[1] * (x.dim() - 1))]) for x in case.rows
    )
    assert_same_bits(case.run(padded, rows, case.state)[: len(expected)], expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_pass_reads_state_and_writes_none(kernel: str, device: torch.device) -> None:
    case, batch = _setup(kernel, device, 0)
    before = case.copied().state
    case.run(batch, case.rows, case.state)
    for part, kept in zip(case.state, before, strict=True):
        assert_same_bits(part, kept)


def test_a_plan_says_how_rows_descend(device: torch.device) -> None:
    _, batch = _setup("causal_conv", device, 1)
    plan = kernels.plan_trees(batch.parents, batch.row_seqs)
    starts = batch.seq_starts.tolist()
    for row, path in enumerate(batch.paths):
        is_chain = path == list(range(path[0], row + 1))
        assert int(plan.depths[row]) == len(path) - 1
        assert int(plan.roots[row]) == (path[0] if is_chain else -1)
        assert int(plan.firsts[row]) == starts[int(batch.row_seqs[row])]
        if not is_chain:
            assert plan.paths[row, : len(path)].tolist() == path
    leaves = sorted(set(range(len(batch.paths))) - set(batch.parents.tolist()))
    assert plan.leaves[: 1 + len(leaves)].tolist() == [len(leaves), *leaves]
    assert plan.runs[: len(starts)].tolist() == [len(starts) - 1, *starts[:-1]]


HEAD_SIZES = [(3, 3, 16)] if IS_INTERPRETED else [(16, 1, 64), (4, 4, 128), (32, 2, 256), (6, 2, 80)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEAD_SIZES)
def test_attention_of_other_heads(heads: int, kv_heads: int, dim: int, device: torch.device) -> None:
    source, prefix, rows = Source(device, dim), 257, 4 if IS_INTERPRETED else 24
    tables = scattered_tables(device, 1, 34)
    batch = make_pass(device, [random_tree(source.generator, rows)], [prefix], tables, [0])
    case = attention_case(source, rows, 34, heads, kv_heads, dim)
    case.poison(batch, case.state)
    got = case.run(batch, case.rows, case.state)
    expected = case.reference(batch, case.rows, case.state)
    assert (got.cpu().double() - expected).abs().max() <= case.tolerance * expected.abs().max()
    path = max(batch.paths, key=len)
    assert_same_bits(walk(case, batch, path), got[path])


def test_attention_of_a_draft_that_grew_depth_by_depth(device: torch.device) -> None:
    """Two sequences' rows in turn, queries the last three: each has the bits of its path alone, a chain."""
    source, prefixes = Source(device, 1), [255, 3]
    tables = scattered_tables(device, 2, 34)
    parents, row_seqs = [-1, -1, -1, 0, 1, 2, 3, 3, 5], [0, 0, 1, 0, 0, 1, 0, 0, 1]
    chains = make_pass(device, [[-1], [-1]], prefixes, tables, [0, 1])
    ints = (torch.tensor(part, dtype=torch.int32, device=device) for part in (parents, row_seqs))
    batch = replace(chains, **dict(zip(("parents", "row_seqs"), ints, strict=True)))
    case = make_case("attention", source, len(parents), tables.numel())
    case.poison(batch, case.state)
    q, *keys_and_values = case.rows
    got = case.run(batch, (q[-3:], *keys_and_values), case.state)
    for i, row in enumerate(range(len(parents) - 3, len(parents))):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        seq = row_seqs[row]
        alone = make_pass(device, [list(range(-1, len(path) - 1))], [prefixes[seq]], tables[seq : seq + 1], [0])
        assert_same_bits(case.run(alone, tuple(x[path] for x in case.rows), case.state)[-1:], got[i : i + 1])
