# SPDX-License-Identifier: Apache-2.0
"""A linear layer's weight in the layout of the device it lies on."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`data`: CPU, panels of 64 outputs, bf16 pairs as int32 or float32; GPU, bf16 [outputs, inputs]."""

    data: Tensor
    num_outputs: int
    num_inputs: int
    is_bf16: bool

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
