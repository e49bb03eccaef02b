# SPDX-License-Identifier: Apache-2.0
"""Elementwise gates: silu(gate) * x of the MLP (SwiGLU), sigmoid(gate) * x of gated attention."""

import torch
from torch import Tensor
from torch.nn import functional

from tandem_kernels.device import implementation


def gate_mul(x: Tensor, gate: Tensor, *, silu: bool) -> Tensor:
    """x * silu(gate) or x * sigmoid(gate). x, gate: [rows, dim] float32, rows may be strided. Returns [rows, dim]."""
    return implementation(x).gate_mul(x, gate, silu=silu)


def gate_mul_reference(x: Tensor, gate: Tensor, *, silu: bool) -> Tensor:
    """Executable spec of `gate_mul`, in x's dtype."""
    return x * (functional.silu(gate) if silu else torch.sigmoid(gate))
