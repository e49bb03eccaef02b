# SPDX-License-Identifier: Apache-2.0
"""A linear layer's weight in the layout of the device it lies on."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`data`: CPU, panels of 64 outputs, bf16 pairs as int32 or float32; GPU, bf16 [outputs, inputs]."""

    data: Tensor
    num_outputs: int
    num_inputs: int
    is_bf16: bool
    # GPU: row counts at which the vendor's library may be used, since it was shown to give our bits there.
    library_rows: set[int] = field(default_factory=set, compare=False, repr=False)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
