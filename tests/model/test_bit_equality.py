# SPDX-License-Identifier: Apache-2.0
"""One prefix, one result: the logits of a row are the same bits however its prefix came to be computed.

Every state here is NaN where no sequence has committed anything, so a read past a valid length shows as NaN.
"""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from fakes.bits import assert_same_bits
from fakes.tiny_model import tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from model_driver import Driver, Rows, continue_greedily
from tandem_backend.model.decoder import Decoder

BUNDLED = Path(__file__).parents[2] / "model_repository" / "tandem" / "1" / "tandem-pydoc"
NUM_DECODED = 16
TINY = {
    "delta-ends": ("qwen3_5_text", {}),
    "attention-ends": (
        "qwen3_next",
        {
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "num_key_value_heads": 1,
            "linear_conv_kernel_dim": 2,
            "linear_num_key_heads": 1,
        },
    ),
    "bf16": ("qwen3_5_text", {"dtype": torch.bfloat16, "tie_word_embeddings": True}),
}
few_examples = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**31)


@pytest.fixture(scope="module", params=list(TINY))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    family, overrides = TINY[request.param]
    return Decoder(tiny_checkpoint(tmp_path_factory.mktemp(request.param), family, **overrides))


@cache
def _bundled() -> Decoder:
    return Decoder(BUNDLED)


def _tokens(rng: random.Random, decoder: Decoder, count: int) -> list[int]:
    return [rng.randrange(decoder.config.vocab_size) for _ in range(count)]


def _check_any_schedule(decoder: Decoder, rng: random.Random, prompt_lens: list[int], block: int) -> None:
    """Prompts in random chunks, then greedy tokens; each pass takes some of the sequences in some order."""
    prompts = [_tokens(rng, decoder, length) for length in prompt_lens]
    expected = [continue_greedily(decoder, prompt, NUM_DECODED, block) for prompt in prompts]
    driver = Driver(decoder, block, max(prompt_lens) + NUM_DECODED, len(prompts), seed=rng.randrange(1000))
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    waiting = set(range(len(prompts)))
    while waiting:
        chosen = rng.sample(sorted(waiting), rng.randint(1, len(waiting)))
        passed = []
        for i in chosen:
            seq, prompt = driver.sequences[i], prompts[i]
            if seq.prefix_len < len(prompt):
                chunk = prompt[seq.prefix_len : seq.prefix_len + rng.choice([1, 2, 7, block, 200])]
                ends = seq.prefix_len + len(chunk) == len(prompt)
                passed.append(Rows(seq, chunk, logit_rows=[len(chunk) - 1] if ends else []))
            else:
                passed.append(Rows(seq, [int(logits[i][-1].argmax())]))
        for i, rows in zip(chosen, driver.forward(*passed), strict=True):
            if len(rows):
                logits[i].append(rows)
            if len(logits[i]) == NUM_DECODED + 1:
                waiting.remove(i)
    for got, alone in zip(logits, expected, strict=True):
        assert alone.isfinite().all()
        assert_same_bits(torch.cat(got), alone)


def _random_tree(rng: random.Random, num_nodes: int) -> list[int]:
    """Parents in pre-order: a node hangs below the one before it or below one of that one's ancestors."""
    parents = [-1]
    for node in range(1, num_nodes):
        parent = node - 1
        while parents[parent] >= 0 and rng.random() < 0.4:
            parent = parents[parent]
        parents.append(parent)
    return parents


def _check_tree(decoder: Decoder, rng: random.Random, prefix_len: int, num_nodes: int, block: int) -> None:
    """Logits of a tree's nodes, of a token after the accepted path, against a walk of one token a pass."""
    driver = Driver(decoder, block, prefix_len + num_nodes + 1, seed=rng.randrange(1000))
    if prefix_len:
        driver.forward(Rows(driver.sequences[0], _tokens(rng, decoder, prefix_len)))
    tokens, parents = _tokens(rng, decoder, num_nodes), _random_tree(rng, num_nodes)
    walked: list[Driver] = []  # the state after each node, reached alone
    expected = []
    for token, parent in zip(tokens, parents, strict=True):
        walk = (walked[parent] if parent >= 0 else driver).copy()
        expected.append(walk.forward(Rows(walk.sequences[0], [token]))[0])
        walked.append(walk)
    path = [rng.randrange(num_nodes)]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    (logits,) = driver.forward(Rows(driver.sequences[0], tokens, parents, accepted=path))
    assert logits.isfinite().all()
    assert_same_bits(logits, torch.cat(expected))
    (after_tree,) = driver.forward(Rows(driver.sequences[0], [5]))
    (after_walk,) = walked[path[-1]].forward(Rows(walked[path[-1]].sequences[0], [5]))
    assert_same_bits(after_tree, after_walk)


@few_examples
@given(seed=seeds, prompt_lens=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_any_chunks_any_company_any_order(tiny: Decoder, seed: int, prompt_lens: list[int]) -> None:
    _check_any_schedule(tiny, random.Random(seed), prompt_lens, block=8)


@few_examples
@given(seed=seeds, prefix_len=st.integers(0, 30), num_nodes=st.integers(1, 64))
def test_a_tree_equals_the_walk_of_its_paths(tiny: Decoder, seed: int, prefix_len: int, num_nodes: int) -> None:
    _check_tree(tiny, random.Random(seed), prefix_len, num_nodes, block=8)


def test_accepting_nothing_changes_nothing(tiny: Decoder) -> None:
    rng = random.Random(4)
    driver = Driver(tiny, block=8, max_len=64)
    seq = driver.sequences[0]
    driver.forward(Rows(seq, _tokens(rng, tiny, 13)))
    untouched = driver.copy()
    driver.forward(Rows(seq, _tokens(rng, tiny, 5), accepted=[]))
    assert_same_bits(driver.forward(Rows(seq, [3]))[0], untouched.forward(Rows(untouched.sequences[0], [3]))[0])


def test_a_reused_slot_and_reused_blocks_hide_their_past(tiny: Decoder) -> None:
    rng = random.Random(5)
    driver = Driver(tiny, block=8, max_len=64)
    seq = driver.sequences[0]
    driver.forward(Rows(seq, _tokens(rng, tiny, 50)))
    seq.prefix_len = 0
    driver.state.clear_slot(seq.slot)
    prompt = _tokens(rng, tiny, 21)
    (logits,) = driver.forward(Rows(seq, prompt, logit_rows=[20]))
    assert_same_bits(logits, continue_greedily(tiny, prompt, 0, block=8))


def test_bundled_any_chunks_any_company_any_order() -> None:
    _check_any_schedule(_bundled(), random.Random(0), [90, 130, 5, 64], block=64)


def test_bundled_trees_equal_the_walk_of_their_paths() -> None:
    _check_tree(_bundled(), random.Random(1), prefix_len=50, num_nodes=48, block=64)
