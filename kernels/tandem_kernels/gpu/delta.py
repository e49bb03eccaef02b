# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: one step function, walked along root-to-leaf paths for decode, verify, prefill and commit.

A program holds a few columns of one head's state in the registers of its one warp, laid out as the state's load asks in
all builds, so the order of the sums over keys is the same in all. Rows that paths share get the same bits from each.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.device import IS_INTERPRETED
from tandem_kernels.gpu.conv import prepare, update_conv_states
from tandem_kernels.gpu.language import launch, next_power_of_2
from tandem_kernels.gpu.trees import plan_trees
from tandem_kernels.tree_plan import TreePlan

if TYPE_CHECKING:
    from tandem_kernels.layers import DeltaLayer

COLUMNS = 64 if IS_INTERPRETED else 16  # of a state in one program; few programs where each is slow
PATHS = 16  # walked at the same time by different programs; one program takes every PATHS-th


@triton.jit
def _read(state, q, k, v, decay, strength):
    """state: [keys, columns] before the row. Returns what the row adds along k, and its output."""
    stored = tl.sum(state * k[:, None], 0)
    read = tl.sum(state * q[:, None], 0)
    delta = (v - decay * stored) * strength
    return delta, tl.fma(read, decay + tl.zeros_like(read), tl.sum(k * q) * delta)


@triton.jit
def _step(state, q, k, v, decay, strength):
    """Returns the state after the row and the row's output."""
    delta, out = _read(state, q, k, v, decay, strength)
    keys = tl.broadcast_to(k[:, None], state.shape)
    return tl.fma(keys, tl.broadcast_to(delta[None, :], state.shape), state * decay), out


@triton.jit
def _row(path, root, t, HAS_LIST: tl.constexpr):
    if HAS_LIST:
        return tl.load(path + t).to(tl.int64)
    else:
        return tl.where(root >= 0, root + t, tl.load(path + t, mask=root < 0, other=0)).to(tl.int64)


@triton.jit
def _operands(
    qkv,
    row,
    width: tl.constexpr,
    head,
    value_heads: tl.constexpr,
    key_heads: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    keys,
    columns,
):
    """q, k [keys], v [columns], decay and strength of one row and head."""
    source = qkv + row * width
    key_head = head // (value_heads // key_heads)
    q = tl.load(source + key_head * dk + keys, mask=keys < dk, other=0.0)
    k = tl.load(source + (key_heads + key_head) * dk + keys, mask=keys < dk, other=0.0)
    v = tl.load(source + 2 * key_heads * dk + head * dv + columns, mask=columns < dv, other=0.0)
    decay = tl.load(source + width - 2 * value_heads + head)
    strength = tl.load(source + width - value_heads + head)
    return q, k, v, decay, strength


@triton.jit
def _walk(
    qkv,
    state,
    out,
    path,
    root,
    length,
    steps,
    width: tl.constexpr,
    head,
    value_heads: tl.constexpr,
    key_heads: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    keys,
    columns,
    IS_COMMIT: tl.constexpr,
):
    """Steps along a path of `length` rows. The next two rows' operands are on their way while a row is worked on.

    Returns the state after `steps` rows, and the next row's operands if there is one.
    """
    row = _row(path, root, 0, IS_COMMIT)
    q, k, v, decay, strength = _operands(qkv, row, width, head, value_heads, key_heads, dk, dv, keys, columns)
    row1 = _row(path, root, min(1, length - 1), IS_COMMIT)
    q1, k1, v1, d1, s1 = _operands(qkv, row1, width, head, value_heads, key_heads, dk, dv, keys, columns)
    for t in range(steps):
        row2 = _row(path, root, min(t + 2, length - 1), IS_COMMIT)
        q2, k2, v2, d2, s2 = _operands(qkv, row2, width, head, value_heads, key_heads, dk, dv, keys, columns)
        state, o = _step(state, q, k, v, decay, strength)
        if not IS_COMMIT:
            tl.store(out + row * value_heads * dv + head * dv + columns, o, mask=columns < dv)
        row, q, k, v, decay, strength = row1, q1, k1, v1, d1, s1
        row1, q1, k1, v1, d1, s1 = row2, q2, k2, v2, d2, s2
    return state, q, k, v, decay, strength


