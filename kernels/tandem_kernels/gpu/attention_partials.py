# SPDX-License-Identifier: Apache-2.0
"""Which blocks which programs read: partials by (row, head, block), of rows alone and of tiles of rows."""

import triton
import triton.language as tl

from tandem_kernels.gpu.attention_block import CACHED, CHAIN, KEY_BLOCK, LISTED, MIXED, attend_block

OWN_BLOCKS = tl.constexpr(2)  # that the rows of a draft tree can reach into, from the prefix's last block on


@triton.jit
def _queries(q, row, rows_end, kv_head, heads, group, dim, TILE: tl.constexpr, DIM: tl.constexpr):
    """A tile of (row, head of the group) pairs from `row` on: rows, heads, which are any, and their queries."""
    pair = tl.arange(0, TILE)
    rows = row + pair // group
    inside = rows < rows_end
    head = kv_head * group + pair % group
    d = tl.arange(0, DIM)
    place = (rows.to(tl.int64) * heads + head)[:, None] * dim + d[None, :]
    tile = tl.load(q + place, mask=inside[:, None] & (d < dim)[None, :], other=0.0)
    return rows, head, inside, tile


@triton.jit
def _shared_root(firsts, roots, row, first_query):
    """The chain that tiles with this row read of this pass: that of the first query of the row's run."""
    return tl.load(roots + tl.maximum(tl.load(firsts + row), first_query))


@triton.jit
def _tile_start(index, runs, first_query, num_queries, rows: tl.constexpr):
    """First query of a tile, num_queries if there is none: every `rows`-th query, then those that begin a run."""
    even = tl.cdiv(num_queries, rows)
    run = index - even
    is_run = (run >= 0) & (run < tl.load(runs))
    query = tl.load(runs + 1 + run, mask=is_run, other=0) - first_query
    is_start = is_run & (query > 0) & (query < num_queries) & (query % rows != 0)
    return tl.where(run < 0, index * rows, tl.where(is_start, query, num_queries))


@triton.jit
def _store_partial(
    partials, sums, maximum, total, values, rows, head, is_stored, block, heads, num_blocks, dim, DIM: tl.constexpr
):
    d = tl.arange(0, DIM)
    place = (rows.to(tl.int64) * heads + head) * num_blocks + block
    tl.store(partials + place[:, None] * dim + d[None, :], values, mask=is_stored[:, None] & (d < dim)[None, :])
    tl.store(sums + place * 2, maximum, mask=is_stored)
    tl.store(sums + place * 2 + 1, total, mask=is_stored)


