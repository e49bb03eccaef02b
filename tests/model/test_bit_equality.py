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
from model_checks import check_any_schedule, check_tree, tokens
from model_driver import Driver, Rows, continue_greedily
from tandem_backend.model.decoder import Decoder

BUNDLED = Path(__file__).parents[2] / "model_repository" / "tandem" / "1" / "tandem-pydoc"
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


@few_examples
@given(seed=seeds, prompt_lens=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_any_chunks_any_company_any_order(tiny: Decoder, seed: int, prompt_lens: list[int]) -> None:
    check_any_schedule(tiny, random.Random(seed), prompt_lens, block=8)


@few_examples
@given(seed=seeds, prefix_len=st.integers(0, 30), num_nodes=st.integers(1, 64))
def test_a_tree_equals_the_walk_of_its_paths(tiny: Decoder, seed: int, prefix_len: int, num_nodes: int) -> None:
    check_tree(tiny, random.Random(seed), prefix_len, num_nodes, block=8)


def test_accepting_nothing_changes_nothing(tiny: Decoder) -> None:
    rng = random.Random(4)
    driver = Driver(tiny, block=8, max_len=64)
    seq = driver.sequences[0]
    driver.forward(Rows(seq, tokens(rng, tiny, 13)))
    untouched = driver.copy()
    driver.forward(Rows(seq, tokens(rng, tiny, 5), accepted=[]))
    assert_same_bits(driver.forward(Rows(seq, [3]))[0], untouched.forward(Rows(untouched.sequences[0], [3]))[0])


def test_a_reused_slot_and_reused_blocks_hide_their_past(tiny: Decoder) -> None:
    rng = random.Random(5)
    driver = Driver(tiny, block=8, max_len=64)
    seq = driver.sequences[0]
    driver.forward(Rows(seq, tokens(rng, tiny, 50)))
    seq.prefix_len = 0
    driver.state.clear_slot(seq.slot)
    prompt = tokens(rng, tiny, 21)
    (logits,) = driver.forward(Rows(seq, prompt, logit_rows=[20]))
    assert_same_bits(logits, continue_greedily(tiny, prompt, 0, block=8))


def test_bundled_any_chunks_any_company_any_order() -> None:
    check_any_schedule(_bundled(), random.Random(0), [90, 130, 5, 64], block=64)


def test_bundled_trees_equal_the_walk_of_their_paths() -> None:
    check_tree(_bundled(), random.Random(1), prefix_len=50, num_nodes=48, block=64)
