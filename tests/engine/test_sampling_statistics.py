# SPDX-License-Identifier: Apache-2.0
"""Draws have the distribution they should: chi-square over many fixed seeds, which classic errors, put back, must fail.

Every count is of fixed seeds, so a result never changes by chance; the limit is where a right sampler would be with
probability 1e-6.
"""

from collections.abc import Callable, Sequence

import pytest
import tandem_kernels as kernels
import torch
from tandem_backend.engine.draft_tree import DraftTree
from tandem_backend.engine.sampling import distribution, history, rejection
from tandem_backend.engine.sampling.distribution import RequestRows, distribute, request_rows
from tandem_backend.engine.sampling.request import RequestSampling, start_sampling
from tandem_backend.types import SamplingParams
from torch import Tensor

VOCAB = 8
NUM_DRAWS = 200_000
LIMIT = 42.0  # of chi-square with up to 7 degrees of freedom: probability 5e-7
LOGITS = torch.tensor([[0.3, 1.1, -0.4, 0.9, 0.0, -1.5, 0.6, 1.4]])
DRAFT_LOGITS = torch.tensor([[1.2, 0.1, -0.2, 1.3, -1.0, 0.5, 0.0, 0.4]])
COMMITTED = (1, 3, 3, 7, 3, 0)  # the first three are the prompt
PENALTIES = SamplingParams(
    temperature=0.9,
    seed=1,
    top_k=4,
    top_p=0.9,
    repetition_penalty=1.5,
    frequency_penalty=0.3,
    presence_penalty=0.2,
)


def chi_square(counts: Tensor, expected: Sequence[float]) -> float:
    """counts: [vocab]; expected: probabilities. A token that can't come counts as infinitely wrong."""
    total, result = float(counts.sum()), 0.0
    for count, probability in zip(counts.tolist(), expected, strict=True):
        if probability == 0:
            result += float("inf") if count else 0.0
        else:
            result += (count - total * probability) ** 2 / (total * probability)
    return result


def expected_distribution(params: SamplingParams, token_ids: Sequence[int], num_prompt: int) -> list[float]:
    """The definition once more, in plain Python: penalties, temperature, top_k, top_p."""
    logits, output = LOGITS[0].double().tolist(), list(token_ids[num_prompt:])
    for token in set(token_ids):
        repetition = params.repetition_penalty
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] -= params.presence_penalty * (token in output)
    logits = [x / params.temperature for x in logits]
    order = sorted(range(VOCAB), key=lambda token: -logits[token])[: params.top_k or VOCAB]
    weights = {token: float(torch.tensor(logits[token]).exp()) for token in order}
    total, kept, before = sum(weights.values()), [], 0.0
    for token in order:
        if before < params.top_p * total:
            kept.append(token)
        before += weights[token]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(VOCAB)]


def rows_of(params: SamplingParams, token_ids: Sequence[int], tree: DraftTree) -> RequestRows:
    sampling: RequestSampling = start_sampling(params, num_prompt=3, vocab_size=VOCAB, stop_ids=())
    return request_rows(sampling, token_ids, tree)


def draws(params: SamplingParams = PENALTIES) -> Tensor:
    """Counts of NUM_DRAWS seeds' draws at one row, [vocab]."""
    row = LOGITS.clone()
    distribute(row, [rows_of(params, COMMITTED, DraftTree((COMMITTED[-1],), (-1,), (1.0,), ("",)))])
    seeds = torch.arange(NUM_DRAWS)
    tokens = kernels.gumbel_argmax(row.repeat(NUM_DRAWS, 1), seeds, torch.full((NUM_DRAWS,), 6, dtype=torch.int32))
    return torch.bincount(tokens.long(), minlength=VOCAB)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.5, seed=1),
        SamplingParams(temperature=1.5, top_k=5, seed=1),
        SamplingParams(temperature=1.0, top_p=0.7, seed=1),
        PENALTIES,
    ],
)
def test_seeded_draws_have_the_distribution_of_the_definition(params: SamplingParams) -> None:
    assert chi_square(draws(params), expected_distribution(params, COMMITTED, 3)) < LIMIT


def test_one_seeds_draws_at_many_positions_have_the_distribution_too() -> None:
    positions = torch.arange(NUM_DRAWS, dtype=torch.int32)
    tokens = kernels.gumbel_argmax(LOGITS.repeat(NUM_DRAWS, 1), torch.full((NUM_DRAWS,), 3), positions).long()
    expected = torch.softmax(LOGITS[0].double(), 0)
    assert chi_square(torch.bincount(tokens, minlength=VOCAB), expected.tolist()) < LIMIT
    # And so have pairs of neighbours: 63 degrees of freedom, 130 at probability 1e-6.
    pairs = torch.bincount(tokens[:-1:2] * VOCAB + tokens[1::2], minlength=VOCAB**2)
    assert chi_square(pairs, torch.outer(expected, expected).flatten().tolist()) < 130


def filter_before_penalties(patch: pytest.MonkeyPatch) -> None:
    """Penalties then move what the filters have already decided."""
    adjust, filter_rows = distribution.adjust, distribution.filter_rows

    def filter_and_adjust(logits: Tensor, rows: RequestRows) -> None:
        filter_rows(logits, [rows.sampling] * len(logits))
        adjust(logits, rows)

    patch.setattr(distribution, "adjust", filter_and_adjust)
    patch.setattr(distribution, "filter_rows", lambda logits, requests: None)


