# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: one step function, walked along root-to-leaf paths for decode, verify, prefill and commit.

A program holds a few columns of one head's state in the registers of its one warp, in an order of keys that is the same
in all builds (`delta_step.py`). Rows that paths share get the same bits from each.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.device import IS_INTERPRETED
from tandem_kernels.gpu.conv import prepare
from tandem_kernels.gpu.delta_step import load_operands, load_state, read, store_output, store_state, walk_path
from tandem_kernels.gpu.language import capability, launch
from tandem_kernels.gpu.trees import plan_trees
from tandem_kernels.state_memory import PassedState, padded_keys
from tandem_kernels.tree_plan import TreePlan

# Columns of a state in one program, and rows whose operands it holds. A long pass is one chain, for which there must be
# many programs that rarely wait; a tree has paths enough, so there the registers are what bounds how many run at once.
# In the interpreter a program is slow.
SHORT = (64 if IS_INTERPRETED else 16, 2)
SHORT_REGISTERS = {90: 168}  # at most, by architecture, where that was measured and spills none
LONG = (64 if IS_INTERPRETED else 8, 3)
PATHS = 16  # walked at the same time by different programs; one program takes every PATHS-th


@triton.jit(
    do_not_specialize=["num_rows", "longest"],
    do_not_specialize_on_alignment=["row_slots", "depths", "roots", "paths", "leaves", "siblings"],
)
def gated_delta_kernel(
    qkv,
    state,
    row_slots,
    depths,
    roots,
    paths,
    leaves,
    siblings,
    out,
    passed,
    passed_row,
    slot_stride,
    head_stride,
    key_stride,
    num_rows,
    longest,
    width: tl.constexpr,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SETS: tl.constexpr,
):
    """Columns of a head: from the state that a slot keeps along the path above a leaf, then its leaf siblings' outputs.

    Rows above are written by each path that they are on, with the same bits. passed, passed_row: a PassedState or None.
    """
    head = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    for leaf in range(tl.program_id(2), tl.load(leaves), tl.num_programs(2)):
        row = tl.load(leaves + 1 + leaf)
        sibling, slot = tl.load(siblings + row), tl.load(row_slots + row).to(tl.int64)
        root, depth = tl.load(roots + row), tl.load(depths + row)
        if sibling >= 0:
            source = state + slot * slot_stride + head * head_stride
            parts = load_state(source, key_stride, columns, dk, dv, KEYS)
            path = paths + row.to(tl.int64) * longest
            parts = walk_path(
                qkv, parts, out, path, root, depth + 1, depth, width, head, key_heads, value_heads, dv, KEYS,
                columns, SETS, False,
            )  # fmt: skip
            if passed is not None:
                is_long = (root >= 0) & (2 * depth > num_rows)
                store_state(passed + head * head_stride, parts, key_stride, columns, dk, dv, is_long)
                tl.store(passed_row, row - 1, mask=is_long)
            while row < num_rows:
                at = row.to(tl.int64)
                operands = load_operands(qkv, at, width, head, key_heads, value_heads, dv, KEYS, columns)
                _, o = read(parts, operands)
                store_output(out, at, o, head, value_heads, dv, columns)
                row = sibling
                if row < num_rows:
                    sibling = -1 - tl.load(siblings + row)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["slots", "path_starts", "path_rows"])
