# SPDX-License-Identifier: Apache-2.0
"""Captured passes give the bits of launched ones, whatever is in a bucket's padding."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from fakes.bits import assert_same_bits
from fakes.replay import Rerun, rerun_passes
from fakes.tiny_model import tiny_checkpoint
from model_driver import Driver, Rows
from tandem_backend.model.batch import SequenceRows, build_batch
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.graphs import GraphLimits, GraphPasses
from tandem_backend.model.passes import LaunchedPasses, Passes
from tandem_backend.model.state import KVLayer, RecurrentLayer, allocate_state
from tandem_backend.model.static_rows import Bucket


@pytest.fixture(scope="module", params=["qwen3_5_text", "llama"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder(tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param))


def _random_rows(rng: random.Random, driver: Driver, most_rows: int) -> list[Rows]:
    """Chunks and trees of some sequences; the accepted rows are a random path's beginning."""
    passed = []
    for seq in rng.sample(driver.sequences, rng.randint(1, len(driver.sequences))):
        count = min(rng.randint(1, most_rows), driver.max_len - seq.prefix_len - 1)
        tokens = [rng.randrange(driver.decoder.config.vocab_size) for _ in range(count)]
        if rng.random() < 0.4:
            passed.append(Rows(seq, tokens, logit_rows=rng.choice([[], [count - 1]])))
            continue
        parents = [-1, *(rng.choice([node - 1, max(node - 2, 0)]) for node in range(1, count))]
        path = [rng.randrange(count)]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        passed.append(Rows(seq, tokens, _pre_order(parents), accepted=rng.choice([[], [0]])))
    return passed


def _pre_order(parents: list[int]) -> list[int]:
    """Hang a node whose parent is not on the path to the node before it below that node."""
    fixed: list[int] = []
    path: list[int] = []
    for node, parent in enumerate(parents):
        if parent in path:
            del path[path.index(parent) + 1 :]
        fixed.append(path[-1] if path else -1)
        path.append(node)
    return fixed


@pytest.mark.parametrize("most_rows", [1, 5, 40])
def test_a_captured_pass_is_a_launched_one(decoder: Decoder, most_rows: int) -> None:
    rng = random.Random(most_rows)
    launched = Driver(decoder, 8, 200, num_sequences=4, seed=3)
    captured = Driver(decoder, 8, 200, num_sequences=4, seed=3, make_passes=rerun_passes)
    while max(seq.prefix_len for seq in launched.sequences) < 150 and rng.random() < 0.98:
        state = rng.getstate()
        expected = launched.forward(*_random_rows(rng, launched, most_rows))
        rng.setstate(state)
        for got, rows in zip(captured.forward(*_random_rows(rng, captured, most_rows)), expected, strict=True):
            assert_same_bits(got, rows)
    for mine, theirs in zip(launched.tensors(), captured.tensors(), strict=True):
        assert_same_bits(mine.flatten(1), theirs.flatten(1))


def _passes(decoder: Decoder, limits: GraphLimits) -> tuple[GraphPasses, Rerun]:
    recorder = Rerun()
    return GraphPasses(decoder, allocate_state(decoder.config, 100, 70, block=8), limits, recorder), recorder


def test_best_tokens_come_with_the_pass(decoder: Decoder) -> None:
    passes, _ = _passes(decoder, GraphLimits(4, 64, 60))
    result = passes.forward(build_batch([SequenceRows([1, 2, 3], 0, 0, [0], logit_rows=[0, 2])]))
    assert result.best is not None
    token_ids, logprobs = result.best
    assert token_ids.tolist() == result.logits.argmax(1).tolist()
    torch.testing.assert_close(logprobs, result.logits.log_softmax(1).amax(1))  # another order of summation


