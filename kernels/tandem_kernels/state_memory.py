# SPDX-License-Identifier: Apache-2.0
"""Memory of recurrent state and of what commit needs of a pass, as the kernels of a device like it to lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem_kernels.device import row_dtype, runs_on_gpu

if TYPE_CHECKING:
    from tandem_kernels.layers import DeltaLayer

LONG_PASS = 65  # rows from which a pass on the GPU keeps a state for commit; draft trees have at most 64


@dataclass(frozen=True, slots=True)
class PassedState:
    """A state that the walk of a pass came by, so that commit need not walk to it again: one layer's.

    It is that before the last row of a chain which has more than half of the pass's rows. Of a prompt's chunk that is
    kept whole, or but for its last row, commit then walks one row at most.
    """

    state: Tensor  # [value_heads, dk, dv] float32 after `row`; strides as of a slot
    row: Tensor  # [1] int32, the same for all layers; -1: no chain is so long, and `state` holds anything


def padded_keys(dk: int) -> int:
    """Of a prepared row's q and k on the GPU, whose lanes read 32 keys at once; the last ones are 0."""
    return (dk + 31) // 32 * 32


def prepared_width(key_heads: int, value_heads: int, dk: int, dv: int) -> int:
    """Floats of a prepared row on the GPU, so many that each row can be read by four."""
    floats = 2 * key_heads * padded_keys(dk) + value_heads * dv + 2 * value_heads + key_heads
    return (floats + 3) // 4 * 4


def new_delta_states(layers: int, slots: int, heads: int, dk: int, dv: int, device: torch.device) -> Tensor:
    """Zeroed states [layers, slots, heads, dk, dv] float32; all kernels read along dv."""
    return torch.zeros(layers, slots, heads, dk, dv, device=device)


def new_delta_rows(layers: Sequence["DeltaLayer"], num_rows: int) -> list[tuple[Tensor, Tensor, PassedState | None]]:
    """Memory for what `delta_layer` keeps for commit (its `kept`), by layer, views of one tensor of each kind.

    The layers are of equal sizes. On the GPU their commit is one launch where the tensors lie at equal distances, as
    these do; long passes there have memory for a state as well.
    """
    first, device, is_on_gpu = layers[0], layers[0].norm.device, runs_on_gpu(layers[0].norm)
    sizes = (first.key_heads, first.value_heads, first.dk, first.dv)
    prepared = prepared_width(*sizes) if is_on_gpu else first.channels
    shape = (len(layers), num_rows)
    projected = torch.empty(*shape, first.input.num_outputs, dtype=row_dtype(device), device=device)
    qkv = torch.empty(*shape, prepared, dtype=torch.float32, device=device)
    passed: Sequence[PassedState | None] = [None] * len(layers)
    if is_on_gpu and num_rows >= LONG_PASS:
        row = torch.full((1,), -1, dtype=torch.int32, device=device)
        states = torch.empty(len(layers), first.value_heads, first.dk, first.dv, device=device)
        passed = [PassedState(state, row) for state in states]
    return list(zip(projected.unbind(), qkv.unbind(), passed, strict=True))
