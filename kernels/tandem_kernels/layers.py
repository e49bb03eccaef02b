# SPDX-License-Identifier: Apache-2.0
"""Residual blocks of a decoder layer: ops put together so that a device can run a whole block at once.

Each block has the bits of its ops called one after the other; the `*_by_ops` twins say in which order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem_kernels.attention import attention
from tandem_kernels.causal_conv import causal_conv
from tandem_kernels.device import implementation, row_dtype
from tandem_kernels.gate_mul import gate_mul
from tandem_kernels.gated_delta import gated_delta
from tandem_kernels.linear import linear
from tandem_kernels.packed_weight import PackedWeight
from tandem_kernels.rms_norm import gated_rms_norm, rms_norm
from tandem_kernels.rope import rope
from tandem_kernels.state_memory import PassedState
from tandem_kernels.tree_plan import TreePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """Weights and sizes of a block of grouped-query attention."""

    norm: Tensor  # [hidden] float32, of the block's input
    input: PackedWeight  # rows: queries, output gates (if gated), keys, values
    output: PackedWeight
    q_norm: Tensor | None  # [dim] float32
    k_norm: Tensor | None
    cos: Tensor  # [max_position, rotated_dims / 2] float32
    sin: Tensor
    heads: int
    kv_heads: int
    dim: int
    is_gated: bool
    eps: float
    handle: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", implementation(self.norm).attention_handle(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayer:
    """Weights and sizes of a block of Gated DeltaNet."""

    norm: Tensor  # [hidden] float32, of the block's input
    input: PackedWeight  # rows: convolution inputs (queries, keys, values), output gates, a, b
    output: PackedWeight
    conv: Tensor  # [taps, channels] float32
    a_log: Tensor  # [value_heads] float32
    dt_bias: Tensor
    out_norm: Tensor  # [dv] float32
    key_heads: int
    value_heads: int
    dk: int
    dv: int
    eps: float
    handle: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", implementation(self.norm).delta_handle(self))

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.dk + self.value_heads * self.dv


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpLayer:
    """Weights of a SwiGLU block."""

    norm: Tensor  # [hidden] float32, of the block's input
    gate_up: PackedWeight  # rows: gate, up
    down: PackedWeight
    eps: float
    handle: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", implementation(self.norm).mlp_handle(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayer:
    """Weights of a multi-token-prediction head: one decoder layer over a token and a hidden state."""

    embedding: Tensor  # [vocab, hidden], contiguous, bfloat16 or float32
    embedding_norm: Tensor  # [hidden] float32
    hidden_norm: Tensor
    fc: PackedWeight  # inputs: normed embedding, normed hidden state
    attention: AttentionLayer
    mlp: MlpLayer
    out_norm: Tensor
    head: PackedWeight
    eps: float
    handle: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", implementation(self.out_norm).mtp_handle(self))


def attention_layer(
    layer: AttentionLayer,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    parents: Tensor,
    row_seqs: Tensor,
    prefix_lens: Tensor,
    block_tables: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    trees: TreePlan | None = None,
) -> Tensor:
    """x + attention(norm(x)). x: [rows, hidden] float32 contiguous, the last rows of the pass.

    keys, values: [all rows, kv_heads, dim] float32 contiguous: earlier rows' are read, those of x's rows written;
    positions: [rows] int32; parents, row_seqs: [all rows] int32. The rest as in `attention`. Returns [rows, hidden].
    """
    return implementation(x).attention_layer(
        layer,
        x,
        keys,
        values,
        positions,
        parents,
        row_seqs,
        prefix_lens,
        block_tables,
        k_cache,
        v_cache,
        trees,
    )


def attention_layer_by_ops(
    layer: AttentionLayer,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    parents: Tensor,
    row_seqs: Tensor,
    prefix_lens: Tensor,
    block_tables: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """`attention_layer` op by op, with the same bits."""
    query_dim, kv_dim = layer.heads * layer.dim, layer.kv_heads * layer.dim
    key_start = 2 * query_dim if layer.is_gated else query_dim
    first = keys.shape[0] - x.shape[0]
    projected = linear(rms_norm(x, layer.norm, layer.eps), layer.input).to(row_dtype(x.device))
    args = (layer.eps, layer.cos, layer.sin, positions, layer.dim)
    q = rope(projected[:, :query_dim], layer.q_norm, *args)
    keys[first:] = rope(projected[:, key_start : key_start + kv_dim], layer.k_norm, *args)
    values[first:] = projected[:, key_start + kv_dim :].unflatten(1, (layer.kv_heads, layer.dim))
    scale = layer.dim**-0.5
    mixed = attention(q, keys, values.flatten(1), k_cache, v_cache, block_tables, prefix_lens, parents, row_seqs, scale)
    if layer.is_gated:
        mixed = gate_mul(mixed, projected[:, query_dim:key_start], silu=False)
    return linear(mixed, layer.output, x)


def delta_layer(
    layer: DeltaLayer,
    x: Tensor,
    parents: Tensor,
    row_slots: Tensor,
    slots: Tensor,
    seq_starts: Tensor,
    conv_state: Tensor,
    delta_state: Tensor,
    trees: TreePlan | None = None,
    kept: tuple[Tensor, Tensor, PassedState | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta(norm(x)). x: [rows, hidden] float32 contiguous; the rest as in `causal_conv` and `gated_delta`.

    Returns [rows, hidden], and for commit the projection [rows, input outputs] and the convolved qkv [rows, channels]
    in the tensors `kept` where given (`new_delta_rows` makes them; on the GPU qkv is normalised, and wider).
    """
    return implementation(x).delta_layer(
        layer, x, parents, row_slots, slots, seq_starts, conv_state, delta_state, trees, kept
    )


