# SPDX-License-Identifier: Apache-2.0
"""GPU ops without ancestors: near their reference, and each row's bits independent of all else."""

import sys

import pytest
import torch
from fakes.bits import assert_same_bits
from gpu_cases import (
    BF16,
    BF16_TOLERANCE,
    F32_TOLERANCE,
    LINEAR_NAMES,
    ROWS,
    GpuRowCase,
    Source,
    linear_cases,
    row_cases,
)
from tandem_kernels import gate_mul
from tandem_kernels.device import IS_INTERPRETED
from tandem_kernels.gate_mul import gate_mul_reference
from tandem_kernels.gpu.linear import LONG_TILES, SQUARE_TILES, Tiles, choose_tiles, linear, pack_weight, run_linear
from tandem_kernels.linear import linear_reference

CPU = torch.device("cpu")
linear_module = sys.modules[linear.__module__]


@pytest.fixture(scope="module")
def cases(device: torch.device) -> dict[str, GpuRowCase]:
    return {case.name: case for case in (*row_cases(device), *linear_cases(device))}


@pytest.fixture(params=[*(case.name for case in row_cases(CPU, 2)), *LINEAR_NAMES])
def case(request: pytest.FixtureRequest, cases: dict[str, GpuRowCase]) -> GpuRowCase:
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


@pytest.mark.parametrize("tiles", [SQUARE_TILES, LONG_TILES], ids=["square", "long"])
@pytest.mark.parametrize("has_residual", [False, True])
def test_large_tiles_give_the_bits_of_small_ones(device: torch.device, tiles: Tiles, has_residual: bool) -> None:
    rows, outputs, inputs = (130, 330, 72) if IS_INTERPRETED else (300, 5000, 5120)
    source = Source(device, rows)
    weight, x = source.weight(outputs, inputs), source(rows, inputs, dtype=BF16)
    residual = source(rows, outputs) if has_residual else None
    out = torch.full((rows, outputs), float("nan"), device=device)
    run_linear(x, pack_weight(weight).data, residual, out, tiles, is_gated=False)
    few = slice(rows - 20, rows)
    some = linear(x[few], pack_weight(weight), residual[few] if residual is not None else None)
    assert_same_bits(out[few], some)
    expected = linear_reference(x.double(), weight.double(), residual.double() if residual is not None else None)
    assert (out.double() - expected).abs().max() <= F32_TOLERANCE * expected.abs().max()


def test_large_tiles_leave_few_processors_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_num_processors", lambda: 132)
    monkeypatch.setattr(linear_module, "_has_copy_engine", lambda: True)
    assert choose_tiles(1024, 5120, 17408, is_gated=False) == LONG_TILES  # 128 of the processors in one wave, not 320
    assert choose_tiles(1024, 16480, 5120, is_gated=False) == SQUARE_TILES
    assert choose_tiles(1024, 100, 5120, is_gated=False).outputs == SQUARE_TILES.outputs


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
