# SPDX-License-Identifier: Apache-2.0
"""Residual blocks have the bits of their ops called one after the other."""

from collections.abc import Callable

import pytest
import torch
from fakes.bits import assert_same_bits
from tandem_kernels import AttentionLayer, DeltaLayer, MlpLayer, attention_layer, delta_layer, mlp_layer, pack_weight
from tandem_kernels.layers import attention_layer_by_ops, delta_layer_by_ops, mlp_layer_by_ops
from torch import Tensor

HIDDEN, BLOCK = 40, 16
ROWS = [1, 2, 5, 17]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def chain(rows: int) -> Tensor:
    return int32(list(range(-1, rows - 1)))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_earlier", [0, 3])
def test_attention_layer_equals_its_ops(rows: int, is_gated: bool, num_earlier: int) -> None:
    torch.manual_seed(rows)
    heads, kv_heads, dim, total = 6, 2, 20, num_earlier + rows
    width = (heads * (2 if is_gated else 1) + 2 * kv_heads) * dim
    layer = AttentionLayer(
        norm=torch.rand(HIDDEN),
        input=pack_weight(torch.randn(width, HIDDEN) * 0.2),
        output=pack_weight(torch.randn(HIDDEN, heads * dim) * 0.2),
        q_norm=torch.rand(dim) if is_gated else None,
        k_norm=torch.rand(dim) if is_gated else None,
        cos=torch.randn(64, 4),
        sin=torch.randn(64, 4),
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        is_gated=is_gated,
        eps=1e-6,
    )
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


@pytest.mark.parametrize("rows", ROWS)
def test_delta_layer_equals_its_ops(rows: int) -> None:
    torch.manual_seed(rows)
    key_heads, value_heads, dk, dv, taps = 2, 4, 12, 20, 4
    channels, value_dim = 2 * key_heads * dk + value_heads * dv, value_heads * dv
    layer = DeltaLayer(
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
