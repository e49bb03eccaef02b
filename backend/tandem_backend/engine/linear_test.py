# SPDX-License-Identifier: Apache-2.0
"""Every shape of linear layer of a model: rows alone against the same rows among others, bit for bit."""

import random
from collections.abc import Sequence

import tandem_kernels as kernels
import torch
from tandem_kernels import PackedWeight
from torch import Tensor

from tandem_backend.errors import SelfTestError

ROW_COUNTS = (1, 2, 7, 16, 33, 64, 65)  # several of the builds that a device picks by row count
MOST_ROWS = 160


def compare_linears(weights: Sequence[PackedWeight], device: torch.device, seed: int = 0) -> int:
    """Rows compared, over all (outputs, inputs) there are. Raises SelfTestError naming the shape that differs."""
    shapes = {(weight.num_outputs, weight.num_inputs): weight for weight in weights}
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_rows = 0
    for weight in shapes.values():
        x = torch.randn(MOST_ROWS, weight.num_inputs, generator=generator).to(device, kernels.row_dtype(device))
        num_rows += _compare(weight, x, rng)
    return num_rows


def _compare(weight: PackedWeight, x: Tensor, rng: random.Random) -> int:
    whole = kernels.linear(x, weight)
    for count in ROW_COUNTS:
        first = rng.randrange(MOST_ROWS - count)
        part = kernels.linear(x[first : first + count], weight)
        if not torch.equal(part, whole[first : first + count]):
            raise SelfTestError(
                f"a linear layer of {weight.num_outputs} outputs and {weight.num_inputs} inputs gives other bits for "
                f"{count} rows than for the same rows among {MOST_ROWS}; this machine or build breaks the promise of "
                "exact rows"
            )
    return sum(ROW_COUNTS)
