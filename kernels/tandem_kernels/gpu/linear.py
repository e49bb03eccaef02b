# SPDX-License-Identifier: Apache-2.0
"""Linear layers: no split of K, so one order for any row count; tiles, stages and instructions don't change bits.

Up to 64 rows the weight is the wide operand (its rows are the M side of the instruction), above that x is.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem_kernels.device import IS_INTERPRETED
from tandem_kernels.gpu.language import (
    ACCUMULATOR,
    capability,
    cast,
    contiguous_rows,
    dot,
    launch,
    next_power_of_2,
    silu,
)
from tandem_kernels.packed_weight import PackedWeight

PLAIN, RESIDUAL, GATED = (tl.constexpr(i) for i in range(3))  # what happens to the finished sum
MAX_WIDE_ROWS = 64


@triton.jit
def _tile(
    source,
    row,
    k,
    num_rows,
    num_inputs,
    stride,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
):
    """[ROWS, BLOCK_K] of a matrix from (row, k) on, zero outside of it."""
    if HAS_DESCRIPTOR:
        return source.load([row, k])
    else:
        rows = row + tl.arange(0, ROWS)
        inputs = k + tl.arange(0, BLOCK_K)
        inside = (rows < num_rows)[:, None] & (inputs < num_inputs)[None, :]
        return tl.load(source + rows.to(tl.int64)[:, None] * stride + inputs[None, :], mask=inside, other=0.0)


@triton.jit
def _targets(row, output, num_rows, num_outputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Where [ROWS, OUTPUTS] from (row, output) on lie in the result, and which of them are inside of it."""
    rows = row + tl.arange(0, ROWS)
    outputs = output + tl.arange(0, OUTPUTS)
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    return rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :], inside


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,
    weight,
    second_weight,
    residual,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    IS_WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    X_DESCRIPTOR: tl.constexpr,
    W_DESCRIPTOR: tl.constexpr,
):
    """A tile of x @ weight.T, BLOCK_OUTPUTS wide or, where SECOND is not 0, that much wider: widths are powers of two.

    GATED: the weight holds num_outputs gate rows, then as many up rows, of which the second part of a tile is made.
    Programs go through GROUP tiles of rows before the next tile of outputs, so that a tile of weights is read once.
    """
    WIDTH: tl.constexpr = BLOCK_OUTPUTS if EPILOGUE == GATED else BLOCK_OUTPUTS + SECOND
    row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    output_tiles = tl.cdiv(num_outputs, WIDTH)
    group = tl.program_id(0) // (GROUP * output_tiles)
    in_group = tl.program_id(0) % (GROUP * output_tiles)
    size = min(row_tiles - group * GROUP, GROUP)
    row = (group * GROUP + in_group % size) * BLOCK_ROWS
    output = (in_group // size) * WIDTH
    weight_rows = num_outputs * 2 if EPILOGUE == GATED else num_outputs
    second_output = output + (num_outputs if EPILOGUE == GATED else BLOCK_OUTPUTS)

    place, inside = _targets(row, output, num_rows, num_outputs, BLOCK_ROWS, BLOCK_OUTPUTS)
    if EPILOGUE == RESIDUAL and IS_WIDE:  # a small tile: on its way during the sums
        before = tl.load(residual + place, mask=inside, other=0.0)
    acc = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS) if IS_WIDE else (BLOCK_ROWS, BLOCK_OUTPUTS), ACCUMULATOR)
    if SECOND:
        second = tl.zeros((SECOND, BLOCK_ROWS) if IS_WIDE else (BLOCK_ROWS, SECOND), ACCUMULATOR)
    for k in range(0, num_inputs, BLOCK_K):
        a = _tile(x, row, k, num_rows, num_inputs, x_stride, BLOCK_ROWS, BLOCK_K, X_DESCRIPTOR)
        w = _tile(weight, output, k, weight_rows, num_inputs, num_inputs, BLOCK_OUTPUTS, BLOCK_K, W_DESCRIPTOR)
        if IS_WIDE:
            acc = dot(w, a.T, acc)
        else:
            acc = dot(a, w.T, acc)
        if SECOND:
            v = _tile(
                second_weight, second_output, k, weight_rows, num_inputs, num_inputs, SECOND, BLOCK_K, W_DESCRIPTOR
            )
            if IS_WIDE:
                second = dot(v, a.T, second)
            else:
                second = dot(a, v.T, second)

    result = acc.to(tl.float32)
    if EPILOGUE == GATED:
        result = silu(result) * second.to(tl.float32)
    if IS_WIDE:
        result = tl.trans(result)
    if EPILOGUE == RESIDUAL:
        result += before if IS_WIDE else tl.load(residual + place, mask=inside, other=0.0)
    tl.store(out + place, cast(result, out.dtype.element_ty), mask=inside)
    if WIDTH > BLOCK_OUTPUTS:
        place, inside = _targets(row, second_output, num_rows, num_outputs, BLOCK_ROWS, SECOND)
        result = second.to(tl.float32)
        if EPILOGUE == RESIDUAL:
            result += tl.load(residual + place, mask=inside, other=0.0)
        tl.store(out + place, cast(result, out.dtype.element_ty), mask=inside)


class Tiles(NamedTuple):
    """How a linear layer is cut up; none of it changes a bit of the result."""

    rows: int
    outputs: int
    k: int
    num_warps: int
    num_stages: int
    is_wide: bool
    more_outputs: int = 0  # of the same tile: `outputs` is a power of two. Not where the layer is gated or is_wide


