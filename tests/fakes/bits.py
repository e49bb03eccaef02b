# SPDX-License-Identifier: Apache-2.0
"""Equality to the bit."""

import torch
from torch import Tensor


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """[rows, ...] of any 2- or 4-byte type. Unlike ==, it tells 0 from -0 and accepts the same NaN."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    bits = torch.int16 if got.element_size() == 2 else torch.int32
    is_different = got.contiguous().view(bits) != expected.contiguous().view(bits)
    rows = is_different.reshape(len(got), -1).any(1).nonzero().flatten().tolist() if got.numel() else []
    assert not rows, f"rows {rows} differ"
