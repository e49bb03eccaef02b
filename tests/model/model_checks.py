# SPDX-License-Identifier: Apache-2.0
"""What any way of computing a prefix is held to: a walk of one token a pass, launched op by op."""

import random
from collections.abc import Callable

import torch
from fakes.bits import assert_same_bits
from model_driver import Driver, Rows, continue_greedily
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.passes import LaunchedPasses, Passes
from tandem_backend.model.state import ModelState

NUM_DECODED = 16
MakePasses = Callable[[Decoder, ModelState], Passes]


def tokens(rng: random.Random, decoder: Decoder, count: int) -> list[int]:
    return [rng.randrange(decoder.config.vocab_size) for _ in range(count)]


def check_any_schedule(
    decoder: Decoder, rng: random.Random, prompt_lens: list[int], block: int, make_passes: MakePasses = LaunchedPasses
) -> None:
    """Prompts in random chunks, then greedy tokens; each pass takes some of the sequences in some order."""
    prompts = [tokens(rng, decoder, length) for length in prompt_lens]
    expected = [continue_greedily(decoder, prompt, NUM_DECODED, block) for prompt in prompts]
    driver = Driver(decoder, block, max(prompt_lens) + NUM_DECODED, len(prompts), rng.randrange(1000), make_passes)
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


def random_tree(rng: random.Random, num_nodes: int) -> list[int]:
    """Parents in pre-order: a node hangs below the one before it or below one of that one's ancestors."""
    parents = [-1]
    for node in range(1, num_nodes):
        parent = node - 1
        while parents[parent] >= 0 and rng.random() < 0.4:
            parent = parents[parent]
        parents.append(parent)
    return parents


def check_tree(
    decoder: Decoder,
    rng: random.Random,
    prefix_len: int,
    num_nodes: int,
    block: int,
    make_passes: MakePasses = LaunchedPasses,
) -> None:
    """Logits of a tree's nodes, of a token after the accepted path, against a walk of one token a pass."""
    driver = Driver(decoder, block, prefix_len + num_nodes + 1, 1, rng.randrange(1000), make_passes)
    if prefix_len:
        driver.forward(Rows(driver.sequences[0], tokens(rng, decoder, prefix_len)))
    drafted, parents = tokens(rng, decoder, num_nodes), random_tree(rng, num_nodes)
    walked: list[Driver] = []  # the state after each node, reached alone
    expected = []
    for token, parent in zip(drafted, parents, strict=True):
        walk = (walked[parent] if parent >= 0 else driver).copy()
        expected.append(walk.forward(Rows(walk.sequences[0], [token]))[0])
        walked.append(walk)
    path = [rng.randrange(num_nodes)]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    (logits,) = driver.forward(Rows(driver.sequences[0], drafted, parents, accepted=path))
    assert logits.isfinite().all()
    assert_same_bits(logits, torch.cat(expected))
    (after_tree,) = driver.forward(Rows(driver.sequences[0], [5]))
    (after_walk,) = walked[path[-1]].forward(Rows(walked[path[-1]].sequences[0], [5]))
    assert_same_bits(after_tree, after_walk)
