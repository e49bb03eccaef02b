# SPDX-License-Identifier: Apache-2.0
"""The target's choice at every row, plain rows and draft rows alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import tandem_kernels as kernels
import torch
from torch import Tensor

from tandem_backend.engine.draft_tree import DraftTree, anchor_tree
from tandem_backend.engine.sampling.distribution import RequestRows, adjust, filter_rows, request_rows
from tandem_backend.engine.sampling.request import RequestSampling
from tandem_backend.engine.scheduler import ScheduledRows

NO_TOKEN = -1  # the choice of a row whose request leaves no token


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence's rows with logits, in row order."""

    token_ids: list[int]
    logprobs: list[float]


def choose(logits: Tensor, scheduled: Sequence[ScheduledRows], trees: Sequence[DraftTree | None]) -> list[Choice]:
    """logits: [rows with logits, vocab] float32; they stay as they are.

    Rows of plain greedy requests cost one argmax over all of them. Those of the others go through the distribution that
    their request asks for, each with the tokens on its own path.
    """
    token_ids, logprobs = (values.tolist() for values in kernels.argmax(logits))
    choices: list[Choice] = []
    special: list[tuple[int, int, RequestRows]] = []  # whose choice, its first row in the pass, its rows
    first = 0
    for rows, tree in zip(scheduled, trees, strict=True):
        count = int(rows.ends_prompt) if tree is None else tree.num_nodes
        generation = rows.generation
        if count and not generation.sampling.is_plain(generation.num_output):
            committed = generation.sequence.token_ids
            tree = tree if tree is not None else anchor_tree(committed[-1])
            special.append((len(choices), first, request_rows(generation.sampling, committed, tree)))
        choices.append(Choice(token_ids[first : first + count], logprobs[first : first + count]))
        first += count
    if special:
        places = [place for _, first, rows in special for place in range(first, first + len(rows.paths))]
        chosen = _choose_special(logits[torch.tensor(places)], [rows for _, _, rows in special])
        for (index, _, _), choice in zip(special, chosen, strict=True):
            choices[index] = choice
    return choices


def _choose_special(logits: Tensor, requests: Sequence[RequestRows]) -> list[Choice]:
    """logits: [rows of the requests one after the other, vocab], raw."""
    work = logits.clone()
    starts = [0]
    for rows in requests:
        starts.append(starts[-1] + len(rows.paths))
        adjust(work[starts[-2] : starts[-1]], rows)
    token_ids, _ = kernels.argmax(work)
    _draw(work, token_ids, requests, starts)
    logprobs, _, _ = kernels.log_probs(logits, token_ids.clamp(min=0))
    return [Choice(token_ids[a:b].tolist(), logprobs[a:b].tolist()) for a, b in pairwise(starts)]


def _draw(work: Tensor, token_ids: Tensor, requests: Sequence[RequestRows], starts: Sequence[int]) -> None:
    """Filter the rows of `work` whose request samples, and draw their tokens into `token_ids`, both in place."""
    drawn: list[int] = []
    owners: list[RequestSampling] = []
    seeds: list[int] = []
    positions: list[int] = []
    for rows, start in zip(requests, starts, strict=False):
        if rows.sampling.params.temperature > 0:
            drawn += range(start, start + len(rows.paths))
            owners += [rows.sampling] * len(rows.paths)
            seeds += [rows.sampling.seed] * len(rows.paths)
            positions += [len(rows.token_ids) + len(path) for path in rows.paths]
    if drawn:
        places = torch.tensor(drawn)
        filtered = work[places]
        filter_rows(filtered, owners)
        work[places] = filtered
        token_ids[places] = kernels.gumbel_argmax(
            filtered,
            torch.tensor(seeds, device=work.device),
            torch.tensor(positions, dtype=torch.int32, device=work.device),
        )