@triton.jit(do_not_specialize=["num_queries", "first_query", "num_blocks", "table_width", "longest"])
def partial_kernel(
    q,
    k_new,
    v_new,
    k_cache,
    v_cache,
    tables,
    prefix_lens,
    row_seqs,
    depths,
    roots,
    firsts,
    paths,
    runs,
    partials,
    sums,
    num_queries,
    first_query,
    num_blocks,
    table_width,
    longest,
    scale,
    v_stride: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    dim: tl.constexpr,
    TILE: tl.constexpr,
    OWN_TILE: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    DIM: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """Partials by (row, head, block): first of blocks that a row reads alone, then of those that tiles share.

    A row reads alone the block that holds the prefix's end, and if it does not follow its tile's chain the next one.
    """
    kv_head = tl.program_id(1)
    heads = kv_heads * group
    own = tl.cdiv(num_queries, OWN_ROWS) * OWN_BLOCKS
    if tl.program_id(0) < own:
        first_own = tl.program_id(0) // OWN_BLOCKS * OWN_ROWS
        for query in range(first_own, min(first_own + OWN_ROWS, num_queries)):
            row = first_query + query
            depth = tl.load(depths + row)
            root = tl.load(roots + row)
            shared_root = _shared_root(firsts, roots, row, first_query)
            seq = tl.load(row_seqs + row)
            prefix_len = tl.load(prefix_lens + seq)
            block = prefix_len // KEY_BLOCK + tl.program_id(0) % OWN_BLOCKS
            is_own = (root < 0) | (root != shared_root) | (block * KEY_BLOCK < prefix_len)
            if is_own & (depth >= 0) & (block * KEY_BLOCK <= prefix_len + depth):
                rows, head, inside, tile = _queries(q, query, query + 1, kv_head, heads, group, dim, OWN_TILE, DIM)
                positions = tl.where(inside, prefix_len + depth, -1)
                if root >= 0:
                    maximum, total, values = attend_block(
                        tile, positions, k_new, v_new, v_stride, k_cache, v_cache,
                        tables + seq.to(tl.int64) * table_width, prefix_len, block, kv_head, kv_heads, page_size, dim,
                        scale, paths, root, STAGES, DIM, MIXED, ONE_PAGE,
                    )  # fmt: skip
                else:
                    maximum, total, values = attend_block(
                        tile, positions, k_new, v_new, v_stride, k_cache, v_cache,
                        tables + seq.to(tl.int64) * table_width, prefix_len, block, kv_head, kv_heads, page_size, dim,
                        scale, paths + row.to(tl.int64) * longest, root, STAGES, DIM, LISTED, ONE_PAGE,
                    )  # fmt: skip
                _store_partial(
                    partials, sums, maximum, total, values, rows, head, inside, block, heads, num_blocks, dim, DIM
                )
    else:
        block = (tl.program_id(0) - own) % num_blocks
        query = _tile_start((tl.program_id(0) - own) // num_blocks, runs, first_query, num_queries, TILE // group)
        row = first_query + min(query, num_queries - 1)
        root = _shared_root(firsts, roots, row, first_query)
        seq = tl.load(row_seqs + row)
        prefix_len = tl.load(prefix_lens + seq)
        is_cached = (block + 1) * KEY_BLOCK <= prefix_len
        reach = prefix_len + num_queries + first_query  # no row of this pass lies further
        is_chain = (root >= 0) & (block * KEY_BLOCK >= prefix_len) & (block * KEY_BLOCK <= reach)
        if (query < num_queries) & (is_cached | is_chain):
            end = min((query // (TILE // group) + 1) * (TILE // group), num_queries)
            rows, head, inside, tile = _queries(q, query, end, kv_head, heads, group, dim, TILE, DIM)
            run = tl.load(firsts + first_query + rows, mask=inside, other=-1)
            depth = tl.load(depths + first_query + rows, mask=inside, other=-1)
            inside = inside & (run == tl.load(firsts + row)) & (depth >= 0)
            if is_cached:
                positions = tl.where(inside, prefix_len + depth, -1)
                maximum, total, values = attend_block(
                    tile, positions, k_new, v_new, v_stride, k_cache, v_cache,
                    tables + seq.to(tl.int64) * table_width, prefix_len, block, kv_head, kv_heads, page_size, dim,
                    scale, paths, root, STAGES, DIM, CACHED, ONE_PAGE,
                )  # fmt: skip
                _store_partial(
                    partials, sums, maximum, total, values, rows, head, inside, block, heads, num_blocks, dim, DIM
                )
            else:
                inside = inside & (tl.load(roots + first_query + rows, mask=inside, other=-1) == root)
                inside = inside & (block * KEY_BLOCK <= prefix_len + depth)
                positions = tl.where(inside, prefix_len + depth, -1)
                if tl.max(positions) >= 0:
                    maximum, total, values = attend_block(
                        tile, positions, k_new, v_new, v_stride, k_cache, v_cache,
                        tables + seq.to(tl.int64) * table_width, prefix_len, block, kv_head, kv_heads, page_size, dim,
                        scale, paths, root, STAGES, DIM, CHAIN, ONE_PAGE,
                    )  # fmt: skip
                    _store_partial(
                        partials, sums, maximum, total, values, rows, head, inside, block, heads, num_blocks, dim, DIM
                    )
