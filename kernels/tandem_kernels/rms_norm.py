# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms, a row (or a head of a row) at a time. Source: Zhang and Sennrich 2019; gated: Qwen3-Next."""

import torch
from torch import Tensor
from torch.nn import functional

from tandem_kernels.device import implementation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. x: [rows, dim] float32; weight: [dim] float32. Returns [rows, dim]."""
    return implementation(x).rms_norm(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Executable spec of `rms_norm`, in x's dtype."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Per head, rms_norm(x) * silu(gate).

    x: [rows, heads * dim] float32 contiguous; gate: [rows, heads * dim], rows may be strided; weight: [dim].
    Returns [rows, heads * dim] float32.
    """
    return implementation(x).gated_rms_norm(x, gate, weight, eps)


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Executable spec of `gated_rms_norm`, in x's dtype."""
    heads = x.unflatten(-1, (-1, weight.shape[0]))
    return rms_norm_reference(heads, weight, eps).flatten(-2) * functional.silu(gate)
