# SPDX-License-Identifier: Apache-2.0
"""Short depthwise causal convolution over a row's ancestors, with silu. Source: Gated DeltaNet (Yang et al. 2024)."""

import torch
from torch import Tensor
from torch.nn import functional

from tandem_kernels.device import implementation


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, parents: Tensor, row_slots: Tensor) -> Tensor:
    """Convolve each row with its nearest ancestors: rows of this pass first, then the inputs its sequence kept.

    x: [rows, channels] float32, rows may be strided; state: [slots, taps - 1, channels], oldest first;
    weight: [taps, channels], the row's own tap last; parents: [rows] int32, row index or -1; row_slots: [rows] int32.
    Returns [rows, channels] float32. Taps are added oldest first.
    """
    return implementation(x).causal_conv(x, state, weight, parents, row_slots)


def causal_conv_reference(x: Tensor, state: Tensor, weight: Tensor, parents: Tensor, row_slots: Tensor) -> Tensor:
    """Executable spec of `causal_conv`, in x's dtype."""
    taps = weight.shape[0]
    rows = []
    for row in range(x.shape[0]):
        window: list[Tensor] = []
        ancestor = row
        while ancestor >= 0 and len(window) < taps:
            window.insert(0, x[ancestor])
            ancestor = int(parents[ancestor])
        kept = state[row_slots[row].long()].to(x.dtype)
        window = [*kept[len(window) - 1 :], *window] if len(window) < taps else window
        rows.append((torch.stack(window) * weight.to(x.dtype)).sum(0))
    return functional.silu(torch.stack(rows))


def update_conv_state(x: Tensor, state: Tensor, slots: Tensor, path_starts: Tensor, path_rows: Tensor) -> None:
    """Keep the newest inputs after the accepted rows of each sequence, in place.

    slots: [seqs] int32; path_rows: [path_starts[-1]] int32, root first, at least one a sequence; path_starts:
    [seqs + 1] int32. x and state as in `causal_conv`.
    """
    implementation(x).update_conv_state(x, state, slots, path_starts, path_rows)
