# SPDX-License-Identifier: Apache-2.0
"""One block of keys: its partial result for a tile of queries. This is attention's arithmetic, whoever calls it."""

import triton
import triton.language as tl

from tandem_kernels.gpu.language import ACCUMULATOR, cast, dot

KEY_BLOCK = tl.constexpr(256)  # positions of a partial: part of the arithmetic
KEY_TILE = tl.constexpr(64)  # of them at a time: part of the arithmetic
CACHED, CHAIN, MIXED, LISTED = (tl.constexpr(i) for i in range(4))  # where the keys of a block are


@triton.jit
def _attend(q, k, v, positions, n, scale, maximum, total, values):
    """Running softmax over one tile of keys [KEY_TILE, dim] at logical positions n."""
    zeros = tl.zeros((q.shape[0], KEY_TILE), ACCUMULATOR)
    scores = dot(q, tl.trans(k), zeros).to(tl.float32) * scale
    scores = tl.where(n[None, :] <= positions[:, None], scores, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    fade = tl.exp2(maximum - base)
    weights = cast(tl.exp2(scores - base[:, None]), v.dtype)
    ones = tl.full((KEY_TILE, 16), 1.0, tl.float32).to(v.dtype)
    row_sum = tl.max(dot(weights, ones, tl.zeros((q.shape[0], 16), ACCUMULATOR)), 1).to(tl.float32)
    total = tl.fma(total, fade, row_sum)
    values = dot(weights, v, values * fade[:, None].to(ACCUMULATOR))
    return new_maximum, total, values


@triton.jit
def _load(rows, is_read, dim: tl.constexpr, DIM: tl.constexpr):
    """[KEY_TILE, DIM] from the addresses of rows, zero for those not to be read."""
    d = tl.arange(0, DIM)
    mask = is_read[:, None] if dim == DIM else is_read[:, None] & (d < dim)[None, :]
    return tl.load(rows[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def attend_block(
    q,
    positions,
    k_new,
    v_new,
    v_stride: tl.constexpr,
    k_cache,
    v_cache,
    table,
    prefix_len,
    block,
    kv_head,
    kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    dim: tl.constexpr,
    scale,
    path,
    root,
    STAGES: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """A block's partial for a tile of queries. KEYS says where its keys are.

    CACHED: all below the prefix. CHAIN: all of this pass, rows root, root + 1, ... by depth. MIXED: of both. LISTED: of
    both, those of this pass in the rows that `path` lists.
    """
    maximum = tl.full((q.shape[0],), -float("inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    values = tl.zeros((q.shape[0], DIM), ACCUMULATOR)
    last = tl.max(positions)
    # A page that holds whole tiles is looked up a tile ahead: loads that wait for loads are not pipelined.
    page = tl.load(table + block * KEY_BLOCK // page_size, mask=block * KEY_BLOCK < prefix_len, other=0)
    for start in tl.range(0, KEY_BLOCK, KEY_TILE, num_stages=STAGES):
        first = block * KEY_BLOCK + start
        lane = tl.arange(0, KEY_TILE)
        n = first + lane
        if KEYS != CHAIN:
            if ONE_PAGE:
                base = ((page.to(tl.int64) * kv_heads + kv_head) * page_size + first % page_size) * dim
                place = lane * dim
                page = tl.load(table + (first + KEY_TILE) // page_size, mask=first + KEY_TILE < prefix_len, other=0)
            else:
                pages = tl.load(table + n // page_size, mask=n < prefix_len, other=0).to(tl.int64)
                base = kv_head.to(tl.int64) * page_size * dim
                place = (pages * kv_heads * page_size + n % page_size) * dim
        if KEYS == CACHED:
            k = _load(k_cache + base + place, n >= 0, dim, DIM)
            v = _load(v_cache + base + place, n >= 0, dim, DIM)
        elif KEYS == CHAIN:
            chain = (root + first - prefix_len).to(tl.int64)
            k_rows, v_rows = k_new + (chain * kv_heads + kv_head) * dim, v_new + chain * v_stride + kv_head * dim
            k = _load(k_rows + lane * (kv_heads * dim), n <= last, dim, DIM)
            v = _load(v_rows + lane * v_stride, n <= last, dim, DIM)
        else:
            depth = n - prefix_len
            new = (n >= prefix_len) & (n <= last)
            if KEYS == LISTED:
                row = tl.load(path + depth, mask=new, other=0).to(tl.int64)
            else:
                row = (root + depth).to(tl.int64)
            old = n < prefix_len
            k_row, v_row = k_new + (row * kv_heads + kv_head) * dim, v_new + row * v_stride + kv_head * dim
            k = _load(tl.where(old, k_cache + base + place, k_row), old | new, dim, DIM)
            v = _load(tl.where(old, v_cache + base + place, v_row), old | new, dim, DIM)
        maximum, total, values = _attend(q, k, v, positions, n, scale, maximum, total, values)
    return maximum, total, values.to(tl.float32)
