# SPDX-License-Identifier: Apache-2.0
"""Paged tree attention by fixed blocks of KEY_BLOCK positions, whatever the cache's pages are.

A block's partial result (maximum, row sum, weighted values) depends on the row and the block alone; partials merge in
block order. Rows of one sequence share a tile for blocks below the prefix's end, and, if they follow their chain's
first row, for blocks beyond it. A row reads the block that holds the end of the prefix, and a branch beyond it, alone.

The softmax row sum is a product with ones on the tensor cores: a plain sum's order would follow the register layout.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.gpu.attention_block import KEY_BLOCK, KEY_TILE
from tandem_kernels.gpu.attention_partials import OWN_BLOCKS, partial_kernel
from tandem_kernels.gpu.language import cast, contiguous_rows, launch, next_power_of_2, sigmoid
from tandem_kernels.gpu.trees import MAX_DEPTH, plan_trees
from tandem_kernels.tree_plan import TreePlan

MERGE_DIMS = 64
MAX_PARTIALS = 64 * 129  # rows times blocks in scratch at a time: 64 rows at 32k positions


@triton.jit
def _merge(maximum, total, values, block_maximum, block_total, block_values):
    """The next block's partial on top of those before it. Maxima and totals [n], values [n, dims]."""
    new_maximum = tl.maximum(maximum, block_maximum)
    base = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    fade, weight = tl.exp2(maximum - base), tl.exp2(block_maximum - base)
    total = tl.fma(total, fade, block_total * weight)
    values = tl.fma(values, tl.broadcast_to(fade[:, None], values.shape), block_values * weight[:, None])
    return new_maximum, total, values


@triton.jit
def _finish(total, values, gate, place, gate_place, inside, out, HAS_GATE: tl.constexpr):
    result = tl.div_rn(values, tl.broadcast_to(tl.where(total == 0.0, 1.0, total)[:, None], values.shape))
    result = cast(result, out.dtype.element_ty)
    if HAS_GATE:
        gates = tl.load(gate + gate_place, mask=inside, other=0.0).to(tl.float32)
        result = cast(result.to(tl.float32) * sigmoid(gates), out.dtype.element_ty)
    tl.store(out + place, result, mask=inside)


