# SPDX-License-Identifier: Apache-2.0
"""What the GPU's tree kernels look up of a pass's draft trees, worked out once a pass and not once a layer."""

from dataclasses import dataclass

from torch import Tensor

from tandem_kernels.device import implementation, runs_on_gpu

PADDING = -2  # parent of a row that fills a pass up to its bucket: tree kernels skip it, what it yields is arbitrary


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Trees of a pass by row. Most rows' ancestors are the rows just before them; only the others have a list."""

    depths: Tensor  # [rows] int32, 0 for a first row, -1 for padding
    roots: Tensor  # [rows] int32, first row where the ancestors are [root, row), else -1
    firsts: Tensor  # [rows] int32, first of the neighbouring rows that share the row's sequence
    paths: Tensor  # [rows, longest] int32, root first and the row itself last; written where the root is -1
    leaves: Tensor  # [1 + rows] int32, how many rows end a path of a pre-order pass, then which
    siblings: Tensor  # [rows] int32, of one of `leaves` the next that has its parent, else rows; ~that unless the first
    runs: Tensor  # [1 + rows] int32, how many rows differ in sequence from the row before, then which


def plan_trees(parents: Tensor, row_seqs: Tensor) -> TreePlan | None:
    """None on the CPU, whose kernels follow `parents` themselves. parents, row_seqs: [rows] int32 as in `attention`.

    A row that is no chain may lie at most 256 deep.
    """
    return implementation(parents).plan_trees(parents, row_seqs) if runs_on_gpu(parents) else None
