# SPDX-License-Identifier: Apache-2.0
"""The target's choice at every row, plain rows and draft rows alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import tandem_kernels as kernels
import torch
from torch import Tensor

from tandem_backend.engine.draft_tree import DraftTree, anchor_tree
from tandem_backend.engine.sampling.distribution import RequestRows, distribute, request_rows
from tandem_backend.engine.sampling.draw import draw_tokens
from tandem_backend.engine.sampling.settle import settle
from tandem_backend.engine.scheduler import ScheduledRows
from tandem_backend.types import PromptLogprob, TopLogprobs

NO_TOKEN = -1  # the choice of a row whose request leaves no token


@dataclass(frozen=True, slots=True)
class Choice:
    """What the target chose at one sequence's rows, in row order; empty lists for a chunk that ends no prompt."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # where the request asks for them
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)  # of the tokens after the chunk's rows


def choose(
    logits: Tensor,
    scheduled: Sequence[ScheduledRows],
    trees: Sequence[DraftTree | None],
    best: tuple[Tensor, Tensor] | None = None,
) -> list[Choice]:
    """logits: [rows with logits, vocab] float32; they stay as they are. best: their argmax, where it is known.

    Rows of plain greedy requests cost one argmax over all of them; where such a request has a constraint, that is asked
    on the way that accept() will go. The others go through the distribution that their request asks for, each with the
    tokens on its own path.
    """
    token_ids, logprobs = (values.tolist() for values in best or kernels.argmax(logits))
    choices: list[Choice] = []
    settled: list[tuple[int, int, dict[int, int]]] = []  # whose choice, its first row in the pass, tokens by its rows
    special: list[tuple[int, int, RequestRows]] = []  # whose choice, its first row in the pass, its rows
    end = 0
    for rows, tree in zip(scheduled, trees, strict=True):
        first, end = end, end + (rows.num_prompt_logits if tree is None else tree.num_nodes)
        generation, prompt = rows.generation, []
        if tree is None and rows.generation.request.params.prompt_logprobs is not None:
            prompt = _prompt_logprobs(logits[first:end], rows)
        chosen = range(end - int(rows.ends_prompt) if tree is None else first, end)
        own = slice(chosen.start, chosen.stop)
        sampling, num_output = generation.sampling, generation.num_output
        if chosen and not sampling.is_plain(num_output):
            committed = generation.sequence.token_ids
            tree = tree if tree is not None else anchor_tree(committed[-1])
            if sampling.constraint is not None and sampling.may_settle(num_output):
                tokens = settle(sampling.constraint, tree, token_ids[own], logits[own])
                settled.append((len(choices), chosen.start, tokens))
            else:
                special.append((len(choices), chosen.start, request_rows(sampling, committed, tree)))
        choices.append(Choice(token_ids[own], logprobs[own], prompt_logprobs=prompt))
    if special:
        places = [place for _, first, rows in special for place in range(first, first + len(rows.paths))]
        chosen_special = _choose_special(logits[torch.tensor(places)], [rows for _, _, rows in special])
        for (index, _, _), choice in zip(special, chosen_special, strict=True):
            choices[index] = replace(choice, prompt_logprobs=choices[index].prompt_logprobs)
    for index, first, tokens in settled:
        choices[index] = _with_tokens(choices[index], tokens, logits[first:])
    return choices


def _with_tokens(choice: Choice, tokens: Mapping[int, int], logits: Tensor) -> Choice:
    """`choice` with these tokens by row. logits: [rows or more, vocab], raw."""
    changed = [row for row, token_id in tokens.items() if token_id != choice.token_ids[row]]
    if not changed:
        return choice
    token_ids, logprobs = list(choice.token_ids), list(choice.logprobs)
    new = torch.tensor([max(tokens[row], 0) for row in changed], dtype=torch.int32, device=logits.device)
    for row, value in zip(changed, kernels.log_probs(logits[changed], new)[0].tolist(), strict=True):
        token_ids[row], logprobs[row] = tokens[row], value
    return replace(choice, token_ids=token_ids, logprobs=logprobs)


def _choose_special(logits: Tensor, requests: Sequence[RequestRows]) -> list[Choice]:
    """logits: [rows of the requests one after the other, vocab], raw; a copy that may be changed."""
    work = logits.clone()
    drawn = distribute(work, requests)
    token_ids = draw_tokens(work, drawn, requests)
    params = [rows.sampling.params for rows in requests]
    spans = list(pairwise([0, *accumulate(len(rows.paths) for rows in requests)]))
    for (a, b), asked in zip(spans, params, strict=True):
        if asked.logprobs_mode == "processed":
            logits[a:b] = work[a:b]
    num_top = min(max(p.num_logprobs for p in params), logits.shape[1])
    logprobs, top_ids, top_logprobs = kernels.log_probs(logits, token_ids.clamp(min=0), num_top)
    choices = []
    for (a, b), asked in zip(spans, params, strict=True):
        tops = zip(top_ids[a:b].tolist(), top_logprobs[a:b].tolist(), strict=True)
        choices.append(
            Choice(
                token_ids[a:b].tolist(),
                logprobs[a:b].tolist(),
                [_top(*top, asked.num_logprobs) for top in tops] if asked.num_logprobs else [],
            )
        )
    return choices


def _top(token_ids: Sequence[int], logprobs: Sequence[float], n: int) -> TopLogprobs:
    """The likeliest n; tokens that can't come are left out."""
    return tuple((i, value) for i, value in zip(token_ids[:n], logprobs[:n], strict=True) if value > float("-inf"))


def _prompt_logprobs(logits: Tensor, rows: ScheduledRows) -> list[PromptLogprob]:
    """Of the prompt token after each of the chunk's rows; the last row of a prompt has none."""
    sequence, num_top = rows.generation.sequence, rows.generation.request.params.prompt_logprobs or 0
    after = sequence.token_ids[sequence.num_computed + 1 : sequence.num_computed + 1 + rows.num_prompt_rows]
    values, top_ids, top_values = kernels.log_probs(
        logits[: len(after)],
        torch.tensor(after, dtype=torch.int32, device=logits.device),
        min(num_top, logits.shape[1]),
    )
    tops = zip(top_ids.tolist(), top_values.tolist(), strict=True)
    return [
        PromptLogprob(token_id, value, _top(*top, num_top))
        for token_id, value, top in zip(after, values.tolist(), tops, strict=True)
    ]
