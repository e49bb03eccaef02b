# SPDX-License-Identifier: Apache-2.0
"""Ops of one row or one head: a program each, so other rows can't show. Arithmetic is float32, fusion is off."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.gpu.language import cast, contiguous_rows, launch, next_power_of_2, sigmoid, silu


@triton.jit
def rms_norm_kernel(x, weight, eps, out, x_stride, out_stride, dim, DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, DIM)
    values = tl.load(x + row * x_stride + n, mask=n < dim, other=0.0).to(tl.float32)
    weights = tl.load(weight + n, mask=n < dim, other=0.0)  # on their way while the squares are summed
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values) / dim + eps)
    values = values * scale * weights
    tl.store(out + row * out_stride + n, cast(values, out.dtype.element_ty), mask=n < dim)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x: [rows, dim], float32 or bfloat16, rows may be strided. out: [rows, dim] bfloat16, rows may be strided."""
    rows, dim = x.shape
    x = contiguous_rows(x)
    if out is None:
        out = torch.empty(rows, dim, dtype=torch.bfloat16, device=x.device)
    width = next_power_of_2(dim)
    launch(
        rms_norm_kernel,
        (rows,),
        x,
        weight,
        eps,
        out,
        x.stride(0),
        out.stride(0),
        dim,
        DIM=width,
        num_warps=min(max(width // 1024, 1), 8),
    )
    return out


@triton.jit
def gated_rms_norm_kernel(x, gate, weight, eps, out, gate_stride, heads, dim, DIM: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, DIM)
    place = row * heads * dim + head * dim + n
    values = tl.load(x + place, mask=n < dim, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + head * dim + n, mask=n < dim, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values) / dim + eps)
    values = values * scale * tl.load(weight + n, mask=n < dim, other=0.0) * silu(gates)
    tl.store(out + place, cast(values, out.dtype.element_ty), mask=n < dim)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, dim = x.shape[0], weight.shape[0]
    heads = x.shape[1] // dim
    x, gate = x.contiguous(), contiguous_rows(gate)
    out = torch.empty(rows, heads * dim, dtype=torch.bfloat16, device=x.device)
    args = (x, gate, weight, eps, out, gate.stride(0), heads, dim)
    launch(gated_rms_norm_kernel, (rows, heads), *args, DIM=next_power_of_2(dim), num_warps=1)
    return out


@triton.jit
def gate_mul_kernel(x, gate, out, x_stride, gate_stride, dim, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + n, mask=n < dim, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + n, mask=n < dim, other=0.0).to(tl.float32)
    if IS_SILU:
        values = silu(gates) * values
    else:
        values = values * sigmoid(gates)
    tl.store(out + row * dim + n, cast(values, out.dtype.element_ty), mask=n < dim)


def gate_mul(x: Tensor, gate: Tensor, *, silu: bool) -> Tensor:
    rows, dim = x.shape
    x, gate = contiguous_rows(x), contiguous_rows(gate)
    out = torch.empty(rows, dim, dtype=torch.bfloat16, device=x.device)
    block = 1024
    args = (x, gate, out, x.stride(0), gate.stride(0), dim)
    launch(gate_mul_kernel, (rows, triton.cdiv(dim, block)), *args, IS_SILU=silu, BLOCK=block)
    return out


@triton.jit
def rope_kernel(
    x,
    weight_q,
    weight_k,
    eps,
    cos,
    sin,
    positions,
    q_out,
    k_out,
    v_out,
    x_stride,
    k_start,
    heads,
    kv_heads,
    dim,
    half,
    HAS_NORM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Head program_id(1) of a row: norm and rotation of queries and keys, a copy of values, those not finite as 0.

    Rows share tiles of attention, where a value weighs 0 in rows that don't see it; 0 times infinity would not be 0.

    x: a row holds the queries, at k_start the keys, then the values. The outputs are [rows, heads, dim].
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, DIM)
    inside = n < dim
    is_query, is_value = head < heads, head >= heads + kv_heads
    start = tl.where(is_query, head * dim, k_start + (head - heads) * dim)
    source = x + row * x_stride + start
    values = tl.load(source + n, mask=inside, other=0.0).to(tl.float32)
    if is_value:
        values = tl.where(tl.abs(values) < float("inf"), values, 0.0)
        place = (row * kv_heads + head - heads - kv_heads) * dim + n
        tl.store(v_out + place, cast(values, v_out.dtype.element_ty), mask=inside)
    else:
        # The other half's element that this one turns with; past the rotated dims an element stays as it is.
        other = tl.where(n < half, n + half, n - half)
        turns = n < 2 * half
        others = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
        if HAS_NORM:
            weight = weight_q if is_query else weight_k
            scale = 1.0 / tl.sqrt_rn(tl.sum(values * values) / dim + eps)
            values = values * scale * tl.load(weight + n, mask=inside, other=0.0)
            others = others * scale * tl.load(weight + other, mask=turns, other=0.0)
        angle = tl.load(positions + row).to(tl.int64) * half + tl.where(n < half, n, n - half)
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        values = tl.where(n < half, values * c - others * s, values * c + others * s)
        if is_query:
            place = (row * heads + head) * dim + n
            tl.store(q_out + place, cast(values, q_out.dtype.element_ty), mask=inside)
        else:
            place = (row * kv_heads + head - heads) * dim + n
            tl.store(k_out + place, cast(values, k_out.dtype.element_ty), mask=inside)


def rope(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor, dim: int) -> Tensor:
    rows, heads = x.shape[0], x.shape[1] // dim
    x = contiguous_rows(x)
    out = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=x.device)
    args = (x, weight, weight, eps, cos, sin, positions, out, out, out, x.stride(0), 0, heads, 0, dim, cos.shape[1])
    width = next_power_of_2(dim)
    launch(rope_kernel, (rows, heads), *args, HAS_NORM=weight is not None, DIM=width, num_warps=1)
    return out


def rope_queries_keys(
    projected: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    key_start: int,
) -> Tensor:
    """`rope` of a projection's queries (returned) and keys, and its values: both written to [rows, kv_heads, dim]."""
    rows, kv_heads, dim = keys.shape
    q = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=projected.device)
    tables = (eps, cos, sin, positions)
    sizes = (projected.stride(0), key_start, heads, kv_heads, dim, cos.shape[1])
    args = (projected, q_norm, k_norm, *tables, q, keys, values, *sizes)
    grid = (rows, heads + 2 * kv_heads)
    launch(rope_kernel, grid, *args, HAS_NORM=q_norm is not None, DIM=next_power_of_2(dim), num_warps=1)
    return q
