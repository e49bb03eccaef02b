# SPDX-License-Identifier: Apache-2.0
"""Greedy choices under a constraint, mostly without a mask: the likeliest token is often one that may come."""

from collections.abc import Sequence

import tandem_kernels as kernels
import torch
from torch import Tensor

from tandem_backend.engine.draft_tree import DraftTree, child_by_token
from tandem_backend.engine.sampling.constraint import MASK_BITS, Constraint


def settle(constraint: Constraint, tree: DraftTree, best: Sequence[int], logits: Tensor) -> dict[int, int]:
    """Walk the tree as accept() will. Returns by node of the walk the token of the largest logit that may come, or -1.

    constraint: the state at the anchor, which stays as it is; best: by node the largest logit's token; logits: [nodes,
    vocab] float32, which stay as they are.
    """
    children, node, state = child_by_token(tree), 0, constraint
    choices: dict[int, int] = {}
    while True:
        token_id = state.settle(best[node])
        choices[node] = token_id if token_id is not None else _masked_best(state, logits[node : node + 1])
        child = children.get((node, choices[node]))
        if child is None:
            return choices
        state = state.fork()
        state.advance(choices[node])
        node = child


def _masked_best(state: Constraint, row: Tensor) -> int:
    mask = torch.zeros(1, -(-row.shape[1] // MASK_BITS), dtype=torch.int32)
    state.fill_mask(mask[0])
    masked = row.clone()
    kernels.apply_mask(masked, mask.to(row.device))
    return int(kernels.argmax(masked)[0])
