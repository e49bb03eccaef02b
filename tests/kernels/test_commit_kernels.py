# SPDX-License-Identifier: Apache-2.0
"""Kernels that write state: exactly the accepted rows, in the right places, and nothing else."""

import pytest
import tandem_kernels as kernels
import torch
from fakes.bits import assert_same_bits
from tandem_kernels.gated_delta import gated_delta_reference
from torch import Tensor

SLOTS = torch.tensor([4, 0], dtype=torch.int32)
UNTOUCHED = [1, 2, 3]
NUM_SLOTS, NUM_ROWS = 5, 9


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _paths(*paths: list[int]) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([0, *(len(path) for path in paths)]).cumsum(0)
    return starts.int(), torch.tensor([row for path in paths for row in path], dtype=torch.int32)


def test_store_kv_copies_rows_to_their_places() -> None:
    blocks, heads, block, dim = 5, 2, 4, 7
    k_cache, v_cache = (torch.full((blocks, heads, block, dim), float("nan")) for _ in range(2))
    k_new, wide = _randn(NUM_ROWS, heads, dim), _randn(NUM_ROWS, heads * dim + 3, seed=1)
    v_new = wide[:, 2 : 2 + heads * dim]
    rows, places = torch.tensor([8, 0, 3], dtype=torch.int32), torch.tensor([3, 19, 8])
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for row, place in zip(rows.tolist(), places.tolist(), strict=True):
        expected_k[place // block, :, place % block] = k_new[row]
        expected_v[place // block, :, place % block] = v_new[row].reshape(heads, dim)
    kernels.store_kv(k_new, v_new, k_cache, v_cache, rows, places)
    assert_same_bits(k_cache, expected_k)
    assert_same_bits(v_cache, expected_v)


@pytest.mark.parametrize("taps", [2, 4, 16])
@pytest.mark.parametrize("num_accepted", range(1, 7))
def test_update_conv_state_keeps_the_newest_inputs(taps: int, num_accepted: int) -> None:
    channels = 21
    x = _randn(NUM_ROWS, channels + 4)[:, 1 : 1 + channels]
    state = _randn(NUM_SLOTS, taps - 1, channels, seed=1)
    paths = [list(range(num_accepted)), [7]]
    expected = state.clone()
    for slot, path in zip(SLOTS.tolist(), paths, strict=True):
        expected[slot] = torch.cat([state[slot], x[path]])[1 - taps :]
    kernels.update_conv_state(x, state, SLOTS, *_paths(*paths))
    assert_same_bits(state, expected)


class TestGatedDeltaCommit:
    key_heads, value_heads, dk, dv = 2, 4, 12, 21

    def setup_method(self) -> None:
        channels = 2 * self.key_heads * self.dk + self.value_heads * self.dv
        self.rows = (_randn(NUM_ROWS, channels), 2 * _randn(NUM_ROWS, 2 * self.value_heads, seed=1))
        self.vectors = (_randn(self.value_heads, seed=2), _randn(self.value_heads, seed=3))
        self.state = _randn(NUM_SLOTS, self.value_heads, self.dk, self.dv, seed=4)

    def commit(self, state: Tensor, slots: Tensor, *paths: list[int]) -> Tensor:
        state = state.clone()
        kernels.gated_delta_commit(*self.rows, *self.vectors, state, slots, *_paths(*paths), self.key_heads)
        return state

    def test_near_the_float64_reference(self) -> None:
        path = [0, 2, 3, 7]
        got = self.commit(self.state, SLOTS[:1], path)[SLOTS[0]]
        chain = torch.arange(-1, len(path) - 1, dtype=torch.int32)
        starts = torch.tensor([0, len(path)], dtype=torch.int32)
        rows = [part[path].double() for part in self.rows]
        _, states = gated_delta_reference(*rows, *self.vectors, self.state, SLOTS[:1], starts, chain, self.key_heads)
        # As for the outputs in tree_cases: a chain of roundings of different sizes, bounded by ten times what is seen.
        assert (got - states[-1]).abs().max() <= 4e-6 * states[-1].abs().max()

    def test_at_once_equals_one_by_one(self) -> None:
        paths = [[0, 2, 3, 7], [8]]
        one_by_one = self.state
        for slot, path in zip(SLOTS.split(1), paths, strict=True):
            for row in path:
                one_by_one = self.commit(one_by_one, slot, [row])
        assert_same_bits(self.commit(self.state, SLOTS, *paths), one_by_one)

    def test_other_slots_and_rows_do_not_matter(self) -> None:
        expected = self.commit(self.state, SLOTS, [1, 4], [6])
        for part in self.rows:
            part[[0, 2, 3, 5, 7, 8]] = float("nan")
        self.state[UNTOUCHED] = float("nan")
        got = self.commit(self.state, SLOTS, [1, 4], [6])
        assert_same_bits(got[SLOTS.long()], expected[SLOTS.long()])
        assert got[UNTOUCHED].isnan().all()

    def test_leaves_other_slots_alone(self) -> None:
        got = self.commit(self.state, SLOTS, [1, 4], [6])
        assert_same_bits(got[UNTOUCHED], self.state[UNTOUCHED])
