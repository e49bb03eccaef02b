# SPDX-License-Identifier: Apache-2.0
"""Commit that goes on from a state which the forward's walk came by leaves the bits of one that walks all rows."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from fakes.bits import assert_same_bits
from gpu_cases import BF16, Source
from tandem_kernels import DeltaLayer, PassedState, commit_delta_layers, delta_layer, new_delta_rows, plan_trees
from tandem_kernels.device import IS_INTERPRETED
from tandem_kernels.state_memory import LONG_PASS, new_delta_states
from tandem_kernels.tree_plan import PADDING
from test_gpu_blocks import DK, DV, HIDDEN, VALUE_HEADS, chain, delta, int32
from torch import Tensor

LAYERS, SLOTS = 2, 6
LENGTH = 7 if IS_INTERPRETED else 300  # of the long chain
TREE = [-1, 0, 0]
NAN = float("nan")


@dataclass(frozen=True)
class Pass:
    """A forward of some layers over trees and padding; slots that no tree is of hold NaN, as do the rows of padding."""

    layers: list[DeltaLayer]
    kept: list[tuple[Tensor, Tensor, PassedState]]
    conv: Tensor
    state: Tensor
    slots: list[int]
    starts: list[int]

    @property
    def passed_row(self) -> int:
        return int(self.kept[0][2].row)

    def commit(self, *parts: list[list[int]], from_passed: bool) -> list[Tensor]:
        """States after paths (local rows by sequence) were committed one part after the other."""
        conv, state = self.conv.clone(), torch.empty_like(self.state).copy_(self.state)
        projected, qkv, passed = zip(*self.kept, strict=True)
        for paths in parts:
            rows = [start + row for start, path in zip(self.starts, paths, strict=True) for row in path]
            ends = [0, *accumulate(len(path) for path in paths)]
            path = [int32(part, state.device) for part in (self.slots, ends, rows)]
            states = (conv.unbind(), state.unbind())
            commit_delta_layers(self.layers, projected, qkv, *states, *path, passed if from_passed else None)
        assert state[:, self.slots].isfinite().all()
        return [conv.flatten(1), state.flatten(1)]


def forward(device: torch.device, trees: list[list[int]], padding: int = 0) -> Pass:
    source, slots = Source(device, 0), [4, 1, 3][: len(trees)]
    layers = [delta(source) for _ in range(LAYERS)]
    conv = source(LAYERS, SLOTS, 3, layers[0].channels, dtype=BF16)
    state = new_delta_states(LAYERS, SLOTS, VALUE_HEADS, DK, DV, device)
    state.copy_(source(*state.shape))
    others = [slot for slot in range(SLOTS) if slot not in slots]
    conv[:, others], state[:, others] = NAN, NAN
    starts = [0, *accumulate(len(tree) for tree in trees)]
    parents = [p if p < 0 else start + p for start, tree in zip(starts, trees, strict=False) for p in tree]
    row_slots = [slot for slot, tree in zip(slots, trees, strict=True) for _ in tree]
    ints = (parents + [PADDING] * padding, row_slots + [slots[0]] * padding, slots, starts)
    batch = [int32(part, device) for part in ints]
    rows = len(parents) + padding
    x, plan = source(rows, HIDDEN), plan_trees(batch[0], batch[1])
    x[len(parents) :] = NAN
    kept = []
    for projected, qkv, passed in new_delta_rows(layers, max(rows, LONG_PASS)):
        assert passed is not None
        passed.state.fill_(NAN)
        kept.append((projected[:rows], qkv[:rows], passed))
    for i, layer in enumerate(layers):
        delta_layer(layer, x, *batch, conv[i], state[i], plan, kept[i])
    return Pass(layers, kept, conv, state, slots, starts[:-1])


def assert_commits_agree(got: list[Tensor], expected: list[Tensor]) -> None:
    for part, other in zip(got, expected, strict=True):
        assert_same_bits(part, other)


# Trees, padding, and whose chain is long.
PASSES = {
    "alone": ([chain(LENGTH)], 0, 0),
    "beside others": ([[-1], chain(LENGTH), TREE], 0, 1),
    "padded": ([chain(LENGTH)], LENGTH - 3, 0),
}


@pytest.mark.parametrize("num_left", [0, 1])
@pytest.mark.parametrize("case", PASSES)
def test_a_chain_kept_to_its_end_is_not_walked_again(case: str, num_left: int, device: torch.device) -> None:
    trees, padding, seq = PASSES[case]
    done = forward(device, trees, padding)
    first = done.starts[seq]
    assert done.passed_row == first + LENGTH - 2
    paths = [[0], [], [0, 2]][: len(trees)]
    paths[seq] = list(range(LENGTH - num_left))
    expected = done.commit(paths, from_passed=False)
    for _, qkv, _ in done.kept:  # a commit that walks these rows shows it
        qkv[first : first + LENGTH - 1] = NAN
    assert_commits_agree(done.commit(paths, from_passed=True), expected)


@pytest.mark.parametrize("cuts", [[3], [LENGTH - 2], [1, LENGTH - 1]])
def test_a_commit_in_parts_is_a_whole_one(cuts: list[int], device: torch.device) -> None:
    done = forward(device, [[-1], chain(LENGTH)])
    spans = pairwise([0, *cuts, LENGTH])
    parts = [[[0] if first == 0 else [], list(range(first, end))] for first, end in spans]
    expected = done.commit([[0], list(range(LENGTH))], from_passed=False)
    assert_commits_agree(done.commit(*parts, from_passed=True), expected)


@pytest.mark.parametrize("count", [1, LENGTH - 2])
def test_a_chain_kept_in_part_is_walked(count: int, device: torch.device) -> None:
    done = forward(device, [chain(LENGTH), [-1]])
    paths: list[list[int]] = [list(range(count)), []]
    expected = done.commit(paths, from_passed=False)
    for _, qkv, passed in done.kept:
        passed.state.fill_(NAN)
        qkv[count:] = NAN
    assert_commits_agree(done.commit(paths, from_passed=True), expected)


@pytest.mark.parametrize(
    ("trees", "padding"),
    [
        ([chain(4), chain(4)], 0),  # neither has more than half of the rows
        ([chain(4)], 4),
        ([[-1, 0, 0, *range(2, 8)]], 0),  # a long branch, which is not all of its path
    ],
)
def test_no_chain_is_long(trees: list[list[int]], padding: int, device: torch.device) -> None:
    assert forward(device, trees, padding).passed_row == -1


def test_short_passes_keep_no_state(device: torch.device) -> None:
    assert new_delta_rows([delta(Source(device, 0))], LONG_PASS - 1)[0][2] is None