@pytest.mark.parametrize(
    ("rows", "prefix_len", "num_replays"),
    [
        (4, 0, 1),
        (5, 0, 0),  # more rows than the largest bucket
        (3, 64, 1),
        (3, 65, 0),  # more context than the longest class
    ],
)
def test_what_fits_no_bucket_is_launched(decoder: Decoder, rows: int, prefix_len: int, num_replays: int) -> None:
    passes, recorder = _passes(decoder, GraphLimits(4, 64, 60))
    meanwhile: list[int] = []
    batch = build_batch([SequenceRows([1] * rows, prefix_len, 0, range(20))])
    result = passes.forward(batch, lambda: meanwhile.append(recorder.num_replays))
    assert recorder.num_replays == num_replays
    assert len(meanwhile) == 1
    assert result.logits.shape[0] == rows
    passes.commit(result, batch, [[0]])
    assert recorder.num_replays == 2 * num_replays


def test_more_sequences_with_logits_than_a_bucket_holds(decoder: Decoder) -> None:
    passes, recorder = _passes(decoder, GraphLimits(128, 64, 60))
    sequences = [SequenceRows([7], 0, slot, [slot]) for slot in range(65)]
    assert passes.forward(build_batch(sequences)).logits.shape[0] == 65
    assert recorder.num_replays == 0


def test_buckets_double_in_rows_and_grow_fourfold_in_context() -> None:
    buckets = GraphLimits(max_rows=5, max_context=5000, max_seconds=1).buckets(block=64)
    assert buckets == [Bucket(rows, blocks) for rows in (4, 2, 1) for blocks in (79, 64, 16)]
    assert GraphLimits(max_rows=0, max_context=5000, max_seconds=1).buckets(block=64) == []


def test_capturing_ends_with_its_time(decoder: Decoder) -> None:
    """The largest bucket comes first, so that what is left out still finds one."""
    passes, recorder = _passes(decoder, GraphLimits(8, 64, max_seconds=0.0))
    assert passes.forward(build_batch([SequenceRows([1], 0, 0, [0])])).logits.shape[0] == 1
    assert recorder.num_replays == 0


def test_row_costs_are_a_staircase_that_never_falls(decoder: Decoder) -> None:
    passes, _ = _passes(decoder, GraphLimits(9, 64, 60))
    costs = passes.row_costs()
    assert [rows for rows, _ in costs] == [1, 2, 3, 4, 5, 8]
    assert all(a <= b for (_, a), (_, b) in pairwise(costs))
    assert costs[2][1] == costs[3][1] > 0


@pytest.mark.parametrize("make_passes", [LaunchedPasses, rerun_passes])
def test_a_commit_in_parts_is_a_whole_one(decoder: Decoder, make_passes: Callable[..., Passes]) -> None:
    """The prefix cache stops a commit wherever it wants the recurrent state, also within an accepted draft."""
    chunk = SequenceRows(list(range(3, 15)), 0, 0, [0, 1], logit_rows=[])
    tree = SequenceRows([5, 6, 7, 8], 3, 1, [2, 3], parents=[-1, 0, 0, 2])
    whole_paths: list[list[int]] = [list(range(12)), [0, 2, 3]]
    states = []
    for parts in ([(12, 3)], [(5, 0), (5, 2), (12, 3)], [(1, 1), (2, 3), (12, 3)]):
        state = allocate_state(decoder.config, 4, 2, block=8)
        passes = make_passes(decoder, state)
        first = build_batch([SequenceRows([9, 8, 7], 0, 1, [2, 3], logit_rows=[])])
        passes.commit(passes.forward(first), first, [[0, 1, 2]])
        batch = build_batch([chunk, tree])
        result, done = passes.forward(batch), (0, 0)
        for ends in parts:
            spans = zip(whole_paths, done, ends, strict=True)
            passes.commit(result, batch, [path[start:end] for path, start, end in spans], done)
            done = ends
        states.append(torch.cat([part.flatten() for layer in state.layers for part in vars_of(layer)]))
    for state_in_parts in states[1:]:
        assert_same_bits(state_in_parts, states[0])


def vars_of(layer: KVLayer | RecurrentLayer) -> tuple[torch.Tensor, torch.Tensor]:
    return (layer.keys, layer.values) if isinstance(layer, KVLayer) else (layer.conv, layer.delta)