def count_repetition_of_prompt_tokens_twice(patch: pytest.MonkeyPatch) -> None:
    """Once for the prompt and once for the output."""
    original = history.penalise

    def twice(logits: Tensor, counts: Tensor, params: SamplingParams) -> Tensor:
        once = original(logits, torch.zeros_like(counts), params)
        return original(torch.where((counts > 0) & in_prompt, once, logits), counts, params)

    in_prompt = torch.tensor([token in COMMITTED[:3] for token in dict.fromkeys(COMMITTED)])
    patch.setattr(history, "penalise", twice)


def penalise_the_prompt_as_output(patch: pytest.MonkeyPatch) -> None:
    original = history.penalise
    patch.setattr(history, "penalise", lambda logits, counts, params: original(logits, counts + 1, params))


def use_the_noise_of_half_the_tokens(patch: pytest.MonkeyPatch) -> None:
    """Both halves of a Philox block to both of its tokens."""
    original = kernels.gumbel_argmax

    def halved(logits: Tensor, seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
        spread = torch.full((len(logits), 2 * VOCAB), float("-inf"))
        spread[:, ::2] = logits
        pair = original(spread, seeds, positions, stream) // 2
        return torch.where(pair % 2 == 1, pair - 1, pair)

    patch.setattr(kernels, "gumbel_argmax", halved)


@pytest.mark.parametrize(
    "put_back",
    [
        filter_before_penalties,
        count_repetition_of_prompt_tokens_twice,
        penalise_the_prompt_as_output,
        use_the_noise_of_half_the_tokens,
    ],
)
def test_classic_errors_are_seen(
    put_back: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back(monkeypatch)
    assert chi_square(draws(), expected_distribution(PENALTIES, COMMITTED, 3)) > 2 * LIMIT


# The rejection rule: children of one node, each drawn from a q of its own, at many seeds at once.


def rejection_draws(num_children: int) -> Tensor:
    """Counts of what NUM_DRAWS seeds give at the node, [vocab]."""
    seeds, positions = torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), 6, dtype=torch.int32)
    token_ids, q = [], []
    for child in range(num_children):
        logits = DRAFT_LOGITS.roll(child, 1).repeat(NUM_DRAWS, 1)
        token_ids.append(kernels.gumbel_argmax(logits, seeds, positions + 1000 * child, rejection.DRAFT_STREAM).long())
        q.append(kernels.probabilities(logits))
    tokens = rejection.reject_or_accept(
        LOGITS.repeat(NUM_DRAWS, 1), torch.stack(token_ids, 1), torch.stack(q, 1), seeds, positions
    )
    return torch.bincount(tokens, minlength=VOCAB)


@pytest.mark.parametrize("num_children", [1, 2, 3])
def test_the_rejection_rule_is_exact_in_distribution(num_children: int) -> None:
    assert chi_square(rejection_draws(num_children), torch.softmax(LOGITS[0].double(), 0).tolist()) < LIMIT


def test_the_rejection_rule_takes_most_of_good_drafts() -> None:
    """With q = p every draft is taken: the tokens are the drafter's."""
    seeds, positions = torch.arange(1000), torch.full((1000,), 6, dtype=torch.int32)
    logits = LOGITS.repeat(1000, 1)
    drafts = kernels.gumbel_argmax(logits, seeds, positions, rejection.DRAFT_STREAM).long()
    q = kernels.probabilities(logits)[:, None]
    assert torch.equal(rejection.reject_or_accept(logits, drafts[:, None], q, seeds, positions), drafts)


def test_drafts_that_were_not_drawn_are_taken_as_often_as_the_target_would() -> None:
    seeds, positions = torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), 6, dtype=torch.int32)
    drafts = torch.tensor([[3, 0]]).repeat(NUM_DRAWS, 1)
    q = torch.nn.functional.one_hot(drafts, VOCAB).double()
    tokens = rejection.reject_or_accept(LOGITS.repeat(NUM_DRAWS, 1), drafts, q, seeds, positions)
    expected = torch.softmax(LOGITS[0].double(), 0).tolist()
    assert chi_square(torch.bincount(tokens, minlength=VOCAB), expected) < LIMIT


def residual_not_renormalised(patch: pytest.MonkeyPatch) -> None:
    """After a rejection the next child is held to what is left of p as it is."""
    patch.setattr(rejection, "_residual", lambda p, q: (p - q).clamp(min=1e-12))


def redraw_from_the_target(patch: pytest.MonkeyPatch) -> None:
    """A rejected draft is replaced by a draw from p instead of from the residual."""
    patch.setattr(rejection, "_residual", lambda p, q: p)


def decide_with_the_noise_of_the_draft(patch: pytest.MonkeyPatch) -> None:
    """One stream of chance for the drafter and for the target."""
    patch.setattr(rejection, "DRAFT_STREAM", 0)


@pytest.mark.parametrize(
    "put_back", [residual_not_renormalised, redraw_from_the_target, decide_with_the_noise_of_the_draft]
)
def test_errors_of_the_rejection_rule_are_seen(
    put_back: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back(monkeypatch)
    assert chi_square(rejection_draws(3), torch.softmax(LOGITS[0].double(), 0).tolist()) > LIMIT
