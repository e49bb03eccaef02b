# SPDX-License-Identifier: Apache-2.0
"""Residual blocks have the bits of their ops called one after the other."""

from collections.abc import Callable

import pytest
import torch
from fakes.bits import assert_same_bits
from tandem_kernels import (
    AttentionLayer,
    DeltaLayer,
    MlpLayer,
    MtpLayer,
    attention_layer,
    commit_delta_layers,
    delta_layer,
    gated_delta_commit,
    mlp_layer,
    mtp_layer,
    pack_weight,
    update_conv_state,
)
from tandem_kernels.layers import attention_layer_by_ops, delta_layer_by_ops, mlp_layer_by_ops, mtp_layer_by_ops
from torch import Tensor

HIDDEN, BLOCK = 40, 16
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 20
ROWS = [1, 2, 5, 17]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def chain(rows: int) -> Tensor:
    return int32(list(range(-1, rows - 1)))


def random_attention_layer(is_gated: bool) -> AttentionLayer:
    width = (HEADS * (2 if is_gated else 1) + 2 * KV_HEADS) * HEAD_DIM
    return AttentionLayer(
        norm=torch.rand(HIDDEN),
        input=pack_weight(torch.randn(width, HIDDEN) * 0.2),
        output=pack_weight(torch.randn(HIDDEN, HEADS * HEAD_DIM) * 0.2),
        q_norm=torch.rand(HEAD_DIM) if is_gated else None,
        k_norm=torch.rand(HEAD_DIM) if is_gated else None,
        cos=torch.randn(64, 4),
        sin=torch.randn(64, 4),
        heads=HEADS,
        kv_heads=KV_HEADS,
        dim=HEAD_DIM,
        is_gated=is_gated,
        eps=1e-6,
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_earlier", [0, 3])
def test_attention_layer_equals_its_ops(rows: int, is_gated: bool, num_earlier: int) -> None:
    torch.manual_seed(rows)
    kv_heads, dim, total = KV_HEADS, HEAD_DIM, num_earlier + rows
    layer = random_attention_layer(is_gated)
    x = torch.randn(rows, HIDDEN)
    earlier = torch.randn(2, num_earlier, kv_heads, dim)
    caches = torch.randn(2, 4, kv_heads, BLOCK, dim)
    positions = int32([20 + num_earlier + row for row in range(rows)])

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        keys, values = torch.full((2, total, kv_heads, dim), float("nan"))
        keys[:num_earlier], values[:num_earlier] = earlier
        batch = (positions, chain(total), int32([0] * total), int32([20]), int32([3, 1]).reshape(1, 2))
        out = function(layer, x, keys, values, *batch, *caches)
        return [out, keys, values]

    for block, ops in zip(run(attention_layer), run(attention_layer_by_ops), strict=True):
        assert_same_bits(block, ops)


def random_delta_layer() -> DeltaLayer:
    key_heads, value_heads, dk, dv, taps = 2, 4, 12, 20, 4
    channels, value_dim = 2 * key_heads * dk + value_heads * dv, value_heads * dv
    return DeltaLayer(
        norm=torch.rand(HIDDEN),
        input=pack_weight(torch.randn(channels + value_dim + 2 * value_heads, HIDDEN) * 0.2),
        output=pack_weight(torch.randn(HIDDEN, value_dim) * 0.2),
        conv=torch.randn(taps, channels),
        a_log=torch.rand(value_heads),
        dt_bias=torch.rand(value_heads),
        out_norm=torch.rand(dv),
        key_heads=key_heads,
        value_heads=value_heads,
        dk=dk,
        dv=dv,
        eps=1e-6,
    )


@pytest.mark.parametrize("rows", ROWS)
def test_delta_layer_equals_its_ops(rows: int) -> None:
    torch.manual_seed(rows)
    layer = random_delta_layer()
    value_heads, dk, dv = layer.value_heads, layer.dk, layer.dv
    channels, taps = layer.channels, layer.conv.shape[0]
    x, conv_state = torch.randn(rows, HIDDEN), torch.randn(3, taps - 1, channels)
    delta_state = torch.randn(3, value_heads, dk, dv)
    args = (layer, x, chain(rows), int32([1] * rows), int32([1]), int32([0, rows]), conv_state, delta_state)
    for block, ops in zip(delta_layer(*args), delta_layer_by_ops(*args), strict=True):
        assert_same_bits(block, ops)


@pytest.mark.parametrize("rows", ROWS)
def test_mlp_layer_equals_its_ops(rows: int) -> None:
    torch.manual_seed(rows)
    width = 72
    layer = MlpLayer(
        norm=torch.rand(HIDDEN),
        gate_up=pack_weight(torch.randn(2 * width, HIDDEN).bfloat16()),
        down=pack_weight(torch.randn(HIDDEN, width).bfloat16()),
        eps=1e-6,
    )
    x = torch.randn(rows, HIDDEN)
    assert_same_bits(mlp_layer(layer, x), mlp_layer_by_ops(layer, x))


def test_committing_layers_together_equals_one_by_one() -> None:
    torch.manual_seed(0)
    layers, rows, num_slots = [random_delta_layer() for _ in range(3)], 6, 4
    first = layers[0]
    width = first.input.num_outputs
    projected = [torch.randn(rows, width) for _ in layers]
    qkv = [torch.randn(rows, first.channels) for _ in layers]
    conv = [torch.randn(num_slots, first.conv.shape[0] - 1, first.channels) for _ in layers]
    delta = [torch.randn(num_slots, first.value_heads, first.dk, first.dv) for _ in layers]
    path = (int32([2, 0]), int32([0, 3, 5]), int32([0, 1, 3, 4, 5]))
    together = [[part.clone() for part in conv], [part.clone() for part in delta]]
    commit_delta_layers(layers, projected, qkv, *together, *path)
    for i, layer in enumerate(layers):
        ab = projected[i][:, width - 2 * layer.value_heads :]
        gated_delta_commit(qkv[i], ab, layer.a_log, layer.dt_bias, delta[i], *path, key_heads=layer.key_heads)
        update_conv_state(projected[i], conv[i], *path)
        assert_same_bits(together[0][i], conv[i])
        assert_same_bits(together[1][i], delta[i])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mtp_layer_equals_its_ops(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    width, vocab = 24, 50
    mlp = MlpLayer(
        norm=torch.rand(HIDDEN),
        gate_up=pack_weight(torch.randn(2 * width, HIDDEN)),
        down=pack_weight(torch.randn(HIDDEN, width)),
        eps=1e-6,
    )
    layer = MtpLayer(
        embedding=torch.randn(vocab, HIDDEN).to(dtype),
        embedding_norm=torch.rand(HIDDEN),
        hidden_norm=torch.rand(HIDDEN),
        fc=pack_weight(torch.randn(HIDDEN, 2 * HIDDEN).to(dtype)),
        attention=random_attention_layer(is_gated=True),
        mlp=mlp,
        out_norm=torch.rand(HIDDEN),
        head=pack_weight(torch.randn(vocab, HIDDEN)),
        eps=1e-6,
    )
    token_ids, hidden = torch.randint(vocab, (rows,)), torch.randn(rows, HIDDEN)
    caches = torch.randn(2, 4, KV_HEADS, BLOCK, HEAD_DIM)
    batch = (
        int32(list(range(20, 20 + rows))),
        chain(rows),
        int32([0] * rows),
        int32([20]),
        int32([3, 1]).reshape(1, 2),
    )

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        keys, values = torch.full((2, rows, KV_HEADS, HEAD_DIM), float("nan"))
        return [function(layer, token_ids, hidden, keys, values, *batch, *caches), keys, values]

    for block, ops in zip(run(mtp_layer), run(mtp_layer_by_ops), strict=True):
        assert_same_bits(block, ops)
