# SPDX-License-Identifier: Apache-2.0
"""What several kernels share: the dot product, the gates and how a kernel is started."""

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.device import IS_INTERPRETED

INTERPRETED = tl.constexpr(IS_INTERPRETED)
# Of dot products. The interpreter's order follows the shapes (it is numpy's), which float64 keeps out of the result.
ACCUMULATOR = tl.constexpr(tl.float64 if IS_INTERPRETED else tl.float32)


@triton.jit
def dot(a, b, acc):
    """a @ b + acc, with acc in ACCUMULATOR. The interpreter knows no bfloat16 product."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float64), b.to(tl.float64), acc, out_dtype=tl.float64)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """x in dtype, to nearest, ties to even. The interpreter by itself cuts bits off."""
    if INTERPRETED and x.dtype == tl.float32 and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x * sigmoid(x)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start a kernel, unless there is nothing to do. Fusing of multiply-adds is off: builds must not differ by it."""
    if min(grid) > 0:
        kernel[grid](*args, enable_fp_fusion=False, **{"num_stages": 1, **options})


def contiguous_rows(x: Tensor) -> Tensor:
    """x itself where the elements of a row lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def capability() -> int:
    """The device's architecture, 90 for Hopper; an interpreter's is 0. A process uses devices of one kind."""
    return 0 if IS_INTERPRETED else int(triton.runtime.driver.active.get_current_target().arch)
