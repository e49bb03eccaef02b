# SPDX-License-Identifier: Apache-2.0
"""Calls into the compiled library: tensors to addresses, outputs allocated. See the op modules for the meaning."""

import torch
from torch import Tensor

from tandem_kernels.cpu.library import load_library
from tandem_kernels.packed_weight import PackedWeight

PANEL, TASK_PANELS = 16, 4  # of linear.c

_library = load_library()


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


def pack_weight(weight: Tensor) -> PackedWeight:
    num_outputs, num_inputs = weight.shape
    panels = -(-num_outputs // (PANEL * TASK_PANELS)) * TASK_PANELS
    is_bf16 = weight.dtype == torch.bfloat16
    weight = weight.contiguous() if is_bf16 else weight.to(torch.float32).contiguous()
    if is_bf16:
        data = torch.zeros(panels, (num_inputs + 1) // 2, PANEL, dtype=torch.int32)
        _library.tandem_pack_bf16(weight.data_ptr(), data.data_ptr(), num_outputs, num_inputs)
    else:
        data = torch.zeros(panels, num_inputs, PANEL, dtype=torch.float32)
        _library.tandem_pack_f32(weight.data_ptr(), data.data_ptr(), num_outputs, num_inputs)
    return PackedWeight(data, num_outputs, num_inputs, is_bf16)


def linear(x: Tensor, weight: PackedWeight, residual: Tensor | None) -> Tensor:
    rows = x.shape[0]
    out = _empty(rows, weight.num_outputs)
    _library.tandem_linear(
        x.data_ptr(),
        x.stride(0),
        weight.data.data_ptr(),
        weight.is_bf16,
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        rows,
        weight.num_outputs,
        weight.num_inputs,
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, dim = x.shape
    out = _empty(rows, dim)
    _library.tandem_rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), eps, out.data_ptr(), dim, rows, dim)
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, dim = x.shape[0], weight.shape[0]
    heads = x.shape[1] // dim
    out = _empty(rows, heads * dim)
    _library.tandem_gated_rms_norm(
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        rows,
        heads,
        dim,
    )
    return out


def rope(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor, dim: int) -> Tensor:
    rows, heads = x.shape[0], x.shape[1] // dim
    out = _empty(rows, heads, dim)
    _library.tandem_rope(
        x.data_ptr(),
        x.stride(0),
        None if weight is None else weight.data_ptr(),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        positions.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        dim,
        2 * cos.shape[1],
    )
    return out


def gate_mul(x: Tensor, gate: Tensor, *, silu: bool) -> Tensor:
    rows, dim = x.shape
    out = _empty(rows, dim)
    _library.tandem_gate_mul(
        x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), silu, out.data_ptr(), rows, dim
    )
    return out


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, parents: Tensor, row_slots: Tensor) -> Tensor:
    rows, (taps, channels) = x.shape[0], weight.shape
    out = _empty(rows, channels)
    _library.tandem_causal_conv(
        x.data_ptr(),
        x.stride(0),
        state.data_ptr(),
        weight.data_ptr(),
        parents.data_ptr(),
        row_slots.data_ptr(),
        out.data_ptr(),
        rows,
        channels,
        taps,
    )
    return out


def update_conv_state(x: Tensor, state: Tensor, slots: Tensor, path_starts: Tensor, path_rows: Tensor) -> None:
    _, kept, channels = state.shape
    _library.tandem_update_conv_state(
        x.data_ptr(),
        x.stride(0),
        state.data_ptr(),
        slots.data_ptr(),
        path_starts.data_ptr(),
        path_rows.data_ptr(),
        slots.shape[0],
        channels,
        kept + 1,
    )


def gated_delta(
    qkv: Tensor,
    ab: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    seq_starts: Tensor,
    parents: Tensor,
    key_heads: int,
    trees: None,
) -> Tensor:
    _, value_heads, dk, dv = state.shape
    out = _empty(qkv.shape[0], value_heads * dv)
    _library.tandem_gated_delta(
        qkv.data_ptr(),
        ab.data_ptr(),
        ab.stride(0),
        a_log.data_ptr(),
        dt_bias.data_ptr(),
        state.data_ptr(),
        slots.data_ptr(),
        seq_starts.data_ptr(),
        parents.data_ptr(),
        out.data_ptr(),
        slots.shape[0],
        key_heads,
        value_heads,
        dk,
        dv,
    )
    return out


def gated_delta_commit(
    qkv: Tensor,
    ab: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    path_starts: Tensor,
    path_rows: Tensor,
    key_heads: int,
) -> None:
    _, value_heads, dk, dv = state.shape
    _library.tandem_gated_delta_commit(
        qkv.data_ptr(),
        ab.data_ptr(),
        ab.stride(0),
        a_log.data_ptr(),
        dt_bias.data_ptr(),
        state.data_ptr(),
        slots.data_ptr(),
        path_starts.data_ptr(),
        path_rows.data_ptr(),
        slots.shape[0],
        key_heads,
        value_heads,
        dk,
        dv,
    )


def attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    prefix_lens: Tensor,
    parents: Tensor,
    row_seqs: Tensor,
    scale: float,
    trees: None,
) -> Tensor:
    queries, heads, dim = q.shape
    _, kv_heads, block, _ = k_cache.shape
    out = _empty(queries, heads * dim)
    _library.tandem_attention(
        q.data_ptr(),
        k_new.data_ptr(),
        v_new.data_ptr(),
        v_new.stride(0),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_tables.data_ptr(),
        block_tables.shape[1],
        prefix_lens.data_ptr(),
        parents.data_ptr(),
        row_seqs.data_ptr(),
        scale,
        out.data_ptr(),
        queries,
        k_new.shape[0] - queries,
        heads,
        kv_heads,
        dim,
        block,
    )
    return out


def store_kv(k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, places: Tensor) -> None:
    _, kv_heads, block, dim = k_cache.shape
    _library.tandem_store_kv(
        k_new.data_ptr(),
        v_new.data_ptr(),
        v_new.stride(0),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        rows.data_ptr(),
        places.data_ptr(),
        rows.shape[0],
        kv_heads,
        dim,
        block,
    )
