# SPDX-License-Identifier: Apache-2.0
"""Kernels without ancestors: near their reference in float64, and each row's bits independent of all else."""

import pytest
import torch
from fakes.bits import assert_same_bits
from row_cases import ROUNDING, RowCase, row_cases
from tandem_kernels import pack_weight
from tandem_kernels.linear import unpack_weight
from torch import Tensor

CASES = row_cases()


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> RowCase:
    return request.param


def _as_float64(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in inputs]


def _inside_nan(x: Tensor) -> Tensor:
    """The same values as a view into a larger tensor that is NaN around them."""
    big = torch.full((x.shape[0] + 2, x.shape[1] + 5), float("nan"))
    view = big[1:-1, 2 : 2 + x.shape[1]]
    view.copy_(x)
    return view


def test_near_the_float64_reference(case: RowCase) -> None:
    exact = _as_float64(case.inputs)
    expected = case.reference(*exact)
    size = (case.magnitude or case.reference)(*exact).abs()
    error = (case.run(*case.inputs).double() - expected).abs()
    assert (error <= case.roundings * ROUNDING * size).all(), (error / (ROUNDING * size)).max()


def test_any_number_of_rows(case: RowCase) -> None:
    full = case.run(*case.inputs)
    for n in range(1, len(full)):
        assert_same_bits(case.run(*(x[:n].contiguous() for x in case.inputs)), full[:n])
    for row in range(len(full)):
        assert_same_bits(case.run(*(x[row : row + 1].contiguous() for x in case.inputs)), full[row : row + 1])


def test_no_rows(case: RowCase) -> None:
    full = case.run(*case.inputs)
    assert case.run(*(x[:0] for x in case.inputs)).shape == full[:0].shape


def test_rows_in_another_order(case: RowCase) -> None:
    order = torch.randperm(len(case.inputs[0]), generator=torch.Generator().manual_seed(1))
    assert_same_bits(case.run(*(x[order] for x in case.inputs)), case.run(*case.inputs)[order])


def test_other_rows_may_be_nan(case: RowCase) -> None:
    full = case.run(*case.inputs)
    for row in range(len(full)):
        poisoned = []
        for x in case.inputs:
            others = torch.full_like(x, float("nan")) if x.is_floating_point() else x.clone()
            others[row] = x[row]
            poisoned.append(others)
        assert_same_bits(case.run(*poisoned)[row : row + 1], full[row : row + 1])


@pytest.mark.parametrize(
    "case", [case for case in CASES if any(case.strided)], ids=lambda case: case.name, indirect=True
)
def test_strided_rows_inside_nan(case: RowCase) -> None:
    inputs = [_inside_nan(x) if strided else x for x, strided in zip(case.inputs, case.strided, strict=True)]
    assert_same_bits(case.run(*inputs), case.run(*case.inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (64, 2), (65, 3), (131, 67)])
def test_packing_keeps_every_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(unpack_weight(pack_weight(weight)), weight.float())
    assert torch.equal(unpack_weight(pack_weight(weight.repeat(1, 2)[:, : shape[1]])), weight.float())
