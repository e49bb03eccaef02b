# SPDX-License-Identifier: Apache-2.0
"""Memory of recurrent state, as the kernels of a device like it to lie."""

import torch
from torch import Tensor


def new_delta_states(layers: int, slots: int, heads: int, dk: int, dv: int, device: torch.device) -> Tensor:
    """Zeroed states [layers, slots, heads, dk, dv] float32; all kernels read along dv."""
    return torch.zeros(layers, slots, heads, dk, dv, device=device)