def delta_layer_by_ops(
    layer: DeltaLayer,
    x: Tensor,
    parents: Tensor,
    row_slots: Tensor,
    slots: Tensor,
    seq_starts: Tensor,
    conv_state: Tensor,
    delta_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`delta_layer` op by op, with the same bits."""
    gate_start = layer.channels
    ab_start = gate_start + layer.value_heads * layer.dv
    projected = linear(rms_norm(x, layer.norm, layer.eps), layer.input).to(row_dtype(x.device))
    qkv = causal_conv(projected, conv_state, layer.conv, parents, row_slots)
    ab = projected[:, ab_start:]
    mixed = gated_delta(qkv, ab, layer.a_log, layer.dt_bias, delta_state, slots, seq_starts, parents, layer.key_heads)
    mixed = gated_rms_norm(mixed, projected[:, gate_start:ab_start], layer.out_norm, layer.eps)
    return linear(mixed, layer.output, x), projected, qkv


def commit_delta_layers(
    layers: Sequence[DeltaLayer],
    projected: Sequence[Tensor],
    qkv: Sequence[Tensor],
    conv_states: Sequence[Tensor],
    delta_states: Sequence[Tensor],
    slots: Tensor,
    path_starts: Tensor,
    path_rows: Tensor,
    passed: Sequence[PassedState] | None = None,
) -> None:
    """`gated_delta_commit` and `update_conv_state` for several layers of equal sizes, at once; tensors by layer.

    A path that ends in the row of `passed`, or one row later, goes on from that state: the bits are the same.
    """
    implementation(slots).commit_delta_layers(
        layers, projected, qkv, conv_states, delta_states, slots, path_starts, path_rows, passed
    )


def mlp_layer(layer: MlpLayer, x: Tensor) -> Tensor:
    """x + down(silu(gate) * up), gate and up of norm(x). x: [rows, hidden] float32 contiguous. Returns the same."""
    return implementation(x).mlp_layer(layer, x)


def mlp_layer_by_ops(layer: MlpLayer, x: Tensor) -> Tensor:
    """`mlp_layer` op by op, with the same bits."""
    both = linear(rms_norm(x, layer.norm, layer.eps), layer.gate_up)
    width = both.shape[1] // 2
    return linear(gate_mul(both[:, width:], both[:, :width], silu=True), layer.down, x)


def mtp_layer(
    layer: MtpLayer,
    token_ids: Tensor,
    hidden: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    parents: Tensor,
    row_seqs: Tensor,
    prefix_lens: Tensor,
    block_tables: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    trees: TreePlan | None = None,
) -> Tensor:
    """norm(layer(fc([norm(embed(token)), norm(hidden)]))).

    token_ids: [rows] int64; hidden: [rows, hidden] float32 contiguous; the rest as in `attention_layer`.
    Returns [rows, hidden].
    """
    batch = (positions, parents, row_seqs, prefix_lens, block_tables)
    return implementation(hidden).mtp_layer(layer, token_ids, hidden, keys, values, *batch, k_cache, v_cache, trees)


def mtp_layer_by_ops(
    layer: MtpLayer,
    token_ids: Tensor,
    hidden: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    parents: Tensor,
    row_seqs: Tensor,
    prefix_lens: Tensor,
    block_tables: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """`mtp_layer` op by op, with the same bits."""
    embedded = rms_norm(layer.embedding[token_ids].float(), layer.embedding_norm, layer.eps)
    x = linear(torch.cat([embedded, rms_norm(hidden, layer.hidden_norm, layer.eps)], dim=1), layer.fc)
    batch = (positions, parents, row_seqs, prefix_lens, block_tables)
    x = attention_layer_by_ops(layer.attention, x, keys, values, *batch, k_cache, v_cache)
    return rms_norm(mlp_layer_by_ops(layer.mlp, x), layer.out_norm, layer.eps)


def mtp_guess(layer: MtpLayer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token after each row of hidden [rows, hidden]: ids [rows] int32, log-probabilities [rows]."""
    return implementation(hidden).mtp_guess(layer, hidden)
