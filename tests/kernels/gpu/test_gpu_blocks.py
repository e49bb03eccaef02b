# SPDX-License-Identifier: Apache-2.0
"""Residual blocks on the GPU have the bits of their ops called one after the other; commit of all layers, of each."""

from collections.abc import Callable

import pytest
import torch
from fakes.bits import assert_same_bits
from gpu_cases import BF16, Source
from tandem_kernels import (
    AttentionLayer,
    DeltaLayer,
    MlpLayer,
    MtpLayer,
    attention_layer,
    commit_delta_layers,
    delta_layer,
    mlp_layer,
    mtp_layer,
    new_delta_rows,
    pack_weight,
)
from tandem_kernels.device import IS_INTERPRETED
from tandem_kernels.layers import attention_layer_by_ops, delta_layer_by_ops, mlp_layer_by_ops, mtp_layer_by_ops
from tandem_kernels.state_memory import new_delta_states
from torch import Tensor

HIDDEN, WIDTH, VOCAB, PAGE = (40, 24, 50, 16) if IS_INTERPRETED else (2560, 9216, 5003, 64)
HEADS, KV_HEADS, HEAD_DIM = (4, 2, 20) if IS_INTERPRETED else (16, 4, 256)
KEY_HEADS, VALUE_HEADS, DK, DV = (1, 2, 12, 20) if IS_INTERPRETED else (16, 32, 128, 128)
ROWS = [1, 3] if IS_INTERPRETED else [1, 2, 17, 64, 100]
NUM_EARLIER = 3


def attention(source: Source, *, is_gated: bool) -> AttentionLayer:
    width = (HEADS * (2 if is_gated else 1) + 2 * KV_HEADS) * HEAD_DIM
    return AttentionLayer(
        norm=1 + 0.1 * source(HIDDEN),
        input=pack_weight(source.weight(width, HIDDEN)),
        output=pack_weight(source.weight(HIDDEN, HEADS * HEAD_DIM)),
        q_norm=1 + 0.1 * source(HEAD_DIM) if is_gated else None,
        k_norm=1 + 0.1 * source(HEAD_DIM) if is_gated else None,
        cos=source(512, 4),
        sin=source(512, 4),
        heads=HEADS,
        kv_heads=KV_HEADS,
        dim=HEAD_DIM,
        is_gated=is_gated,
        eps=1e-6,
    )


def delta(source: Source) -> DeltaLayer:
    channels, value_dim = 2 * KEY_HEADS * DK + VALUE_HEADS * DV, VALUE_HEADS * DV
    return DeltaLayer(
        norm=1 + 0.1 * source(HIDDEN),
        input=pack_weight(source.weight(channels + value_dim + 2 * VALUE_HEADS, HIDDEN)),
        output=pack_weight(source.weight(HIDDEN, value_dim)),
        conv=source(4, channels),
        a_log=source(VALUE_HEADS),
        dt_bias=source(VALUE_HEADS),
        out_norm=1 + 0.1 * source(DV),
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        dk=DK,
        dv=DV,
        eps=1e-6,
    )


def mlp(source: Source) -> MlpLayer:
    return MlpLayer(
        norm=1 + 0.1 * source(HIDDEN),
        gate_up=pack_weight(source.weight(2 * WIDTH, HIDDEN)),
        down=pack_weight(source.weight(HIDDEN, WIDTH)),
        eps=1e-6,
    )


