# SPDX-License-Identifier: Apache-2.0
"""Kernels whose rows are independent, as cases for the general tests: inputs, call, reference twin, tolerance."""

from collections.abc import Callable
from dataclasses import dataclass

import tandem_kernels as kernels
import torch
from tandem_kernels.argmax import argmax_reference
from tandem_kernels.gate_mul import gate_mul_reference
from tandem_kernels.linear import linear_reference
from tandem_kernels.rms_norm import gated_rms_norm_reference, rms_norm_reference
from tandem_kernels.rope import rope_reference
from torch import Tensor

EPS = 1e-6
ROUNDING = 2.0**-24  # half a unit in the last place, relative


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


@dataclass(frozen=True)
class RowCase:
    """An op whose rows are independent. `run` takes the row inputs; so does `reference`, in float64."""

    name: str
    inputs: tuple[Tensor, ...]  # each [rows, ...]
    run: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    # Largest difference allowed, as a multiple of ROUNDING times the size of what is added up.
    roundings: float
    magnitude: Callable[..., Tensor] | None = None  # what the error grows with; None: the output itself
    strided: tuple[bool, ...] = ()  # which inputs may have any row stride


def _linear_case(name: str, rows: int, outputs: int, k: int, dtype: torch.dtype, has_residual: bool) -> RowCase:
    g = torch.Generator().manual_seed(outputs * 1000 + k)
    weight = _randn(g, outputs, k).to(dtype)
    packed = kernels.pack_weight(weight)
    inputs = (_randn(g, rows, k), _randn(g, rows, outputs)) if has_residual else (_randn(g, rows, k),)

    def magnitude(x: Tensor, *residual: Tensor) -> Tensor:
        return linear_reference(x.abs(), weight.abs(), *(r.abs() for r in residual))

    return RowCase(
        name,
        inputs,
        lambda x, *residual: kernels.linear(x, packed, *residual),
        lambda x, *residual: linear_reference(x, weight, *residual),
        # The classical bound: one rounding a term, one for the residual.
        k + 1,
        magnitude,
        (True, False)[: len(inputs)],
    )


def row_cases(rows: int = 9) -> list[RowCase]:
    """Nine rows fill the linear kernel's tiles of four twice and leave one over. No width is a multiple of 16."""
    g = torch.Generator().manual_seed(7)
    dim, heads, head_dim, vocab = 53, 3, 22, 1003
    norm, head_norm = 1 + 0.2 * _randn(g, dim), 1 + 0.2 * _randn(g, head_dim)
    cos, sin = kernels.rope_tables(500, 10, 10000.0, None)
    positions = torch.randint(0, 500, (rows,), generator=g, dtype=torch.int32)
    wide = _randn(g, rows, dim)
    heads_in, gate = _randn(g, rows, heads * head_dim), 4 * _randn(g, rows, heads * head_dim)
    logits = 5 * _randn(g, rows, vocab)
    logits[0, [17, 801, 1002]] = 30.0  # a tie: the lowest id wins
    logits[1, :1000] = float("-inf")
    return [
        _linear_case("linear-bf16", rows, 131, 67, torch.bfloat16, has_residual=False),
        _linear_case("linear-bf16-residual", rows, 64, 70, torch.bfloat16, has_residual=True),
        _linear_case("linear-f32", rows, 131, 67, torch.float32, has_residual=False),
        _linear_case("linear-f32-residual", rows, 3, 1, torch.float32, has_residual=True),
        # The sum of squares adds dim / 16 + 4 terms, half of its error enters; six more operations.
        RowCase(
            "rms_norm",
            (wide,),
            lambda x: kernels.rms_norm(x, norm, EPS),
            lambda x: rms_norm_reference(x, norm, EPS),
            dim / 16 + 10,
            strided=(True,),
        ),
        # exp of the gate: its argument reduction and polynomial cost a few more.
        RowCase(
            "gated_rms_norm",
            (heads_in, gate),
            lambda x, gate: kernels.gated_rms_norm(x, gate, head_norm, EPS),
            lambda x, gate: gated_rms_norm_reference(x, gate, head_norm, EPS),
            head_dim / 16 + 20,
            strided=(False, True),
        ),
        _rope_case("rope", heads_in, positions, None, cos, sin, head_dim),
        _rope_case("rope-norm", heads_in, positions, head_norm, cos, sin, head_dim),
        _rope_case("rope-all-dims", heads_in, positions, head_norm, *kernels.rope_tables(500, 22, 1e4, None), head_dim),
        _gate_case("gate_mul-silu", heads_in, gate, is_silu=True),
        _gate_case("gate_mul-sigmoid", heads_in, gate, is_silu=False),
        RowCase("argmax-ids", (logits,), lambda x: kernels.argmax(x)[0], lambda x: argmax_reference(x)[0], 0),
        # The log-probability is the log of a sum of exponentials: absolute error, that of the sum and of the result.
        RowCase(
            "argmax-logprobs",
            (logits,),
            lambda x: kernels.argmax(x)[1],
            lambda x: argmax_reference(x)[1],
            vocab / 16 + 10,
            lambda x: 1 + argmax_reference(x)[1].abs(),
        ),
    ]


def _rope_case(
    name: str, x: Tensor, positions: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, dim: int
) -> RowCase:
    def magnitude(x: Tensor, positions: Tensor) -> Tensor:
        rotated = rope_reference(x, weight, EPS, cos, sin, positions, dim)
        return rotated.abs().amax(-1, keepdim=True).expand_as(rotated)  # products of both halves may cancel

    return RowCase(
        name,
        (x, positions),
        lambda x, positions: kernels.rope(x, weight, EPS, cos, sin, positions, dim),
        lambda x, positions: rope_reference(x, weight, EPS, cos, sin, positions, dim),
        dim / 16 + 12,
        magnitude,
        (True, False),
    )


def _gate_case(name: str, x: Tensor, gate: Tensor, *, is_silu: bool) -> RowCase:
    return RowCase(
        name,
        (x, gate),
        lambda x, gate: kernels.gate_mul(x, gate, silu=is_silu),
        lambda x, gate: gate_mul_reference(x, gate, silu=is_silu),
        12,
        strided=(True, True),
    )
