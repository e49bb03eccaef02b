# SPDX-License-Identifier: Apache-2.0
"""Linear layer with one K order: each output adds its terms in ascending k by fused multiply-add, for any row count."""

import torch
from torch import Tensor

from tandem_kernels.device import implementation
from tandem_kernels.packed_weight import PackedWeight


def pack_weight(weight: Tensor) -> PackedWeight:
    """Lay a weight [outputs, inputs] out for `linear`. bfloat16 stays bfloat16, other float types become float32.

    A meta tensor, which has no data, is taken as it is: enough for who asks whether a checkpoint's shapes fit.
    """
    if weight.is_meta:
        return PackedWeight(weight, weight.shape[0], weight.shape[1], weight.dtype == torch.bfloat16)
    return implementation(weight).pack_weight(weight)


def linear(x: Tensor, weight: PackedWeight, residual: Tensor | None = None) -> Tensor:
    """x @ weight.T (+ residual, added to the finished sum).

    x: [rows, inputs] float32, rows may be strided; residual: [rows, outputs] float32 or None.
    Returns [rows, outputs] float32; the head's logits come from here too.
    """
    return implementation(x).linear(x, weight, residual)


def linear_reference(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """The same with a plain weight [outputs, inputs], in x's dtype."""
    out = x @ weight.to(x.dtype).T
    return out if residual is None else out + residual


def unpack_weight(weight: PackedWeight) -> Tensor:
    """The plain weight [outputs, inputs] float32 back from its packed form."""
    data = weight.data
    if weight.is_bf16:
        halves = data.view(torch.bfloat16).unflatten(-1, (-1, 2))  # [panels, pairs, 16, 2]
        data = halves.permute(0, 2, 1, 3).flatten(2).to(torch.float32)
    else:
        data = data.transpose(1, 2)
    return data.flatten(0, 1)[: weight.num_outputs, : weight.num_inputs].contiguous()
