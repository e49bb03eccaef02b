# SPDX-License-Identifier: Apache-2.0
"""The target's choice at every row: greedy, after the request's own constraints. Plain rows and draft rows alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import tandem_kernels as kernels
from torch import Tensor

from tandem_backend.engine.draft_tree import DraftTree
from tandem_backend.engine.scheduler import ScheduledRows
from tandem_backend.model.batch import tree_depths


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence's rows with logits, in row order."""

    token_ids: list[int]
    logprobs: list[float]


def choose(logits: Tensor, scheduled: Sequence[ScheduledRows], trees: Sequence[DraftTree | None]) -> list[Choice]:
    """logits: [rows with logits, vocab] float32, changed in place where a request forbids tokens."""
    counts = [
        int(rows.ends_prompt) if tree is None else tree.num_nodes for rows, tree in zip(scheduled, trees, strict=True)
    ]
    first = 0
    for rows, tree, count in zip(scheduled, trees, counts, strict=True):
        if rows.generation.num_output < rows.generation.request.params.min_tokens:
            _forbid_stops(logits[first : first + count], rows, tree)
        first += count
    token_ids, logprobs = (values.tolist() for values in kernels.argmax(logits))
    choices, first = [], 0
    for count in counts:
        choices.append(Choice(token_ids[first : first + count], logprobs[first : first + count]))
        first += count
    return choices


def _forbid_stops(logits: Tensor, rows: ScheduledRows, tree: DraftTree | None) -> None:
    """Before min_tokens, no row may choose a token that would end the request."""
    generation = rows.generation
    stop_ids = list(generation.stop_ids)
    depths = tree_depths(tree.parents) if tree is not None else [0] * logits.shape[0]
    for row, depth in enumerate(depths):
        if stop_ids and generation.num_output + depth < generation.request.params.min_tokens:
            logits[row, stop_ids] = float("-inf")
