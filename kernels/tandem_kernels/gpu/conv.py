# SPDX-License-Identifier: Apache-2.0
"""The causal convolution over a row's ancestors, and what it turns into for the delta rule: `prepare`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.gpu.language import contiguous_rows, launch, next_power_of_2, sigmoid, silu
from tandem_kernels.state_memory import padded_keys, prepared_width

BLOCK = 256


@triton.jit
def _convolve(x, state, weight, parents, row, slot, n, inside, x_stride, channels, TAPS: tl.constexpr):
    """silu of channels n of one row convolved; oldest tap first, one fma a tap."""
    acc = tl.zeros(n.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        ancestor = row
        count = tl.full((), 1, tl.int32)  # rows of this pass among the row and its ancestors so far
        for _ in tl.static_range(TAPS - 1 - tap):
            ancestor = tl.load(parents + ancestor, mask=ancestor >= 0, other=-1)
            count += (ancestor >= 0).to(tl.int32)
        is_row = inside & (ancestor >= 0)
        kept = state + (slot.to(tl.int64) * (TAPS - 1) + count - 1 + tap) * channels
        new = tl.load(x + ancestor.to(tl.int64) * x_stride + n, mask=is_row, other=0.0).to(tl.float32)
        old = tl.load(kept + n, mask=inside & (ancestor < 0), other=0.0).to(tl.float32)
        acc = tl.fma(tl.where(is_row, new, old), tl.load(weight + tap * channels + n, mask=inside, other=0.0), acc)
    return silu(acc)


@triton.jit
def causal_conv_kernel(
    x, state, weight, parents, row_slots, out, x_stride, channels, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(row_slots + row)
    values = _convolve(x, state, weight, parents, row, slot, n, n < channels, x_stride, channels, TAPS)
    tl.store(out + row.to(tl.int64) * channels + n, values, mask=n < channels)


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, parents: Tensor, row_slots: Tensor) -> Tensor:
    """As the op; x and state bfloat16 or float32. Returns [rows, channels] float32."""
    rows, (taps, channels) = x.shape[0], weight.shape
    x = contiguous_rows(x)
    out = torch.empty(rows, channels, dtype=torch.float32, device=x.device)
    args = (x, state, weight, parents, row_slots, out, x.stride(0), channels)
    launch(causal_conv_kernel, (rows, triton.cdiv(channels, BLOCK)), *args, TAPS=taps, BLOCK=BLOCK)
    return out


@triton.jit
def _channels(x, state, weight, parents, row_slots, row, n, inside, x_stride, channels, TAPS: tl.constexpr):
    """Channels n of one row for `prepare_kernel`, 0 where not inside."""
    if TAPS > 0:
        slot = tl.load(row_slots + row)
        values = _convolve(x, state, weight, parents, row, slot, n, inside, x_stride, channels, TAPS)
    else:
        values = tl.load(x + row.to(tl.int64) * x_stride + n, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, values, 0.0)


@triton.jit
def prepare_kernel(
    x,
    state,
    weight,
    parents,
    row_slots,
    ab,
    a_log,
    dt_bias,
    out,
    x_stride,
    ab_stride,
    key_heads,
    value_heads,
    dk,
    dv,
    keys,
    width,
    TAPS: tl.constexpr,
    DIM: tl.constexpr,
):
    """One head of one row: queries and keys, or values. keys: dk padded. TAPS 0: x is convolved already."""
    row, head = tl.program_id(0), tl.program_id(1)
    channels = 2 * key_heads * dk + value_heads * dv
    target = out + row.to(tl.int64) * width
    values = target + 2 * key_heads * keys
    scalars = values + value_heads * dv
    lane = tl.arange(0, DIM)
    if head < key_heads:
        n = head * dk + lane
        q = _channels(x, state, weight, parents, row_slots, row, n, lane < dk, x_stride, channels, TAPS)
        n += key_heads * dk
        k = _channels(x, state, weight, parents, row_slots, row, n, lane < dk, x_stride, channels, TAPS)
        q = q / tl.sqrt_rn(tl.sum(q * q) + 1e-6) / tl.sqrt_rn(dk.to(tl.float32))
        k = k / tl.sqrt_rn(tl.sum(k * k) + 1e-6)
        tl.store(target + head * keys + lane, q, mask=lane < keys)
        tl.store(target + (key_heads + head) * keys + lane, k, mask=lane < keys)
        tl.store(scalars + 2 * value_heads + head, tl.sum(q * k))
    else:
        value_head = head - key_heads
        n = 2 * key_heads * dk + value_head * dv + lane
        v = _channels(x, state, weight, parents, row_slots, row, n, lane < dv, x_stride, channels, TAPS)
        tl.store(values + value_head * dv + lane, v, mask=lane < dv)
        a = tl.load(ab + row.to(tl.int64) * ab_stride + value_head).to(tl.float32) + tl.load(dt_bias + value_head)
        b = tl.load(ab + row.to(tl.int64) * ab_stride + value_heads + value_head).to(tl.float32)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        decay = tl.exp(-tl.exp(tl.load(a_log + value_head)) * softplus)
        tl.store(scalars + value_head, decay)
        tl.store(scalars + value_heads + value_head, sigmoid(b))


def prepare(
    x: Tensor,
    conv: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    ab: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    sizes: tuple[int, int, int, int],
    out: Tensor | None = None,
) -> Tensor:
    """What the delta rule's walk reads of each row: convolved, q and k normalised, then decays, strengths and q.k.

    x: [rows, channels or more]; conv: state, weight, parents, row_slots, or None where x is convolved already; sizes:
    key_heads, value_heads, dk, dv. Returns [rows, prepared_width] float32.
    """
    key_heads, value_heads, dk, dv = sizes
    rows, width, keys = x.shape[0], prepared_width(*sizes), padded_keys(dk)
    x, ab = contiguous_rows(x), contiguous_rows(ab)
    if out is None:
        out = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    state, weight, parents, row_slots = conv or (None, None, None, None)
    strides = (x.stride(0), ab.stride(0))
    args = (x, state, weight, parents, row_slots, ab, a_log, dt_bias, out, *strides, *sizes, keys, width)
    taps = 0 if weight is None else weight.shape[0]
    grid = (rows, key_heads + value_heads)
    launch(prepare_kernel, grid, *args, TAPS=taps, DIM=next_power_of_2(max(keys, dv)), num_warps=1)
    return out


@triton.jit
def update_conv_state_kernel(
    x,
    state,
    slots,
    path_starts,
    path_rows,
    x_stride,
    channels,
    x_layer_stride,
    state_layer_stride,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of the kept inputs followed by the path's, the newest. A place is read before it is written, never after."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seq, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.load(path_starts + seq)
    length = tl.load(path_starts + seq + 1) - first
    if length > 0:
        kept = state + layer * state_layer_stride + tl.load(slots + seq).to(tl.int64) * (TAPS - 1) * channels
        for place in tl.static_range(TAPS - 1):
            source = length + place
            is_kept = (source < TAPS - 1) & (n < channels)
            is_new = (source >= TAPS - 1) & (n < channels)
            row = tl.load(path_rows + first + source - (TAPS - 1), mask=source >= TAPS - 1, other=0).to(tl.int64)
            old = tl.load(kept + source * channels + n, mask=is_kept, other=0.0)
            new = tl.load(x + layer * x_layer_stride + row * x_stride + n, mask=is_new, other=0.0)
            tl.store(kept + place * channels + n, tl.where(is_kept, old, new.to(old.dtype)), mask=n < channels)


def update_conv_states(
    x: Sequence[Tensor],
    states: Sequence[Tensor],
    slots: Tensor,
    path_starts: Tensor,
    path_rows: Tensor,
    strides: tuple[int, int],
) -> None:
    """The first layer's tensors and the distances to the next layers', in elements."""
    taps, channels = states[0].shape[1] + 1, states[0].shape[2]
    args = (x[0], states[0], slots, path_starts, path_rows, x[0].stride(0), channels, *strides)
    grid = (triton.cdiv(channels, BLOCK), len(slots), len(x))
    launch(update_conv_state_kernel, grid, *args, TAPS=taps, BLOCK=BLOCK)


def update_conv_state(x: Tensor, state: Tensor, slots: Tensor, path_starts: Tensor, path_rows: Tensor) -> None:
    update_conv_states([contiguous_rows(x)], [state], slots, path_starts, path_rows, (0, 0))
