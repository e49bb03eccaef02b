# SPDX-License-Identifier: Apache-2.0
"""The GPU's linear layers and attention by cuBLAS and PyTorch's SDPA, for the price of exactness. Not exact: for
measuring only."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from tandem_kernels import PackedWeight, gate_mul
from torch import Tensor
from torch.nn import functional


def linear(
    x: Tensor,
    weight: PackedWeight,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    is_gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """cuBLAS, then what our kernel does in its epilogue."""
    result = functional.linear(x.to(torch.bfloat16), weight.data)
    if is_gated:
        gate, up = result.chunk(2, dim=1)
        result = gate_mul(up, gate, silu=True)
    if residual is not None:
        return residual + result
    if out is not None:
        return out.copy_(result)
    return result.to(dtype)


@dataclass
class SdpaAttention:
    """One sequence's attention by SDPA. Its keys are a dense tensor of the context's length, so that no pages are
    gathered, as a library without paged trees would keep them; their values don't matter for time."""

    context_len: int
    _memory: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __call__(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        prefix_lens: Tensor,
        parents: Tensor,
        row_seqs: Tensor,
        scale: float,
        trees: Any = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        rows, heads, dim = q.shape
        kv_heads = k_new.shape[1]
        keys, values = self._dense(kv_heads, rows, dim, q.device)
        keys[0, :, self.context_len :] = k_new[-rows:].transpose(0, 1)
        values[0, :, self.context_len :] = v_new[-rows:].unflatten(1, (kv_heads, dim)).transpose(0, 1)
        mask = None if rows == 1 else self._mask(rows, q.device)
        mixed = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        out = mixed[0].transpose(0, 1).reshape(rows, heads * dim)
        return out if gate is None else gate_mul(out, gate, silu=False)

    def _dense(self, kv_heads: int, rows: int, dim: int, device: torch.device) -> Tensor:
        shape = (2, 1, kv_heads, self.context_len + rows, dim)
        if shape not in self._memory:
            self._memory[shape] = torch.randn(shape, dtype=torch.bfloat16, device=device)
        return self._memory[shape]

    def _mask(self, rows: int, device: torch.device) -> Tensor:
        shape = (rows, self.context_len + rows)
        if shape not in self._memory:
            mask = torch.ones(shape, dtype=torch.bool, device=device)
            mask[:, self.context_len :] = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
            self._memory[shape] = mask
        return self._memory[shape]


@contextmanager
def library_ops(context_len: int) -> Iterator[None]:
    """Within it the GPU's blocks call cuBLAS and SDPA. For one sequence with context_len committed positions."""
    attention = SdpaAttention(context_len)
    with (
        patch("tandem_kernels.gpu.layers.linear", linear),
        patch("tandem_kernels.gpu.linear", linear),
        patch("tandem_kernels.gpu.layers.attention", attention),
    ):
        yield
