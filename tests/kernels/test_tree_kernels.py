# SPDX-License-Identifier: Apache-2.0
"""Kernels over trees: near their reference, and every node with the bits of a walk to it one row at a time."""

import pytest
import torch
from fakes.bits import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_cases import TreeCase, TreePass, random_pass, tree_cases

KERNELS = ["attention", "causal_conv", "gated_delta"]
few_examples = settings(max_examples=20, deadline=None)
tree_sizes = st.lists(st.integers(1, 14), min_size=1, max_size=3)
groups = st.sampled_from([1, 2, 3, 8])
seeds = st.integers(0, 2**31)


def _case(kernel: str, seed: int, sizes: list[int], group: int = 3) -> tuple[TreeCase, TreePass]:
    generator = torch.Generator().manual_seed(seed)
    batch = random_pass(generator, sizes)
    case = next(case for case in tree_cases(generator, batch.num_rows, group) if case.name == kernel)
    case.poison(batch, case.state)
    return case, batch


def _walk(case: TreeCase, batch: TreePass, path: list[int]) -> Tensor:
    """Outputs of the rows of `path`, each alone in its pass, committed before the next."""
    case = case.with_state_copied()
    seq = int(batch.row_seqs[path[0]])
    outputs = []
    for depth, row in enumerate(path):
        alone = batch.one_row(seq, int(batch.prefix_lens[seq]) + depth)
        inputs = tuple(part[row : row + 1] for part in case.rows)
        outputs.append(case.run(alone, inputs, case.state))
        case.commit(alone, inputs, case.state)
    return torch.cat(outputs)


@pytest.mark.parametrize("kernel", KERNELS)
@few_examples
@given(seed=seeds, sizes=tree_sizes, group=groups)
def test_near_the_float64_reference(kernel: str, seed: int, sizes: list[int], group: int) -> None:
    case, batch = _case(kernel, seed, sizes, group)
    expected = case.reference(batch, tuple(x.double() for x in case.rows), case.state)
    error = (case.run(batch, case.rows, case.state).double() - expected).abs().max()
    assert error <= case.tolerance * expected.abs().max()


@pytest.mark.parametrize("kernel", KERNELS)
@few_examples
@given(seed=seeds, sizes=tree_sizes, group=groups)
def test_a_tree_is_its_paths_walked_row_by_row(kernel: str, seed: int, sizes: list[int], group: int) -> None:
    case, batch = _case(kernel, seed, sizes, group)
    outputs = case.run(batch, case.rows, case.state)
    leaves = set(range(batch.num_rows)) - set(batch.parents.tolist())
    for leaf in leaves:
        path = batch.path(leaf)
        assert_same_bits(_walk(case, batch, path), outputs[path])


@pytest.mark.parametrize("kernel", KERNELS)
@few_examples
@given(seed=seeds, sizes=tree_sizes)
def test_rows_off_the_path_may_be_nan(kernel: str, seed: int, sizes: list[int]) -> None:
    case, batch = _case(kernel, seed, sizes)
    outputs = case.run(batch, case.rows, case.state)
    for row in range(batch.num_rows):
        path = batch.path(row)
        poisoned = []
        for x in case.rows:
            others = torch.full_like(x, float("nan"))
            others[path] = x[path]
            poisoned.append(others)
        assert_same_bits(case.run(batch, tuple(poisoned), case.state)[path], outputs[path])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_pass_reads_state_and_writes_none(kernel: str) -> None:
    case, batch = _case(kernel, 3, [5, 9])
    before = case.with_state_copied().state
    case.run(batch, case.rows, case.state)
    for part, kept in zip(case.state, before, strict=True):
        assert_same_bits(part, kept)


@pytest.mark.parametrize(("kernel", "strided_input"), [("attention", 2), ("causal_conv", 0), ("gated_delta", 1)])
def test_strided_rows(kernel: str, strided_input: int) -> None:
    case, batch = _case(kernel, 5, [5, 1, 9])
    x = case.rows[strided_input]
    wide = torch.full((x.shape[0], x.shape[1] + 7), float("nan"))
    wide[:, 3 : 3 + x.shape[1]] = x
    rows = (*case.rows[:strided_input], wide[:, 3 : 3 + x.shape[1]], *case.rows[strided_input + 1 :])
    assert_same_bits(case.run(batch, rows, case.state), case.run(batch, case.rows, case.state))


@few_examples
@given(seed=seeds, sizes=tree_sizes, data=st.data())
def test_attention_of_the_last_rows_alone(seed: int, sizes: list[int], data: st.DataObject) -> None:
    case, batch = _case("attention", seed, sizes)
    first = data.draw(st.integers(0, batch.num_rows - 1))
    q, *keys_and_values = case.rows
    last_rows = case.run(batch, (q[first:], *keys_and_values), case.state)
    assert_same_bits(last_rows, case.run(batch, case.rows, case.state)[first:])
    expected = case.reference(batch, tuple(x.double() for x in (q[first:], *keys_and_values)), case.state)
    assert (last_rows.double() - expected).abs().max() <= case.tolerance * expected.abs().max()
