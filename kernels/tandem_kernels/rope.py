# SPDX-License-Identifier: Apache-2.0
"""Per-head RMS norm and rotary position embedding (Su et al. 2021), partial and with Llama 3 frequency scaling."""

import math

import torch
from torch import Tensor

from tandem_kernels.device import implementation
from tandem_kernels.rms_norm import rms_norm_reference


def rope(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor, dim: int) -> Tensor:
    """Norm each head (weight None: don't), then rotate its first dims, first half against second half.

    x: [rows, heads * dim] float32, rows may be strided; weight: [dim] float32 or None; positions: [rows] int32;
    cos, sin: [max_position, rotated_dims / 2] float32. Returns [rows, heads, dim] float32.
    """
    return implementation(x).rope(x, weight, eps, cos, sin, positions, dim)


def rope_reference(
    x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor, dim: int
) -> Tensor:
    """Executable spec of `rope`, in x's dtype."""
    heads = x.unflatten(-1, (-1, dim))
    if weight is not None:
        heads = rms_norm_reference(heads, weight, eps)
    half = cos.shape[1]
    c, s = (table[positions.long()].to(x.dtype).unsqueeze(1) for table in (cos, sin))
    lower, upper, rest = heads.split([half, half, dim - 2 * half], dim=-1)
    return torch.cat([lower * c - upper * s, upper * c + lower * s, rest], dim=-1)


def rope_tables(max_position: int, rotated_dims: int, theta: float, scaling: dict[str, float] | None) -> list[Tensor]:
    """cos and sin, each [max_position, rotated_dims / 2] float32.

    `scaling` is None or holds Llama 3's factor, low_freq_factor, high_freq_factor, original_max_position_embeddings.
    Angles are float32 products as in transformers; their cosine is taken in float64 and rounded once.
    """
    exponents = torch.arange(0, rotated_dims, 2, dtype=torch.float32) / rotated_dims
    frequencies = 1.0 / (theta**exponents)
    if scaling is not None:
        frequencies = _scale_llama3(frequencies, scaling)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    return [table.to(torch.float32).contiguous() for table in (angles.double().cos(), angles.double().sin())]


def _scale_llama3(frequencies: Tensor, scaling: dict[str, float]) -> Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended (Llama 3.1's reference code)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / scaling["factor"], frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * slowed / scaling["factor"] + smooth * slowed
    is_medium = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_medium, blended, slowed)
