# SPDX-License-Identifier: Apache-2.0
"""The one function from logits to distribution. Every row that chooses a token goes through it, drafted or not.

In this order: repetition, frequency and presence penalty; logit_bias; what may not come (no_repeat_ngram_size, bad
words, allowed_token_ids, the constraint, stop tokens before min_tokens); temperature; top_k, top_p, min_p, typical_p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tandem_kernels as kernels
import torch
from torch import Tensor

from tandem_backend.engine.draft_tree import DraftTree
from tandem_backend.engine.sampling.constraint import MASK_BITS, node_states
from tandem_backend.engine.sampling.request import RequestSampling

NOTHING = float("-inf")


@dataclass(frozen=True, slots=True)
class RequestRows:
    """The rows of one request that choose a token: one for the end of its prompt, or one a node of its draft tree."""

    sampling: RequestSampling
    token_ids: Sequence[int]  # the committed tokens, the anchor the last
    tree: DraftTree  # the bare anchor where nothing is drafted
    paths: tuple[tuple[int, ...], ...]  # by row the drafts that came before it on its path

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.sampling.num_prompt

    @property
    def positions(self) -> list[int]:
        """By row the position of the token that it chooses."""
        return [len(self.token_ids) + len(path) for path in self.paths]


def request_rows(sampling: RequestSampling, token_ids: Sequence[int], tree: DraftTree) -> RequestRows:
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token_id))
    return RequestRows(sampling, token_ids, tree, tuple(paths))


def adjust(logits: Tensor, rows: RequestRows) -> None:
    """Everything before the temperature, in place. logits: [rows, vocab] float32 contiguous."""
    sampling = rows.sampling
    if sampling.history is not None:
        sampling.history.read(rows.token_ids)
        if sampling.params.has_penalties:
            sampling.history.penalise(logits, rows.paths)
    if len(sampling.bias_ids):
        logits[:, sampling.bias_ids] += sampling.bias.to(logits.device)
    if sampling.forbidden is not None:
        logits.masked_fill_(sampling.forbidden.to(logits.device), NOTHING)
    if sampling.history is not None:
        for row, token_id in sampling.history.banned(rows.paths):
            logits[row, token_id] = NOTHING
    if sampling.constraint is not None:
        _constrain(logits, sampling, rows.tree)
    early = [row for row, path in enumerate(rows.paths) if rows.num_output + len(path) < sampling.params.min_tokens]
    if early:
        logits[torch.tensor(early)[:, None], sampling.stop_ids] = NOTHING


def _constrain(logits: Tensor, sampling: RequestSampling, tree: DraftTree) -> None:
    assert sampling.constraint is not None
    masks = torch.zeros(len(logits), -(-logits.shape[1] // MASK_BITS), dtype=torch.int32)
    for mask, state in zip(masks, node_states(sampling.constraint, tree.token_ids, tree.parents), strict=True):
        if state is not None:
            state.fill_mask(mask)
    kernels.apply_mask(logits, masks.to(logits.device))


def distribute(logits: Tensor, requests: Sequence[RequestRows]) -> Tensor:
    """Turn logits into distributions, in place; rows of greedy requests stop before the temperature.

    logits: [rows of the requests one after the other, vocab] float32 contiguous. Returns the places of the rows that
    draw, [n] int64. A softmax of a row is its distribution.
    """
    drawn: list[int] = []
    owners: list[RequestSampling] = []
    start = 0
    for rows in requests:
        end = start + len(rows.paths)
        adjust(logits[start:end], rows)
        if rows.sampling.params.temperature > 0:
            drawn += range(start, end)
            owners += [rows.sampling] * len(rows.paths)
        start = end
    places = torch.tensor(drawn, dtype=torch.int64)
    if drawn:
        filtered = logits[places]
        filter_rows(filtered, owners)
        logits[places] = filtered
    return places


def filter_rows(logits: Tensor, requests: Sequence[RequestSampling]) -> None:
    """Temperature and filters, in place. logits: [rows, vocab] float32 contiguous; requests: whose each row is."""
    params, device = [request.params for request in requests], logits.device
    kernels.filter_logits(
        logits,
        torch.tensor([p.temperature for p in params], device=device),
        torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
        torch.tensor([p.top_p for p in params], device=device),
        torch.tensor([p.min_p for p in params], device=device),
        torch.tensor([p.typical_p for p in params], device=device),
    )