@triton.jit(do_not_specialize=["first_query", "num_blocks"])
def merge_kernel(
    partials,
    sums,
    prefix_lens,
    row_seqs,
    depths,
    gate,
    out,
    first_query,
    num_blocks,
    gate_stride,
    heads,
    dim,
    UNROLL: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Some dims of a row's head: its blocks' partials in order, divided by their row sum, times sigmoid(gate)."""
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = first_query + query
    d = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    depth = tl.load(depths + row)
    length = tl.load(prefix_lens + tl.load(row_seqs + row)) + depth + 1
    if depth >= 0:
        maximum = tl.full((1,), -float("inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        values = tl.zeros((1, DIMS), tl.float32)
        one = tl.zeros((1,), tl.int64)
        for start in range(0, tl.cdiv(length, KEY_BLOCK), UNROLL):
            for step in tl.static_range(UNROLL):
                block = start + step
                is_block = (one + block) * KEY_BLOCK < length
                place = (query * heads + head) * num_blocks + block + one
                block_maximum = tl.load(sums + place * 2, mask=is_block, other=-float("inf"))
                block_total = tl.load(sums + place * 2 + 1, mask=is_block, other=0.0)
                inside = is_block[:, None] & (d < dim)[None, :]
                block_values = tl.load(partials + place[:, None] * dim + d[None, :], mask=inside, other=0.0)
                maximum, total, values = _merge(maximum, total, values, block_maximum, block_total, block_values)
        place = (query * heads + head) * dim + d
        gate_place = query * gate_stride + head * dim + d
        inside = (d < dim)[None, :]
        _finish(total, values, gate, place[None, :], gate_place[None, :], inside, out, HAS_GATE)


def attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    prefix_lens: Tensor,
    parents: Tensor,
    row_seqs: Tensor,
    scale: float,
    trees: TreePlan | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """As the op, in bfloat16; gate: [queries, heads * dim], rows may be strided, whose sigmoid multiplies the output.

    The tables reach as far as a chain's rows do; rows of a draft may lie beyond them. A sequence's queries are
    neighbours. Scratch: heads * (dim + 2) floats a query and block of KEY_BLOCK positions, of MAX_PARTIALS at most.
    """
    queries, heads, dim = q.shape
    total_rows = k_new.shape[0]
    page_size = k_cache.shape[2]
    trees = trees or plan_trees(parents, row_seqs)
    v_new, q = contiguous_rows(v_new), q.contiguous()
    out = torch.empty(queries, heads * dim, dtype=torch.bfloat16, device=q.device)
    plan = (prefix_lens, row_seqs, trees.depths, trees.roots, trees.firsts, trees.paths, trees.runs)
    inputs = (k_new.contiguous(), v_new, k_cache, v_cache, block_tables, *plan)
    num_blocks = triton.cdiv(block_tables.shape[1] * page_size + min(total_rows, MAX_DEPTH), KEY_BLOCK.value)
    # As many runs as sequences, and padding; among a draft's earlier rows, which come in any order, any number.
    runs = block_tables.shape[0] + 1 if total_rows == queries else total_rows
    at_once = min(queries, max(MAX_PARTIALS // num_blocks, 1))
    partials = torch.empty(at_once, heads, num_blocks, dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(at_once, heads, num_blocks, 2, dtype=torch.float32, device=q.device)
    for start in range(0, queries, at_once):
        rows = slice(start, start + at_once)
        first = total_rows - queries + start
        _partials(q[rows], inputs, partials, sums, first, runs, scale)
        _merged(partials, sums, plan[:3], first, out[rows], None if gate is None else gate[rows], heads)
    return out


def _partials(
    q: Tensor, inputs: tuple[Tensor, ...], partials: Tensor, sums: Tensor, first_query: int, runs: int, scale: float
) -> None:
    queries, heads, dim = q.shape
    _, v_new, k_cache, _, block_tables, *_, paths, _ = inputs
    _, kv_heads, page_size, _ = k_cache.shape
    group, num_blocks = heads // kv_heads, partials.shape[2]
    own_tile = max(16, next_power_of_2(group))
    rows_a_sequence = triton.cdiv(queries, block_tables.shape[0])
    tile, stages, num_warps = choose_tile(rows_a_sequence * group, own_tile, num_blocks)
    own_rows = 1 if queries <= 64 else 8
    tiles = triton.cdiv(queries, tile // group) + runs
    programs = triton.cdiv(queries, own_rows) * OWN_BLOCKS.value + tiles * num_blocks
    counts = (queries, first_query, num_blocks, block_tables.shape[1], paths.shape[1])
    launch(
        partial_kernel,
        (programs, kv_heads),
        q,
        *inputs,
        partials,
        sums,
        *counts,
        scale * math.log2(math.e),
        v_new.stride(0),
        kv_heads,
        group,
        page_size,
        dim,
        TILE=tile,
        OWN_TILE=own_tile,
        OWN_ROWS=own_rows,
        STAGES=stages,
        DIM=max(next_power_of_2(dim), 16),
        ONE_PAGE=page_size % KEY_TILE.value == 0,
        num_warps=num_warps,
    )


def choose_tile(pairs: int, own_tile: int, num_blocks: int) -> tuple[int, int, int]:
    """Queries in a tile, stages and warps, for so many pairs of row and query head a sequence; changes no bit."""
    if pairs <= own_tile:
        return own_tile, 3, 8
    few_keys = num_blocks <= 8 and pairs <= 1024
    return (64, 2, 8) if pairs <= 64 or few_keys else (128, 2, 8)


def _merged(
    partials: Tensor,
    sums: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    first_query: int,
    out: Tensor,
    gate: Tensor | None,
    heads: int,
) -> None:
    dim, num_blocks = partials.shape[3], partials.shape[2]
    dims = min(MERGE_DIMS, next_power_of_2(dim))
    gate_stride = 0 if gate is None else gate.stride(0)
    args = (partials, sums, *places, gate, out, first_query, num_blocks, gate_stride, heads, dim)
    grid = (len(out), heads, triton.cdiv(dim, dims))
    launch(
        merge_kernel,
        grid,
        *args,
        UNROLL=min(16, next_power_of_2(num_blocks)),
        DIMS=dims,
        HAS_GATE=gate is not None,
        num_warps=1,
    )


@triton.jit
def store_kv_kernel(
    k_new, v_new, k_cache, v_cache, rows, places, v_stride, kv_heads, page_size, dim, DIM: tl.constexpr
):
    """A row's key and value of one head, to a place that is not negative."""
    i, head = tl.program_id(0), tl.program_id(1)
    place = tl.load(places + i).to(tl.int64)
    if place >= 0:
        row = tl.load(rows + i).to(tl.int64)
        d = tl.arange(0, DIM)
        target = ((place // page_size * kv_heads + head) * page_size + place % page_size) * dim + d
        k = tl.load(k_new + (row * kv_heads + head) * dim + d, mask=d < dim)
        v = tl.load(v_new + row * v_stride + head * dim + d, mask=d < dim)
        tl.store(k_cache + target, cast(k, k_cache.dtype.element_ty), mask=d < dim)
        tl.store(v_cache + target, cast(v, v_cache.dtype.element_ty), mask=d < dim)


def store_kv(k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, places: Tensor) -> None:
    _, kv_heads, page_size, dim = k_cache.shape
    v_new = contiguous_rows(v_new)
    args = (k_new.contiguous(), v_new, k_cache, v_cache, rows, places, v_new.stride(0), kv_heads, page_size, dim)
    launch(store_kv_kernel, (len(rows), kv_heads), *args, DIM=next_power_of_2(dim), num_warps=1)
