# SPDX-License-Identifier: Apache-2.0
"""Plans of draft trees, made on the device: see tree_plan.py for what they say."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.gpu.language import launch
from tandem_kernels.tree_plan import TreePlan

MAX_DEPTH = 256


@triton.jit
def _chain_start(parents, row, BLOCK: tl.constexpr):
    """The first of the rows before `row` that are each the parent of the next."""
    start = tl.full((), -1, tl.int32)
    end = row
    while start < 0:
        rows = end - tl.arange(0, BLOCK)
        parent = tl.load(parents + rows, mask=rows >= 0, other=-1)
        starts = (parent < 0) | (parent != rows - 1)
        start = tl.max(tl.where(starts, rows, -1))
        end -= BLOCK
    return start


@triton.jit
def _append(rows_list, count, rows, is_listed):
    """Write the listed ones of rows after `count` others. Returns the new count."""
    number = tl.cumsum(is_listed.to(tl.int32))
    tl.store(rows_list + count + number, rows, mask=is_listed)
    return count + tl.sum(is_listed.to(tl.int32))


@triton.jit
def _list_rows(parents, row_seqs, leaves, runs, num_rows, BLOCK: tl.constexpr):
    num_leaves = tl.zeros((), tl.int32)
    num_runs = tl.zeros((), tl.int32)
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        parent = tl.load(parents + rows, mask=rows < num_rows, other=-2)
        next_parent = tl.load(parents + rows + 1, mask=rows + 1 < num_rows, other=-2)
        num_leaves = _append(leaves, num_leaves, rows, (parent > -2) & (next_parent != rows))
        seq = tl.load(row_seqs + rows, mask=rows < num_rows, other=0)
        is_first = (rows == 0) | (seq != tl.load(row_seqs + rows - 1, mask=(rows > 0) & (rows < num_rows), other=0))
        num_runs = _append(runs, num_runs, rows, (rows < num_rows) & is_first)
    tl.store(leaves, num_leaves)
    tl.store(runs, num_runs)


@triton.jit
def _first_of_sequence(row_seqs, row, BLOCK: tl.constexpr):
    seq = tl.load(row_seqs + row)
    before = tl.full((), -2, tl.int32)  # the last row before that is another sequence's
    end = row
    while before < -1:
        rows = end - tl.arange(0, BLOCK)
        is_other = (rows < 0) | (tl.load(row_seqs + rows, mask=rows >= 0, other=0) != seq)
        before = tl.max(tl.where(is_other, tl.maximum(rows, -1), -2))
        end -= BLOCK
    return before + 1


@triton.jit
def _siblings(parents, row, num_rows, BLOCK: tl.constexpr):
    """What TreePlan.siblings says of a leaf."""
    parent = tl.load(parents + row)
    following = num_rows + 0
    is_first = 1
    if parent >= 0:
        for start in range(parent + 1, num_rows, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            is_child = tl.load(parents + rows, mask=rows < num_rows, other=-2) == parent
            is_leaf = is_child & (tl.load(parents + rows + 1, mask=rows + 1 < num_rows, other=-2) != rows)
            following = tl.minimum(following, tl.min(tl.where(is_leaf & (rows > row), rows, num_rows)))
            is_first = tl.minimum(is_first, tl.min(tl.where(is_leaf & (rows < row), 0, 1)))
    return tl.where(is_first == 1, following, -1 - following)


@triton.jit(do_not_specialize=["num_rows"])
def plan_kernel(
    parents,
    row_seqs,
    depths,
    roots,
    firsts,
    paths,
    leaves,
    siblings,
    runs,
    num_rows,
    longest,
    BLOCK: tl.constexpr,
):
    """A program a row, and one for the lists of leaves and runs."""
    row = tl.program_id(0)
    if row == num_rows:
        _list_rows(parents, row_seqs, leaves, runs, num_rows, BLOCK)
    else:
        tl.store(firsts + row, _first_of_sequence(row_seqs, row, BLOCK))
        start = _chain_start(parents, row, BLOCK)
        parent = tl.load(parents + start)
        depth = row - start
        tl.store(roots + row, tl.where(parent < 0, start, -1))
        while parent >= 0:
            begin = _chain_start(parents, parent, BLOCK)
            depth += parent - begin + 1
            parent = tl.load(parents + begin)
        tl.store(depths + row, tl.where(tl.load(parents + row) == -2, -1, depth))
        if tl.load(parents + row + 1, mask=row + 1 < num_rows, other=-2) != row:
            tl.store(siblings + row, _siblings(parents, row, num_rows, BLOCK))
        # The same walk again, writing each chain of rows to its depths.
        parent = tl.load(parents + start)
        if parent >= 0:
            end = row
            while end >= 0:
                begin = _chain_start(parents, end, BLOCK)
                for first in range(0, end - begin + 1, BLOCK):
                    up = first + tl.arange(0, BLOCK)
                    place = depth - up
                    inside = (up <= end - begin) & (place < longest)
                    tl.store(paths + row.to(tl.int64) * longest + place, end - up, mask=inside)
                depth -= end - begin + 1
                end = tl.load(parents + begin)


def plan_trees(parents: Tensor, row_seqs: Tensor) -> TreePlan:
    rows, device = len(parents), parents.device
    longest = min(rows, MAX_DEPTH)
    sizes = [rows, rows, rows, rows * longest, rows + 1, rows, rows + 1]
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    depths, roots, firsts, paths, leaves, siblings, runs = parts
    plan = TreePlan(depths, roots, firsts, paths.view(rows, longest), leaves, siblings, runs)
    args = (parents, row_seqs, *parts, rows, longest)
    launch(plan_kernel, (rows + 1,), *args, BLOCK=128, num_warps=1)
    return plan
