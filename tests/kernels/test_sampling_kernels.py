# SPDX-License-Identifier: Apache-2.0
"""Filters, seeded draws, masks and log-probabilities: the twins' bits, any rows, known answers of the generator."""

import pytest
import tandem_kernels as kernels
import torch
from fakes.bits import assert_same_bits
from tandem_kernels.sampling import (
    _log,
    _weight,
    apply_mask_reference,
    filter_logits_reference,
    gumbel_argmax_reference,
    log_probs_reference,
    philox,
)
from torch import Tensor

VOCAB_SIZES = (1, 5, 16, 31, 1003, 8192)
FILTERS = (
    (1.0, 0, 1.0, 0.0, 1.0),
    (0.7, 0, 0.9, 0.0, 1.0),
    (0.7, 7, 0.9, 0.0, 1.0),
    (1.3, 0, 1.0, 0.05, 1.0),
    (1.0, 0, 1.0, 0.0, 0.8),
    (1.0, 20, 0.95, 0.01, 0.9),
    (1.0, 1, 1.0, 0.0, 1.0),
    (2.0, 0, 1e-6, 0.0, 1.0),
    (1.0, 0, 1.0, 1.0, 1.0),
    (0.001, 0, 0.5, 0.0, 0.5),
    (100.0, 3000, 0.999, 0.0, 0.01),
)


def some_logits(vocab: int, rows: int = 9) -> Tensor:
    """Plain rows, one of ties, one with holes, one of -inf."""
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1] = logits[1].round()
    logits[2, ::2] = float("-inf")
    logits[3] = float("-inf")
    logits[4] = 0.0
    logits[5, : vocab // 2] = -0.0
    return logits


def keys(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return seeds, torch.randint(0, 2**31 - 1, (rows,), generator=generator, dtype=torch.int32)


def filters(rows: int, values: tuple[float, ...]) -> list[Tensor]:
    columns = [torch.full((rows,), float(value)) for value in values]
    columns[1] = columns[1].int()
    return columns


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # of the Random123 library's known answers
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_known_answers(key: int, counter: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox(torch.tensor([key]), *(torch.tensor([word]) for word in counter))
    assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize("vocab", VOCAB_SIZES)
def test_draws_have_the_twins_bits(vocab: int) -> None:
    logits = some_logits(vocab)
    for stream in (0, 1):
        ids = kernels.gumbel_argmax(logits, *keys(len(logits)), stream)
        assert torch.equal(ids, gumbel_argmax_reference(logits, *keys(len(logits)), stream))
        assert ids[3] == -1
        assert (logits.gather(1, ids.clamp(min=0).long()[:, None])[[0, 1, 2]] > float("-inf")).all() or vocab == 1


@pytest.mark.parametrize("values", FILTERS)
@pytest.mark.parametrize("vocab", VOCAB_SIZES)
def test_filters_have_the_twins_bits(vocab: int, values: tuple[float, ...]) -> None:
    filtered, expected = some_logits(vocab), some_logits(vocab)
    kernels.filter_logits(filtered, *filters(len(filtered), values))
    filter_logits_reference(expected, *filters(len(expected), values))
    assert_same_bits(filtered, expected)


def test_a_rows_draw_and_filters_do_not_depend_on_other_rows() -> None:
    logits, (seeds, positions) = some_logits(1003), keys(9)
    ids = kernels.gumbel_argmax(logits, seeds, positions)
    filtered = logits.clone()
    kernels.filter_logits(filtered, *filters(9, FILTERS[5]))
    for row in range(9):
        one = slice(row, row + 1)
        assert kernels.gumbel_argmax(logits[one], seeds[one], positions[one]) == ids[row]
        alone = logits[one].clone()
        kernels.filter_logits(alone, *filters(1, FILTERS[5]))
        assert_same_bits(alone, filtered[one])


@pytest.mark.parametrize("vocab", VOCAB_SIZES)
def test_masks(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    masks = torch.randint(-(2**31), 2**31 - 1, (9, -(-vocab // 32)), generator=generator, dtype=torch.int32)
    masked, expected = some_logits(vocab), some_logits(vocab)
    kernels.apply_mask(masked, masks)
    apply_mask_reference(expected, masks)
    assert_same_bits(masked, expected)


@pytest.mark.parametrize("vocab", VOCAB_SIZES)
def test_log_probs(vocab: int) -> None:
    logits = some_logits(vocab)[[0, 1, 4, 5]]
    ids, chosen = kernels.argmax(logits)
    logprobs, top_ids, tops = kernels.log_probs(logits, ids, min(20, vocab))
    assert_same_bits(logprobs, chosen)
    assert_same_bits(tops[:, 0], chosen)
    assert torch.equal(top_ids[:, 0], ids)
    expected, expected_ids, expected_tops = log_probs_reference(logits.double(), ids, min(20, vocab))
    assert torch.equal(top_ids, expected_ids)
    # Absolute error of a log of a sum of exponentials: a few float32 roundings of values up to about 30.
    assert torch.allclose(logprobs.double(), expected, rtol=0, atol=1e-5)
    assert torch.allclose(tops.double(), expected_tops, rtol=0, atol=1e-5)


def test_the_twins_functions_are_accurate() -> None:
    """Against torch's own, in float64: a few roundings."""
    z = torch.cat([torch.rand(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 37])
    z = torch.cat([z, 1 - torch.logspace(-16, -1, 1000, dtype=torch.float64)])
    assert torch.allclose(_log(z), z.log(), rtol=1e-15, atol=1e-15)
    y = -torch.linspace(0, 27, 10_001, dtype=torch.float64)
    assert torch.allclose(_weight(y).double(), (y.exp() * 2.0**40).floor(), rtol=1e-15, atol=1)


def test_a_filtered_row_keeps_what_its_filters_say() -> None:
    """By hand: probabilities 1/2, 1/4, 1/8, 1/16, 1/16 at token ids 4, 2, 0, 1, 3."""
    row = torch.tensor([[0.125, 0.0625, 0.25, 0.0625, 0.5]]).log()

    def kept(*values: float) -> list[int]:
        logits = row.clone()
        kernels.filter_logits(logits, *filters(1, values))
        return (logits[0] > float("-inf")).nonzero()[:, 0].tolist()

    assert kept(1, 2, 1, 0, 1) == [2, 4]
    assert kept(1, 4, 1, 0, 1) == [0, 1, 2, 4]  # a tie is cut by id
    assert kept(1, 0, 0.74, 0, 1) == [2, 4]
    assert kept(1, 0, 0.76, 0, 1) == [0, 2, 4]
    assert kept(1, 2, 0.6, 0, 1) == [4]  # 1/2 of the 3/4 that top_k left is above 0.6
    assert kept(1, 0, 1, 0.24, 1) == [0, 2, 4]
    assert kept(1, 0, 1, 0.26, 1) == [2, 4]
    # Surprise 1, 2, 3, 4, 4 bits, 1.875 on average: token 2 is nearest, then 4, then 0.
    assert kept(1, 0, 1, 0, 0.2) == [2]
    assert kept(1, 0, 1, 0, 0.7) == [2, 4]
    assert kept(1, 0, 1, 0, 0.8) == [0, 2, 4]
    assert kept(0.5, 0, 0.74, 0, 1) == [4]  # the temperature comes first: 1/4 of the squares is 16/22