# Of more than MAX_WIDE_ROWS rows.
SQUARE_TILES = Tiles(128, 128, 64, 4, 3, False)
LONG_TILES = Tiles(128, 256, 64, 8, 3, False, 64)


def choose_tiles(num_rows: int, num_outputs: int, num_inputs: int, *, is_gated: bool) -> Tiles:
    """Measured on an H200, see kernels/README.md."""
    if num_rows > MAX_WIDE_ROWS:
        return _choose_large_tiles(num_rows, num_outputs, is_gated=is_gated)
    longest_k = max(next_power_of_2(num_inputs), 64)
    rows = max(16, next_power_of_2(num_rows))
    if is_gated:
        # Two programs a processor may be all there are; else three should fit.
        k, stages = (64, 3) if rows > 16 else (128, 3) if num_outputs <= 16384 else (128, 2)
    elif num_outputs <= 8192:  # few programs: each needs more in flight
        k, stages = (128, 6) if rows > 32 else (128, 8) if num_outputs <= 4096 else (256, 4)
    else:
        k, stages = (128, 3) if rows == 64 or num_outputs >= 65536 else (128, 4)
    return Tiles(rows, 64, min(k, longest_k), 4, stages, True)


def _choose_large_tiles(num_rows: int, num_outputs: int, *, is_gated: bool) -> Tiles:
    if is_gated:
        return SQUARE_TILES._replace(num_warps=8)
    square = SQUARE_TILES._replace(num_stages=4 if num_outputs <= 8192 else 3)
    choices = (square, LONG_TILES) if _has_copy_engine() else (square,)
    return min(choices, key=lambda tiles: _most_outputs(tiles, num_rows, num_outputs))


def _most_outputs(tiles: Tiles, num_rows: int, num_outputs: int) -> int:
    """Outputs of a tile's rows that the processor with the most tiles has to do, the others waiting in the end."""
    width = tiles.outputs + tiles.more_outputs
    num_tiles = triton.cdiv(num_rows, tiles.rows) * triton.cdiv(num_outputs, width)
    return width * triton.cdiv(num_tiles, _num_processors())


def pack_weight(weight: Tensor) -> PackedWeight:
    data = weight.to(torch.bfloat16).contiguous()
    return PackedWeight(data, weight.shape[0], weight.shape[1], True)


def unpack_weight(weight: PackedWeight) -> Tensor:
    return weight.data.float()


def linear(
    x: Tensor,
    weight: PackedWeight,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    is_gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x @ weight.T; plus residual; or, gated, silu(its first half) * its second half.

    x: [rows, inputs], used as bfloat16; residual: [rows, outputs] float32 contiguous; out: where the result goes.
    """
    rows, num_inputs = x.shape
    num_outputs = weight.num_outputs // 2 if is_gated else weight.num_outputs
    x = contiguous_rows(x.to(torch.bfloat16))
    if out is None:
        out = torch.empty(rows, num_outputs, dtype=dtype, device=x.device)
    if residual is not None and rows in weight.library_rows:
        return torch.addmm(residual, x, weight.data.T, out_dtype=torch.float32, out=out)
    tiles = choose_tiles(rows, num_outputs, num_inputs, is_gated=is_gated)
    run_linear(x, weight.data, residual, out, tiles, is_gated=is_gated)
    return out


def run_linear(
    x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor, tiles: Tiles, *, is_gated: bool
) -> None:
    """`linear` with chosen tiles; x bfloat16, weight [outputs, inputs] bfloat16 contiguous."""
    rows, num_outputs = out.shape
    epilogue = GATED if is_gated else PLAIN if residual is None else RESIDUAL
    second = tiles.outputs if is_gated else tiles.more_outputs
    x_source = _source(x, tiles.rows, tiles.k)
    w_source = _source(weight, tiles.outputs, tiles.k)
    launch(
        linear_kernel,
        (triton.cdiv(rows, tiles.rows) * triton.cdiv(num_outputs, tiles.outputs + tiles.more_outputs),),
        x_source,
        w_source,
        _source(weight, second, tiles.k) if tiles.more_outputs else w_source,
        residual,
        out,
        rows,
        num_outputs,
        x.shape[1],
        x.stride(0),
        BLOCK_ROWS=tiles.rows,
        BLOCK_OUTPUTS=tiles.outputs,
        SECOND=second,
        BLOCK_K=tiles.k,
        EPILOGUE=epilogue,
        IS_WIDE=tiles.is_wide,
        GROUP=8,
        X_DESCRIPTOR=isinstance(x_source, TensorDescriptor),
        W_DESCRIPTOR=isinstance(w_source, TensorDescriptor),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _source(matrix: Tensor, block_rows: int, block_k: int) -> Any:
    """A descriptor for the bulk copy engine where there is one and the rows are aligned for it, else the tensor."""
    is_aligned = matrix.stride(0) % 8 == 0 and matrix.data_ptr() % 16 == 0
    if not is_aligned or not _has_copy_engine() or min(matrix.shape) == 0:
        return matrix
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [block_rows, block_k])


def _has_copy_engine() -> bool:
    return IS_INTERPRETED or capability() >= 90


@functools.cache
def _num_processors() -> int:
    """Multiprocessors of the device; an H200's where kernels are interpreted or only compiled."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 132
