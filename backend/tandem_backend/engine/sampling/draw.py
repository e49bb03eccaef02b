# SPDX-License-Identifier: Apache-2.0
"""The token of each row: the largest logit, a seeded draw, or what the rejection rule or relaxed acceptance take."""

from collections.abc import Sequence

import tandem_kernels as kernels
import torch
from torch import Tensor

from tandem_backend.engine.draft_tree import DraftTree, children_of
from tandem_backend.engine.sampling.distribution import RequestRows
from tandem_backend.engine.sampling.rejection import keys_of, reject_or_accept
from tandem_backend.engine.sampling.relaxed import relax


def draw_tokens(distributions: Tensor, drawn: Tensor, requests: Sequence[RequestRows]) -> Tensor:
    """[rows] int32, -1 for a row without a token.

    distributions: [rows of the requests one after the other, vocab] float32; drawn: the places of the rows that draw.
    """
    token_ids, _ = kernels.argmax(distributions)
    if len(drawn):
        seeds = [rows.sampling.seed for rows in requests if rows.sampling.params.temperature > 0 for _ in rows.paths]
        positions = [p for rows in requests if rows.sampling.params.temperature > 0 for p in rows.positions]
        token_ids[drawn] = kernels.gumbel_argmax(
            distributions[drawn],
            torch.tensor(seeds, device=distributions.device),
            torch.tensor(positions, dtype=torch.int32, device=distributions.device),
        )
    start = 0
    for rows in requests:
        end = start + len(rows.paths)
        if rows.sampling.params.depends_on_drafts:
            _look_at_drafts(token_ids[start:end], distributions[start:end], rows)
        start = end
    return token_ids


def _look_at_drafts(token_ids: Tensor, distributions: Tensor, rows: RequestRows) -> None:
    """Choose again, in place, at the nodes that have children."""
    sampling, tree = rows.sampling, rows.tree
    for node, children in children_of(tree).items():
        if token_ids[node] < 0:
            continue
        drafts = [tree.token_ids[child] for child in children]
        row = distributions[node : node + 1]
        if sampling.params.uses_rejection:
            drafted = torch.tensor([drafts], device=row.device)
            keys = keys_of(sampling.seed, rows.positions[node], row)
            token_ids[node] = reject_or_accept(row, drafted, _drawn_from(tree, children, row), *keys)[0]
        if sampling.params.relax_tau is not None:
            token_ids[node] = relax(row[0], int(token_ids[node]), drafts, sampling.params)


def _drawn_from(tree: DraftTree, children: Sequence[int], row: Tensor) -> Tensor:
    """What each child was drawn from, [1, children, vocab] float64; a token that was not drawn has all of it."""
    q = row.new_zeros((1, len(children), row.shape[1]), dtype=torch.float64)
    for n, child in enumerate(children):
        child_q = tree.q[child] if tree.q else None
        if child_q is None:
            q[0, n, tree.token_ids[child]] = 1.0
        else:
            q[0, n] = child_q
    return q
