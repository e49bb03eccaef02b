# SPDX-License-Identifier: Apache-2.0
"""The compiled level and the pool's threads change no bit of any kernel."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fakes.bits import assert_same_bits
from row_cases import row_cases
from tandem_kernels import linear, pack_weight
from tandem_kernels.cpu.library import load_library, supported_levels
from torch import Tensor
from tree_cases import random_pass, tree_cases

Use = Callable[[ctypes.CDLL], None]


def _all_outputs(num_rows: int, tree_sizes: list[int]) -> dict[str, Tensor]:
    """Outputs of every kernel, and the state after the commit of a tree's first row."""
    outputs = {case.name: case.run(*case.inputs) for case in row_cases(num_rows)}
    generator = torch.Generator().manual_seed(11)
    batch = random_pass(generator, tree_sizes)
    first = batch.one_row(0)
    for group in (1, 3):
        for case in tree_cases(generator, batch.num_rows, group):
            outputs[f"{case.name}-{group}"] = case.run(batch, case.rows, case.state)
            case.commit(first, tuple(part[:1] for part in case.rows), case.state)
            for i, part in enumerate(case.state):
                outputs[f"{case.name}-{group}-state-{i}"] = part
    return outputs


def _assert_all_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, output in got.items():
        assert_same_bits(output, expected[name])


@pytest.mark.skipif("v4" not in supported_levels(), reason="this processor has one level only")
def test_levels_give_the_same_bits(use_library: Use) -> None:
    use_library(load_library("v4"))
    expected = _all_outputs(9, [13, 1, 6])
    use_library(load_library("v3"))
    _assert_all_same(_all_outputs(9, [13, 1, 6]), expected)


def test_numbers_of_threads_give_the_same_bits(private_library: ctypes.CDLL, use_library: Use) -> None:
    use_library(private_library)
    sizes = (700, [130, 40, 60])  # large enough for every kernel to be shared out
    expected = _all_outputs(*sizes)
    for num_threads in (5, 2, 1, 3):
        assert private_library.tandem_set_num_threads(num_threads) == num_threads
        _assert_all_same(_all_outputs(*sizes), expected)


def test_callers_on_several_threads_wait_for_each_other() -> None:
    case = next(case for case in row_cases(64) if case.name == "linear-bf16")
    expected = case.run(*case.inputs)
    with ThreadPoolExecutor(4) as callers:
        for output in callers.map(lambda _: case.run(*case.inputs), range(200)):
            assert_same_bits(output, expected)


def test_jobs_of_changing_size_run_every_task_once(private_library: ctypes.CDLL, use_library: Use) -> None:
    """More threads than cores: workers are often late for a job."""
    use_library(private_library)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 8, generator=generator)
    weights = [pack_weight(torch.randn(64 * panels, 8, generator=generator)) for panels in (2, 40, 3, 100)]
    expected = [linear(x, weight) for weight in weights]
    private_library.tandem_set_num_threads(8)
    for _ in range(2000):
        for weight, output in zip(weights, expected, strict=True):
            assert torch.equal(linear(x, weight), output)


def test_a_wrong_number_of_threads_is_refused(private_library: ctypes.CDLL) -> None:
    assert private_library.tandem_set_num_threads(0) == -1
    assert private_library.tandem_set_num_threads(513) == -1
