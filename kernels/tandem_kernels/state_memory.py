# SPDX-License-Identifier: Apache-2.0
"""Memory of recurrent state, as the kernels of a device like it to lie."""

import torch
from torch import Tensor

from tandem_kernels.device import runs_on_gpu


def new_delta_states(layers: int, slots: int, heads: int, dk: int, dv: int, device: torch.device) -> Tensor:
    """Zeroed states [layers, slots, heads, dk, dv] float32; the GPU's kernels read along dk, the CPU's along dv."""
    some = torch.empty(0, device=device)
    if runs_on_gpu(some):
        return torch.zeros(layers, slots, heads, dv, dk, device=device).transpose(3, 4)
    return torch.zeros(layers, slots, heads, dk, dv, device=device)
