# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over draft trees, one step function for decode, verify, prefill and commit.

Source: Gated Delta Networks (Yang, Kautz, Hatamizadeh 2024), in the one-latency form with explicit fma of the
numerics contract (kernels/README.md).
"""

import torch
from torch import Tensor
from torch.nn import functional

from tandem_kernels.device import implementation
from tandem_kernels.tree_plan import TreePlan


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
    """Outputs of all rows; a row starts from its parent's state, a sequence's first row from its slot's.

    qkv: [rows, 2 * key_heads * dk + value_heads * dv] float32 contiguous, queries and keys not yet normalised;
    ab: [rows, 2 * value_heads], decay input then write-strength input, rows may be strided; a_log, dt_bias:
    [value_heads]; state: [num_slots, value_heads, dk, dv] float32, only read; slots: [seqs] int32; seq_starts:
    [seqs + 1] int32 row offsets; parents: [rows] int32 in pre-order, -1 for a sequence's first row and only there;
    trees as in `attention`.
    Returns [rows, value_heads * dv] float32.
    """
    return implementation(qkv).gated_delta(qkv, ab, a_log, dt_bias, state, slots, seq_starts, parents, key_heads, trees)


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
    """Advance `state` in place by the accepted rows of each sequence, with the bits `gated_delta` walked through.

    path_rows: [path_starts[-1]] int32, root first; path_starts: [seqs + 1] int32. The rest as in `gated_delta`.
    """
    implementation(qkv).gated_delta_commit(qkv, ab, a_log, dt_bias, state, slots, path_starts, path_rows, key_heads)


def gated_delta_reference(
    qkv: Tensor,
    ab: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    seq_starts: Tensor,
    parents: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor]:
    """Executable spec, in qkv's dtype: outputs and the state after each row [rows, value_heads, dk, dv]."""
    _, value_heads, dk, dv = state.shape
    rows = qkv.shape[0]
    q, k, v = qkv.split([key_heads * dk, key_heads * dk, value_heads * dv], dim=-1)
    q, k = (_normalize(part.reshape(rows, key_heads, dk)) for part in (q, k))
    q, k = (part.repeat_interleave(value_heads // key_heads, dim=1) for part in (q / dk**0.5, k))
    v = v.reshape(rows, value_heads, dv)
    a, b = ab.split(value_heads, dim=-1)
    decay = torch.exp(-a_log.to(q.dtype).exp() * functional.softplus(a + dt_bias))
    beta = torch.sigmoid(b)
    root_slot = {int(start): int(slot) for start, slot in zip(seq_starts[:-1], slots, strict=True)}
    states: list[Tensor] = []
    outputs = []
    for row in range(rows):
        parent = int(parents[row])
        before = state[root_slot[row]].to(q.dtype) if parent < 0 else states[parent]
        after = before * decay[row, :, None, None]
        delta = (v[row] - torch.einsum("hkv,hk->hv", after, k[row])) * beta[row, :, None]
        after = after + k[row, :, :, None] * delta[:, None, :]
        states.append(after)
        outputs.append(torch.einsum("hkv,hk->hv", after, q[row]))
    return torch.stack(outputs).flatten(1), torch.stack(states)


def _normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
