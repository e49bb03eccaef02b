# SPDX-License-Identifier: Apache-2.0
"""Paged tree attention: a row reads its sequence's committed blocks, then its own ancestors of this pass.

Keys are visited by absolute position; softmax partials belong to fixed blocks of positions and merge in block order.
Source of the paged layout: Kwon et al. 2023; of the running softmax: Milakov and Gimelshein 2018.
"""

import torch
from torch import Tensor

from tandem_kernels.device import implementation
from tandem_kernels.tree_plan import TreePlan


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
) -> Tensor:
    """Attention output of the last rows of a pass, grouped queries.

    q: [queries, heads, dim] float32, of the last `queries` rows; the rows before them are only read as ancestors;
    k_new: [rows, kv_heads, dim]; v_new: [rows, kv_heads * dim], rows may be strided;
    k_cache, v_cache: [blocks, kv_heads, block, dim] float32, read below a sequence's prefix length only;
    block_tables: [seqs, n] int32; prefix_lens: [seqs] int32; parents: [rows] int32, row index or -1; row_seqs: [rows]
    int32, index into block_tables; trees: what `plan_trees` says of the pass, found here where it is None.
    Returns [queries, heads * dim] float32. On the GPU rows and caches are bfloat16.
    """
    return implementation(q).attention(
        q, k_new, v_new, k_cache, v_cache, block_tables, prefix_lens, parents, row_seqs, scale, trees
    )


def attention_reference(
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
) -> Tensor:
    """Executable spec of `attention`, in q's dtype."""
    queries, heads, dim = q.shape
    _, kv_heads, block, _ = k_cache.shape
    rows = k_new.shape[0]
    v_new = v_new.reshape(rows, kv_heads, dim)
    outputs = []
    for row in range(rows - queries, rows):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        seq = int(row_seqs[row])
        positions = torch.arange(int(prefix_lens[seq]))
        pages = block_tables[seq].long()[positions // block]
        keys = torch.cat([k_cache[pages, :, positions % block], k_new[path]]).to(q.dtype)  # [length, kv_heads, dim]
        values = torch.cat([v_cache[pages, :, positions % block], v_new[path]]).to(q.dtype)
        keys, values = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (keys, values))
        weights = torch.softmax(torch.einsum("hd,lhd->hl", q[row - rows + queries], keys) * scale, dim=-1)
        outputs.append(torch.einsum("hl,lhd->hd", weights, values))
    return torch.stack(outputs).flatten(1)


def store_kv(k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, places: Tensor) -> None:
    """Copy rows of this pass into the cache, in place.

    rows: [n] int32 row indices; places: [n] int64, block index * block + offset in it, below 0: nowhere. The rest as in
    `attention`.
    """
    implementation(k_new).store_kv(k_new, v_new, k_cache, v_cache, rows, places)