def int32(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def chain(rows: int) -> list[int]:
    return list(range(-1, rows - 1))


def batch(rows: int, earlier: int, device: torch.device) -> tuple[Tensor, ...]:
    """Positions, parents, row_seqs, prefix_lens, block_tables of a chain behind 20 positions."""
    total = earlier + rows
    tables = int32(list(range(6)), device).reshape(1, -1)
    positions = int32([20 + earlier + row for row in range(rows)], device)
    return positions, int32(chain(total), device), int32([0] * total, device), int32([20], device), tables


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("earlier", [0, NUM_EARLIER])
def test_attention_layer_equals_its_ops(rows: int, is_gated: bool, earlier: int, device: torch.device) -> None:
    source = Source(device, rows)
    layer, x = attention(source, is_gated=is_gated), source(rows, HIDDEN)
    before = source(2, earlier, KV_HEADS, HEAD_DIM, dtype=BF16)
    caches = source(2, 6, KV_HEADS, PAGE, HEAD_DIM, dtype=BF16)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        keys, values = torch.full((2, earlier + rows, KV_HEADS, HEAD_DIM), float("nan"), dtype=BF16, device=device)
        keys[:earlier], values[:earlier] = before
        return [function(layer, x, keys, values, *batch(rows, earlier, device), *caches), keys, values]

    for block, ops in zip(run(attention_layer), run(attention_layer_by_ops), strict=True):
        assert_same_bits(block, ops)


@pytest.mark.parametrize("rows", ROWS)
def test_delta_layer_equals_its_ops(rows: int, device: torch.device) -> None:
    source = Source(device, rows)
    layer, x = delta(source), source(rows, HIDDEN)
    conv = source(3, 3, layer.channels, dtype=BF16)
    state = source(3, VALUE_HEADS, DK, DV)
    trees = (chain(rows), [1] * rows, [1], [0, rows])
    args = (layer, x, *(int32(part, device) for part in trees), conv, state)
    block, ops = delta_layer(*args), delta_layer_by_ops(*args)
    assert_same_bits(block[0], ops[0])
    assert_same_bits(block[1], ops[1])


@pytest.mark.parametrize("rows", ROWS)
def test_mlp_layer_equals_its_ops(rows: int, device: torch.device) -> None:
    source = Source(device, rows)
    layer, x = mlp(source), source(rows, HIDDEN)
    assert_same_bits(mlp_layer(layer, x), mlp_layer_by_ops(layer, x))


@pytest.mark.parametrize("rows", ROWS)
def test_mtp_layer_equals_its_ops(rows: int, device: torch.device) -> None:
    source = Source(device, rows)
    layer = MtpLayer(
        embedding=source.weight(VOCAB, HIDDEN),
        embedding_norm=1 + 0.1 * source(HIDDEN),
        hidden_norm=1 + 0.1 * source(HIDDEN),
        fc=pack_weight(source.weight(HIDDEN, 2 * HIDDEN)),
        attention=attention(source, is_gated=True),
        mlp=mlp(source),
        out_norm=1 + 0.1 * source(HIDDEN),
        head=pack_weight(source.weight(VOCAB, HIDDEN)),
        eps=1e-6,
    )
    token_ids = torch.randint(VOCAB, (rows,), generator=source.generator).to(device)
    hidden = source(rows, HIDDEN, dtype=BF16)
    caches = source(2, 6, KV_HEADS, PAGE, HEAD_DIM, dtype=BF16)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        keys, values = torch.full((2, rows, KV_HEADS, HEAD_DIM), float("nan"), dtype=BF16, device=device)
        return [function(layer, token_ids, hidden, keys, values, *batch(rows, 0, device), *caches), keys, values]

    for block, ops in zip(run(mtp_layer), run(mtp_layer_by_ops), strict=True):
        assert_same_bits(block, ops)


def test_committing_layers_together_equals_one_by_one(device: torch.device) -> None:
    source, slots, rows = Source(device, 0), 4, 6
    layers = [delta(source) for _ in range(3)]
    conv = source(3, slots, 3, layers[0].channels, dtype=BF16)
    state = new_delta_states(3, slots, VALUE_HEADS, DK, DV, device)
    state.copy_(source(*state.shape))
    kept = new_delta_rows(layers, rows)
    trees = ([-1, 0, 1, -1, 3, -1], [2, 2, 2, 0, 0, 1], [2, 0, 1], [0, 3, 5, 6])
    for layer, part, old, matrix in zip(layers, kept, conv, state, strict=True):
        delta_layer(layer, source(rows, HIDDEN), *(int32(ints, device) for ints in trees), old, matrix, None, part)
    # The third sequence keeps nothing.
    path = (int32([2, 0, 1], device), int32([0, 2, 4, 4], device), int32([0, 1, 3, 4], device))
    together = [conv.clone(), torch.empty_like(state).copy_(state)]
    projected, qkv, _ = zip(*kept, strict=True)
    commit_delta_layers(layers, projected, qkv, together[0].unbind(), together[1].unbind(), *path)
    for i, layer in enumerate(layers):
        alone = [conv[i].clone(), torch.empty_like(state[i]).copy_(state[i])]
        commit_delta_layers([layer], [projected[i].clone()], [qkv[i].clone()], alone[:1], alone[1:], *path)
        assert_same_bits(together[0][i], alone[0])
        assert_same_bits(together[1][i], alone[1])
        assert_same_bits(together[1][i][[1, 3]], state[i][[1, 3]])
        assert not torch.equal(together[1][i][2], state[i][2])
