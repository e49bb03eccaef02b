# SPDX-License-Identifier: Apache-2.0
"""GPU ops without ancestors: near their reference, and each row's bits independent of all else."""

import pytest
import torch
from fakes.bits import assert_same_bits
from gpu_cases import BF16, BF16_TOLERANCE, ROWS, GpuRowCase, Source, linear_cases, row_cases
from tandem_kernels import gate_mul
from tandem_kernels.device import IS_INTERPRETED
from tandem_kernels.gate_mul import gate_mul_reference
from tandem_kernels.gpu.linear import linear, pack_weight

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cases(device: torch.device) -> list[GpuRowCase]:
    return [*row_cases(device), *linear_cases(device)]


NAMES = [
    case.name for case in [*row_cases(CPU, 2), *linear_cases(CPU, 2)]
]  # fmt: skip


@pytest.fixture(params=range(len(NAMES)), ids=NAMES)
def case(request: pytest.FixtureRequest, cases: list[GpuRowCase]) -> GpuRowCase:
    return cases[request.param]


def test_near_the_float64_reference(case: GpuRowCase) -> None:
    expected = case.reference(*(x.double() if x.is_floating_point() else x for x in case.inputs))
    error = (case.run(*case.inputs).double() - expected).abs().max()
    assert error <= case.tolerance * expected[expected.isfinite()].abs().max()


def test_any_number_of_rows(case: GpuRowCase) -> None:
    full = case.run(*case.inputs)
    for n in range(1, ROWS):
        assert_same_bits(case.run(*(x[:n].contiguous() for x in case.inputs)), full[:n])
    for row in range(0, ROWS, 1 if IS_INTERPRETED else 7):
        assert_same_bits(case.run(*(x[row : row + 1].contiguous() for x in case.inputs)), full[row : row + 1])


def test_no_rows(case: GpuRowCase) -> None:
    assert case.run(*(x[:0] for x in case.inputs)).shape[0] == 0


def test_rows_in_another_order(case: GpuRowCase) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).to(case.inputs[0].device)
    assert_same_bits(case.run(*(x[order] for x in case.inputs)), case.run(*case.inputs)[order])


def test_other_rows_may_be_nan(case: GpuRowCase) -> None:
    full = case.run(*case.inputs)
    for row in range(0, ROWS, 2 if IS_INTERPRETED else 11):
        poisoned = []
        for x in case.inputs:
            others = torch.full_like(x, float("nan")) if x.is_floating_point() else x.clone()
            others[row] = x[row]
            poisoned.append(others)
        assert_same_bits(case.run(*poisoned)[row : row + 1], full[row : row + 1])


# The weight is the wide operand up to 64 rows, the rows above: both kernels, and parts of tiles of each.
MANY_ROWS = [70] if IS_INTERPRETED else [63, 64, 65, 127, 128, 129, 300, 1024]


@pytest.mark.parametrize("rows", MANY_ROWS)
def test_linear_with_many_rows_equals_few(device: torch.device, rows: int) -> None:
    for case in linear_cases(device, rows):
        full = case.run(*case.inputs)
        for some in (slice(0, 1), slice(rows - 3, rows), slice(5, 37)):
            assert_same_bits(case.run(*(x[some].contiguous() for x in case.inputs)), full[some])


@pytest.mark.parametrize("rows", [1, 5, *MANY_ROWS])
def test_the_gated_linear_equals_two_steps(device: torch.device, rows: int) -> None:
    source = Source(device, rows)
    outputs, inputs = (40, 72) if IS_INTERPRETED else (17408, 5120)
    packed, x = pack_weight(source.weight(2 * outputs, inputs)), source(rows, inputs, dtype=BF16)
    both = linear(x, packed)
    gated = linear(x, packed, dtype=BF16, is_gated=True)
    assert_same_bits(gated, gate_mul(both[:, outputs:], both[:, :outputs], silu=True))
    expected = gate_mul_reference(both[:, outputs:].double(), both[:, :outputs].double(), silu=True)
    assert (gated.double() - expected).abs().max() <= BF16_TOLERANCE * expected.abs().max()