def commit_delta_kernel(
    qkv,
    state,
    slots,
    path_starts,
    path_rows,
    passed,
    passed_row,
    slot_stride,
    head_stride,
    key_stride,
    qkv_layer_stride,
    state_layer_stride,
    passed_layer_stride,
    num_seqs,
    width: tl.constexpr,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SETS: tl.constexpr,
):
    """Columns of a layer's head: from a slot's state along a path, or from the PassedState of a row at its end."""
    head = tl.program_id(1)
    seq, layer = tl.program_id(2) % num_seqs, (tl.program_id(2) // num_seqs).to(tl.int64)
    first = tl.load(path_starts + seq)
    length = tl.load(path_starts + seq + 1) - first
    if length > 0:
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        slot = tl.load(slots + seq).to(tl.int64)
        target = state + layer * state_layer_stride + slot * slot_stride + head * head_stride
        rows = qkv + layer * qkv_layer_stride
        path, steps, source = path_rows + first, length, target
        if passed is not None:
            end, row = path + length - 1, tl.load(passed_row)
            is_end = tl.load(end) == row
            is_passed = is_end | (tl.load(end - 1, mask=length > 1, other=-2) == row)
            source = tl.where(is_passed, passed + layer * passed_layer_stride + head * head_stride, target)
            skipped = tl.where(is_passed, length - 1, 0)
            path, length = path + skipped, length - skipped
            steps = tl.where(is_end, 0, length)
        parts = load_state(source, key_stride, columns, dk, dv, KEYS)
        parts = walk_path(
            rows, parts, rows, path, -1, length, steps, width, head, key_heads, value_heads, dv, KEYS, columns, SETS,
            True,
        )  # fmt: skip
        store_state(target, parts, key_stride, columns, dk, dv, True)


def walk(
    qkv: Tensor, state: Tensor, row_slots: Tensor, key_heads: int, trees: TreePlan, passed: PassedState | None = None
) -> Tensor:
    """Outputs [rows, value_heads * dv] float32 of prepared rows; state [slots, value_heads, dk, dv], dv contiguous."""
    assert state.stride(3) == 1
    assert passed is None or passed.state.stride() == state.stride()[1:]
    rows, (_, value_heads, dk, dv) = qkv.shape[0], state.shape
    out = torch.empty(rows, value_heads * dv, dtype=torch.float32, device=qkv.device)
    plan = (trees.depths, trees.roots, trees.paths, trees.leaves, trees.siblings)
    sizes = (rows, trees.paths.shape[1], qkv.shape[1], key_heads, value_heads, dk, dv, padded_keys(dk))
    args = (qkv, state, row_slots, *plan, out, *_pointers(passed), *state.stride()[:3], *sizes)
    columns, sets = SHORT if passed is None else LONG
    registers = SHORT_REGISTERS.get(capability()) if passed is None else None
    grid = (triton.cdiv(dv, columns), value_heads, min(rows, PATHS))
    launch(gated_delta_kernel, grid, *args, COLUMNS=columns, SETS=sets, num_warps=1, maxnreg=registers)
    return out


def commit(
    qkv: Sequence[Tensor],
    states: Sequence[Tensor],
    slots: Tensor,
    path_starts: Tensor,
    path_rows: Tensor,
    key_heads: int,
    strides: tuple[int, int, int],
    passed: PassedState | None = None,
) -> None:
    """Advance states by the prepared rows of each path.

    strides: elements from a layer's qkv, states and passed state to the next one's; passed: the first layer's.
    """
    assert states[0].stride(3) == 1
    _, value_heads, dk, dv = states[0].shape
    sizes = (len(slots), qkv[0].shape[1], key_heads, value_heads, dk, dv, padded_keys(dk))
    path = (slots, path_starts, path_rows)
    args = (qkv[0], states[0], *path, *_pointers(passed), *states[0].stride()[:3], *strides, *sizes)
    columns, sets = SHORT
    grid = (triton.cdiv(dv, columns), value_heads, len(slots) * len(qkv))
    launch(commit_delta_kernel, grid, *args, COLUMNS=columns, SETS=sets, num_warps=1)


def _pointers(passed: PassedState | None) -> tuple[Tensor | None, Tensor | None]:
    return (passed.state, passed.row) if passed is not None else (None, None)


def gated_delta(
    qkv: Tensor,
    ab: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    seq_starts: Tensor,
    parents: Tensor,
    key_heads: int,
    trees: TreePlan | None = None,
) -> Tensor:
    rows = torch.arange(len(parents), dtype=torch.int32, device=parents.device)
    row_seqs = torch.searchsorted(seq_starts[1:].contiguous(), rows, right=True, out_int32=True)
    trees = trees or plan_trees(parents, row_seqs)
    row_seqs = row_seqs.clamp(max=len(slots) - 1)  # of padding: any
    _, value_heads, dk, dv = state.shape
    prepared = prepare(qkv, None, ab, a_log, dt_bias, (key_heads, value_heads, dk, dv))
    return walk(prepared, state, slots[row_seqs.long()], key_heads, trees)


def gated_delta_commit(
    qkv: Tensor,
    ab: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    path_starts: Tensor,
    path_rows: Tensor,
    key_heads: int,
) -> None:
    _, value_heads, dk, dv = state.shape
    prepared = prepare(qkv, None, ab, a_log, dt_bias, (key_heads, value_heads, dk, dv))
    commit([prepared], [state], slots, path_starts, path_rows, key_heads, (0, 0, 0))
