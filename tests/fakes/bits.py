# SPDX-License-Identifier: Apache-2.0
"""Equality to the bit."""

import torch
from torch import Tensor


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """[rows, ...] of float32 or int32. Unlike ==, it tells 0 from -0 and accepts the same NaN."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    is_different = got.contiguous().view(torch.int32) != expected.contiguous().view(torch.int32)
    rows = is_different.reshape(len(got), -1).any(1).nonzero().flatten().tolist() if got.numel() else []
    assert not rows, f"rows {rows} differ"
