# SPDX-License-Identifier: Apache-2.0
"""Inputs for the tests of the GPU's kernels: small in the interpreter, of real sizes on a device."""

from collections.abc import Callable
from dataclasses import dataclass

import tandem_kernels as kernels
import torch
from tandem_kernels.argmax import argmax_reference
from tandem_kernels.device import IS_INTERPRETED
from tandem_kernels.gate_mul import gate_mul_reference
from tandem_kernels.linear import linear_reference
from tandem_kernels.rms_norm import gated_rms_norm_reference, rms_norm_reference
from tandem_kernels.rope import rope_reference
from tandem_kernels.sampling import gumbel_argmax_reference
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6
# Outputs are rounded to bfloat16 (2^-9, relative). Tensor cores cut float32 sums off where they don't fit: thousands of
# terms leave 2^-17 of the largest output on an H200.
BF16_TOLERANCE, F32_TOLERANCE = 2.0**-8, 2.0**-15
ROWS = 6 if IS_INTERPRETED else 48


class Source:
    """Random tensors on a device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype)

    def weight(self, outputs: int, inputs: int) -> Tensor:
        return (torch.randn(outputs, inputs, generator=self.generator) / inputs**0.5).to(self.device, BF16)


@dataclass(frozen=True)
class GpuRowCase:
    """An op whose rows are independent. `reference` takes the row inputs in float64; tolerance: of the largest."""

    name: str
    inputs: tuple[Tensor, ...]
    run: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    tolerance: float


# outputs, inputs: whole tiles, parts of tiles, rows of an odd number of bytes, few and many outputs
SHAPES = (
    [(40, 72), (33, 67)]
    if IS_INTERPRETED
    else [(5120, 6144), (16480, 5120), (34816, 5120), (1003, 67), (4096, 2568), (131, 72), (131072, 512)]
)

# Apart from the cases: to name them, no weight of a gigabyte need be made.
LINEAR_NAMES = [f"linear{kind}-{outputs}x{inputs}" for outputs, inputs in SHAPES for kind in ("", "-residual")]


def linear_cases(device: torch.device, rows: int = ROWS) -> list[GpuRowCase]:
    cases = []
    for outputs, inputs in SHAPES:
        source = Source(device, outputs)
        weight = source.weight(outputs, inputs)
        packed = kernels.pack_weight(weight)
        x, residual = source(rows, inputs, dtype=BF16), source(rows, outputs)
        cases += [
            GpuRowCase(
                f"linear-{outputs}x{inputs}",
                (x,),
                lambda x, packed=packed: kernels.linear(x, packed),
                lambda x, weight=weight: linear_reference(x, weight),
                F32_TOLERANCE,
            ),
            GpuRowCase(
                f"linear-residual-{outputs}x{inputs}",
                (x, residual),
                lambda x, residual, packed=packed: kernels.linear(x, packed, residual),
                lambda x, residual, weight=weight: linear_reference(x, weight, residual),
                F32_TOLERANCE,
            ),
        ]
    return cases


def row_cases(device: torch.device, rows: int = ROWS) -> list[GpuRowCase]:
    source = Source(device, 7)
    dim, heads, head_dim, vocab = (53, 3, 22, 9001) if IS_INTERPRETED else (5120, 24, 256, 248320)
    norm, head_norm = 1 + 0.2 * source(dim), 1 + 0.2 * source(head_dim)
    cos, sin = (table.to(device) for table in kernels.rope_tables(500, head_dim // 4 * 2, 10000.0, None))
    positions = torch.randint(0, 500, (rows,), generator=source.generator, dtype=torch.int32).to(device)
    heads_in, gate = source(rows, heads * head_dim, dtype=BF16), 4 * source(rows, heads * head_dim, dtype=BF16)
    logits = 5 * source(rows, vocab)
    logits[0, [17, 801, vocab - 1]] = 40.0  # a tie: the lowest id wins
    logits[1, :1000] = float("-inf")
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=source.generator).to(device)
    return [
        GpuRowCase(
            "rms_norm",
            (source(rows, dim),),
            lambda x: kernels.rms_norm(x, norm, EPS),
            lambda x: rms_norm_reference(x, norm, EPS),
            BF16_TOLERANCE,
        ),
        GpuRowCase(
            "gated_rms_norm",
            (source(rows, heads * head_dim), gate),
            lambda x, gate: kernels.gated_rms_norm(x, gate, head_norm, EPS),
            lambda x, gate: gated_rms_norm_reference(x, gate, head_norm, EPS),
            BF16_TOLERANCE,
        ),
        GpuRowCase(
            "rope",
            (heads_in, positions),
            lambda x, positions: kernels.rope(x, None, EPS, cos, sin, positions, head_dim),
            lambda x, positions: rope_reference(x, None, EPS, cos, sin, positions, head_dim),
            BF16_TOLERANCE,
        ),
        GpuRowCase(
            "rope-norm",
            (heads_in, positions),
            lambda x, positions: kernels.rope(x, head_norm, EPS, cos, sin, positions, head_dim),
            lambda x, positions: rope_reference(x, head_norm, EPS, cos, sin, positions, head_dim),
            BF16_TOLERANCE,
        ),
        GpuRowCase(
            "silu",
            (heads_in, gate),
            lambda x, gate: kernels.gate_mul(x, gate, silu=True),
            lambda x, gate: gate_mul_reference(x, gate, silu=True),
            BF16_TOLERANCE,
        ),
        GpuRowCase(
            "sigmoid",
            (heads_in, gate),
            lambda x, gate: kernels.gate_mul(x, gate, silu=False),
            lambda x, gate: gate_mul_reference(x, gate, silu=False),
            BF16_TOLERANCE,
        ),
        GpuRowCase("argmax-ids", (logits,), lambda x: kernels.argmax(x)[0], lambda x: argmax_reference(x)[0], 0.0),
        GpuRowCase(
            "gumbel_argmax",
            (logits, seeds, positions),
            lambda logits, seeds, positions: kernels.gumbel_argmax(logits, seeds, positions, 1),
            lambda logits, seeds, positions: gumbel_argmax_reference(logits.float(), seeds, positions, 1),
            0.0,
        ),
        GpuRowCase(
            "argmax-logprobs", (logits,), lambda x: kernels.argmax(x)[1], lambda x: argmax_reference(x)[1], 2.0**-18
        ),
    ]