@triton.jit(do_not_specialize=["num_rows", "longest"])
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
    slot_stride,
    head_stride,
    key_stride,
    column_stride,
    num_rows,
    longest,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PATHS: tl.constexpr,
):
    """Columns of a head: from the state that a slot keeps along the path above a leaf, then its leaf siblings' outputs.

    Rows above are written by each path that they are on, with the same bits.
    """
    head = tl.program_id(1)
    keys = tl.arange(0, KEYS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (keys < dk)[:, None] & (columns < dv)[None, :]
    place = head * head_stride + keys[:, None] * key_stride + columns[None, :] * column_stride
    width: tl.constexpr = 2 * key_heads * dk + value_heads * dv + 2 * value_heads
    for leaf in range(tl.program_id(2), tl.load(leaves), PATHS):
        row = tl.load(leaves + 1 + leaf)
        sibling, slot = tl.load(siblings + row), tl.load(row_slots + row).to(tl.int64)
        root, depth = tl.load(roots + row), tl.load(depths + row)
        if sibling >= 0:
            matrix = tl.load(state + slot * slot_stride + place, mask=inside, other=0.0)
            path = paths + row.to(tl.int64) * longest
            matrix, q, k, v, decay, strength = _walk(
                qkv, matrix, out, path, root, depth + 1, depth, width, head, value_heads, key_heads, dk, dv, keys,
                columns, False,
            )  # fmt: skip
            while row < num_rows:
                _, o = _read(matrix, q, k, v, decay, strength)
                target = out + row.to(tl.int64) * value_heads * dv + head * dv
                tl.store(target + columns, o, mask=columns < dv)
                row = sibling
                if row < num_rows:
                    q, k, v, decay, strength = _operands(
                        qkv, row.to(tl.int64), width, head, value_heads, key_heads, dk, dv, keys, columns
                    )
                    sibling = -1 - tl.load(siblings + row)


@triton.jit(do_not_specialize=["num_seqs"])
def commit_delta_kernel(
    qkv,
    state,
    slots,
    path_starts,
    path_rows,
    slot_stride,
    head_stride,
    key_stride,
    column_stride,
    qkv_layer_stride,
    state_layer_stride,
    num_seqs,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head = tl.program_id(1)
    seq, layer = tl.program_id(2) % num_seqs, (tl.program_id(2) // num_seqs).to(tl.int64)
    first = tl.load(path_starts + seq)
    length = tl.load(path_starts + seq + 1) - first
    if length > 0:
        keys = tl.arange(0, KEYS)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (keys < dk)[:, None] & (columns < dv)[None, :]
        place = head * head_stride + keys[:, None] * key_stride + columns[None, :] * column_stride
        width: tl.constexpr = 2 * key_heads * dk + value_heads * dv + 2 * value_heads
        target = state + layer * state_layer_stride + tl.load(slots + seq).to(tl.int64) * slot_stride + place
        rows = qkv + layer * qkv_layer_stride
        matrix = tl.load(target, mask=inside, other=0.0)
        path = path_rows + first
        matrix, _, _, _, _, _ = _walk(
            rows,
            matrix,
            rows,
            path,
            -1,
            length,
            length,
            width,
            head,
            value_heads,
            key_heads,
            dk,
            dv,
            keys,
            columns,
            True,
        )
        tl.store(target, matrix, mask=inside)


def walk(qkv: Tensor, state: Tensor, row_slots: Tensor, key_heads: int, trees: TreePlan) -> Tensor:
    """Outputs [rows, value_heads * dv] float32 of prepared rows; state [slots, value_heads, dk, dv], any strides."""
    rows, (_, value_heads, dk, dv) = qkv.shape[0], state.shape
    out = torch.empty(rows, value_heads * dv, dtype=torch.float32, device=qkv.device)
    plan = (trees.depths, trees.roots, trees.paths, trees.leaves, trees.siblings)
    sizes = (rows, trees.paths.shape[1], key_heads, value_heads, dk, dv)
    args = (qkv, state, row_slots, *plan, out, *state.stride(), *sizes)
    paths = min(rows, PATHS)
    grid = (triton.cdiv(dv, COLUMNS), value_heads, paths)
    launch(gated_delta_kernel, grid, *args, KEYS=next_power_of_2(dk), COLUMNS=COLUMNS, PATHS=paths, num_warps=1)
    return out


def commit(
    qkv: Sequence[Tensor],
    states: Sequence[Tensor],
    slots: Tensor,
    path_starts: Tensor,
    path_rows: Tensor,
    key_heads: int,
    strides: tuple[int, int],
) -> None:
    """Advance states by the prepared rows of each path; strides: elements from a layer's tensors to the next one's."""
    _, value_heads, dk, dv = states[0].shape
    sizes = (len(slots), key_heads, value_heads, dk, dv)
    args = (qkv[0], states[0], slots, path_starts, path_rows, *states[0].stride(), *strides, *sizes)
    grid = (triton.cdiv(dv, COLUMNS), value_heads, len(slots) * len(qkv))
    launch(commit_delta_kernel, grid, *args, KEYS=next_power_of_2(dk), COLUMNS=COLUMNS, num_warps=1)


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
    commit([prepared], [state], slots, path_starts, path_rows, key_heads, (0, 0))


def commit_delta_layers(
    layers: Sequence["DeltaLayer"],
    projected: Sequence[Tensor],
    qkv: Sequence[Tensor],
    conv_states: Sequence[Tensor],
    delta_states: Sequence[Tensor],
    slots: Tensor,
    path_starts: Tensor,
    path_rows: Tensor,
) -> None:
    """One launch for all layers where their tensors lie at equal distances, else one a layer."""
    distances = [_distance(tensors) for tensors in (qkv, delta_states, projected, conv_states)]
    groups = [slice(0, len(layers))] if None not in distances else [slice(i, i + 1) for i in range(len(layers))]
    qkv_stride, delta_stride, x_stride, conv_stride = (distance or 0 for distance in distances)
    path = (slots, path_starts, path_rows)
    for part in groups:
        commit(qkv[part], delta_states[part], *path, layers[0].key_heads, (qkv_stride, delta_stride))
        update_conv_states(projected[part], conv_states[part], *path, (x_stride, conv_stride))


def _distance(tensors: Sequence[Tensor]) -> int | None:
    """Elements from each tensor to the next; None where that differs or is no whole number."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    steps = {after - before for before, after in pairwise(addresses)} or {0}
    step, size = steps.pop(), tensors[0].element_size()
    return None if steps or step % size else step // size
