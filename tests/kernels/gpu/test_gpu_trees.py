# SPDX-License-Identifier: Apache-2.0
"""GPU kernels over draft trees: near their reference, and every node with the bits of a walk to it row by row."""

from dataclasses import replace

import pytest
import tandem_kernels as kernels
import torch
from fakes.bits import assert_same_bits
from gpu_cases import Source
from gpu_tree_cases import NUM_SLOTS, GpuTreeCase, Pass, attention_case, make_case, make_pass, scattered_tables, walk
from tandem_kernels.device import IS_INTERPRETED
from tree_cases import random_tree

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
    for leaf in leaves:
        parent = int(batch.parents[leaf])
        group = [other for other in leaves if other == leaf or (parent >= 0 and int(batch.parents[other]) == parent)]
        following = next((other for other in group if other > leaf), len(batch.paths))
        assert int(plan.siblings[leaf]) == (following if leaf == group[0] else -1 - following)
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
