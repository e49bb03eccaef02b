# SPDX-License-Identifier: Apache-2.0
"""Whole residual blocks: the ops of `layers.py`'s twins, some of them joined in one kernel, with the same bits."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem_kernels.embed import embed
from tandem_kernels.gpu.attention import attention
from tandem_kernels.gpu.choice import argmax
from tandem_kernels.gpu.conv import prepare, update_conv_states
from tandem_kernels.gpu.delta import commit, walk
from tandem_kernels.gpu.linear import linear
from tandem_kernels.gpu.rowwise import gated_rms_norm, rms_norm, rope_queries_keys
from tandem_kernels.gpu.trees import plan_trees
from tandem_kernels.state_memory import PassedState
from tandem_kernels.tree_plan import TreePlan

if TYPE_CHECKING:
    from tandem_kernels.layers import AttentionLayer, DeltaLayer, MlpLayer, MtpLayer

BF16 = torch.bfloat16


def attention_handle(layer: "AttentionLayer") -> None:
    """Blocks here read the layer itself. Raises ValueError for sizes that the kernels don't have."""
    if layer.dim > 256 or layer.heads % layer.kv_heads or layer.heads // layer.kv_heads > 16:
        raise ValueError(
            f"heads of {layer.dim} dims, {layer.heads} for {layer.kv_heads} key heads: the GPU's attention takes "
            "up to 256 dims and 1 to 16 query heads a key head"
        )


def delta_handle(layer: "DeltaLayer") -> None:
    if max(layer.dk, layer.dv) > 256:
        raise ValueError(f"delta heads of {layer.dk} x {layer.dv}: the GPU's delta rule takes up to 256")


def mlp_handle(layer: "MlpLayer") -> None:
    pass


def mtp_handle(layer: "MtpLayer") -> None:
    pass


def attention_layer(
    layer: "AttentionLayer",
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
    query_dim = layer.heads * layer.dim
    key_start = 2 * query_dim if layer.is_gated else query_dim
    first = keys.shape[0] - x.shape[0]
    projected = linear(rms_norm(x, layer.norm, layer.eps), layer.input, dtype=BF16)
    norms = (layer.q_norm, layer.k_norm, layer.eps, layer.cos, layer.sin)
    q = rope_queries_keys(projected, *norms, positions, keys[first:], values[first:], layer.heads, key_start)
    mixed = attention(
        q,
        keys,
        values.flatten(1),
        k_cache,
        v_cache,
        block_tables,
        prefix_lens,
        parents,
        row_seqs,
        layer.dim**-0.5,
        trees,
        projected[:, query_dim:key_start] if layer.is_gated else None,
    )
    return linear(mixed, layer.output, x)


def delta_layer(
    layer: "DeltaLayer",
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
    """As the block. A plan made here tells sequences apart by their slots."""
    trees = trees or plan_trees(parents, row_slots)
    out_rows, out_qkv, passed = kept or (None, None, None)
    sizes = (layer.key_heads, layer.value_heads, layer.dk, layer.dv)
    gate_start = layer.channels
    ab_start = gate_start + layer.value_heads * layer.dv
    projected = linear(rms_norm(x, layer.norm, layer.eps), layer.input, dtype=BF16, out=out_rows)
    conv = (conv_state, layer.conv, parents, row_slots)
    qkv = prepare(projected, conv, projected[:, ab_start:], layer.a_log, layer.dt_bias, sizes, out_qkv)
    mixed = walk(qkv, delta_state, row_slots, layer.key_heads, trees, passed)
    mixed = gated_rms_norm(mixed, projected[:, gate_start:ab_start], layer.out_norm, layer.eps)
    return linear(mixed, layer.output, x), projected, qkv


def commit_delta_layers(
    layers: Sequence["DeltaLayer"],
    projected: Sequence[Tensor],
    qkv: Sequence[Tensor],
    conv_states: Sequence[Tensor],
    delta_states: Sequence[Tensor],
    slots: Tensor,
    path_starts: Tensor,
    path_rows: Tensor,
    passed: Sequence[PassedState] | None = None,
) -> None:
    """One launch for all layers where their tensors lie at equal distances, else one a layer."""
    passed_states = qkv if passed is None else [each.state for each in passed]  # none: any tensors do
    distances = [_distance(tensors) for tensors in (qkv, delta_states, passed_states, projected, conv_states)]
    groups = [slice(0, len(layers))] if None not in distances else [slice(i, i + 1) for i in range(len(layers))]
    qkv_stride, delta_stride, passed_stride, x_stride, conv_stride = (distance or 0 for distance in distances)
    path = (slots, path_starts, path_rows)
    for part in groups:
        strides, first = (qkv_stride, delta_stride, passed_stride), passed[part.start] if passed is not None else None
        commit(qkv[part], delta_states[part], *path, layers[0].key_heads, strides, first)
        update_conv_states(projected[part], conv_states[part], *path, (x_stride, conv_stride))


def _distance(tensors: Sequence[Tensor]) -> int | None:
    """Elements from each tensor to the next; None where that differs or is no whole number."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    steps = {after - before for before, after in pairwise(addresses)} or {0}
    step, size = steps.pop(), tensors[0].element_size()
    return None if steps or step % size else step // size


def mlp_layer(layer: "MlpLayer", x: Tensor) -> Tensor:
    gated = linear(rms_norm(x, layer.norm, layer.eps), layer.gate_up, dtype=BF16, is_gated=True)
    return linear(gated, layer.down, x)


def mtp_layer(
    layer: "MtpLayer",
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
    rows, dim = hidden.shape
    both = torch.empty(rows, 2 * dim, dtype=BF16, device=hidden.device)
    rms_norm(embed(layer.embedding, token_ids), layer.embedding_norm, layer.eps, both[:, :dim])
    rms_norm(hidden, layer.hidden_norm, layer.eps, both[:, dim:])
    x = linear(both, layer.fc)
    batch = (positions, parents, row_seqs, prefix_lens, block_tables)
    x = attention_layer(layer.attention, x, keys, values, *batch, k_cache, v_cache, trees)
    return rms_norm(mlp_layer(layer.mlp, x), layer.out_norm, layer.eps)


def mtp_guess(layer: "MtpLayer", hidden: Tensor) -> tuple[Tensor, Tensor]:
    return argmax(linear(hidden, layer.head))
