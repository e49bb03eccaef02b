# SPDX-License-Identifier: Apache-2.0
"""Bugs that once were or could be: each is put back here, and the checks of exactness must see it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tandem_kernels as kernels
import torch
from engine_driver import VOCAB_SIZE, EngineDriver, Plain, engine_config, num_different
from tandem_backend.engine import self_test
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.errors import SelfTestError
from tandem_backend.model import decoder
from tandem_backend.model.batch import AcceptedRows, RowBatch, SequenceRows, build_batch
from tandem_backend.model.decoder import Decoder, ForwardResult
from tandem_backend.model.layers import Attention
from tandem_backend.model.state import ModelState
from tandem_backend.types import Prompt, Request, SamplingParams
from tandem_kernels.layers import delta_layer_by_ops, mlp_layer_by_ops
from tandem_kernels.linear import unpack_weight
from torch import Tensor

Mutation = Callable[[pytest.MonkeyPatch], None]


def commit_rejected_rows_to_the_state(patch: pytest.MonkeyPatch) -> None:
    """The recurrent state keeps the whole draft tree, as if it were never rolled back."""
    commit, commit_delta = Decoder.commit, decoder.commit_delta_layers
    whole: list[AcceptedRows] = []

    def commit_pass(
        self: Decoder,
        result: ForwardResult,
        batch: RowBatch,
        paths: Sequence[Sequence[int]],
        state: ModelState,
        offsets: Sequence[int] | None = None,
    ) -> AcceptedRows:
        rows = torch.arange(batch.num_rows, dtype=torch.int32)
        whole[:] = [AcceptedRows(batch.packed, batch.slots, batch.seq_starts, rows, torch.empty(0))]
        return commit(self, result, batch, paths, state, offsets)

    patch.setattr(Decoder, "commit", commit_pass)
    patch.setattr(decoder, "commit_delta_layers", lambda *args: commit_delta(*args[:-1], whole[0]))


def commit_the_anchor_twice(patch: pytest.MonkeyPatch) -> None:
    """The recurrent state takes the first row's step twice."""
    commit_delta = decoder.commit_delta_layers

    def commit(mixers: Any, rows: Any, states: Any, accepted: AcceptedRows) -> None:
        starts, paths = accepted.path_starts.tolist(), accepted.path_rows.tolist()
        doubled = [[paths[a], *paths[a:b]] for a, b in pairwise(starts)]
        counts = torch.tensor([0, *map(len, doubled)]).cumsum(0).to(torch.int32)
        rows_twice = torch.tensor([row for path in doubled for row in path], dtype=torch.int32)
        commit_delta(mixers, rows, states, replace(accepted, path_starts=counts, path_rows=rows_twice))

    patch.setattr(decoder, "commit_delta_layers", commit)


def store_keys_of_rejected_rows(patch: pytest.MonkeyPatch) -> None:
    """The KV cache gets as many rows as were accepted, but the first ones of the tree."""
    commit_attention = Attention.commit

    def commit(self: Attention, rows: Any, accepted: AcceptedRows, state: Any) -> None:
        paths = accepted.path_rows.tolist()
        first = [paths[a] + n for a, b in pairwise(accepted.path_starts.tolist()) for n in range(b - a)]
        commit_attention(self, rows, replace(accepted, path_rows=torch.tensor(first, dtype=torch.int32)), state)

    patch.setattr(Attention, "commit", commit)


def flattened(parents: Tensor) -> Tensor:
    """Each row hangs on the row before it: siblings become ancestors."""
    return torch.where(parents < 0, parents, torch.arange(len(parents), dtype=torch.int32) - 1)


def see_siblings_in_attention(patch: pytest.MonkeyPatch) -> None:
    forward = Attention.forward

    def mutated(self: Attention, x: Tensor, batch: RowBatch, *args: Any) -> Any:
        return forward(self, x, replace(batch, parents=flattened(batch.parents)), *args)

    patch.setattr(Attention, "forward", mutated)


def start_from_a_siblings_state(patch: pytest.MonkeyPatch) -> None:
    delta_layer = kernels.delta_layer
    patch.setattr(
        kernels, "delta_layer", lambda layer, x, parents, *rest: delta_layer(layer, x, flattened(parents), *rest)
    )


def convolve_with_a_sibling(patch: pytest.MonkeyPatch) -> None:
    def causal_conv(x: Tensor, state: Tensor, weight: Tensor, parents: Tensor, row_slots: Tensor) -> Tensor:
        return kernels.causal_conv(x, state, weight, flattened(parents), row_slots)

    patch.setattr(kernels, "delta_layer", lambda *args: delta_layer_by_ops(*args[:8]))
    patch.setattr("tandem_kernels.layers.causal_conv", causal_conv)


def count_positions_by_row(patch: pytest.MonkeyPatch) -> None:
    """A node's position is its index in the tree, not its depth."""

    def mutated(sequences: Sequence[SequenceRows]) -> RowBatch:
        batch = build_batch(sequences)
        positions = [seq.prefix_len + row for seq in sequences for row in range(len(seq.token_ids))]
        return replace(batch, positions=torch.tensor(positions, dtype=torch.int32))

    patch.setattr("tandem_backend.engine.round.build_batch", mutated)
    patch.setattr(self_test, "build_batch", mutated)


def split_by_row_count(x: Tensor, weight: kernels.PackedWeight, residual: Tensor | None = None) -> Tensor:
    """Two partial sums for several rows, one sum for one row."""
    if x.shape[0] == 1:
        return kernels.linear(x, weight, residual)
    plain, half = unpack_weight(weight), weight.num_inputs // 2
    out = x[:, :half] @ plain[:, :half].T + x[:, half:] @ plain[:, half:].T
    return out if residual is None else out + residual


def reduce_by_row_count_in_the_head(patch: pytest.MonkeyPatch) -> None:
    linear = kernels.linear

    def mutated(x: Tensor, weight: kernels.PackedWeight, residual: Tensor | None = None) -> Tensor:
        return linear(x, weight, residual) if x.shape[0] == 1 else split_by_row_count(x, weight, residual)

    patch.setattr(kernels, "linear", mutated)


def reduce_by_row_count_in_the_mlp(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernels, "mlp_layer", mlp_layer_by_ops)
    patch.setattr("tandem_kernels.layers.linear", split_by_row_count)


def put_blocks_together_from_ops(patch: pytest.MonkeyPatch) -> None:
    """No bug: what some of the mutations are made of has the blocks' bits."""
    patch.setattr(kernels, "delta_layer", lambda *args: delta_layer_by_ops(*args[:8]))
    patch.setattr(kernels, "mlp_layer", mlp_layer_by_ops)


BUGS = (
    see_siblings_in_attention,
    start_from_a_siblings_state,
    convolve_with_a_sibling,
    count_positions_by_row,
    reduce_by_row_count_in_the_head,
    reduce_by_row_count_in_the_mlp,
    commit_rejected_rows_to_the_state,
    commit_the_anchor_twice,
    store_keys_of_rejected_rows,
)


def num_speculated_differences(hybrid: Path, plain: Plain) -> int:
    """Differing tokens, rows and logprobs of some requests that draft trees, decoded together."""
    prompts = [(3, 4, 5), (7, 8) * 20, tuple(range(3, 31)) * 2]
    params = SamplingParams(max_tokens=24, ignore_eos=True, drafter="half")
    references = [plain.run(prompt, params) for prompt in prompts]
    half = ScriptedDrafter("half", plain.continuation, VOCAB_SIZE)
    config = engine_config(hybrid, router="always", row_budget=48, max_draft_tokens=12)
    driver = EngineDriver(config, {"half": half})
    for n, prompt in enumerate(prompts):
        driver.add(Request(request_id=str(n), prompt=Prompt(token_ids=prompt), params=params))
    driver.finish()
    return sum(num_different(driver.results[str(n)], reference) for n, reference in enumerate(references))


@pytest.fixture
def known_plain(hybrid: Path, plain: Plain) -> Plain:
    """The reference, decoded before anything is broken."""
    assert num_speculated_differences(hybrid, plain) == 0
    return plain


@pytest.mark.parametrize("mutation", BUGS, ids=lambda m: m.__name__)
def test_the_comparison_sees_the_bug(
    mutation: Mutation, hybrid: Path, known_plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    assert num_speculated_differences(hybrid, known_plain) > 0
    monkeypatch.undo()
    assert num_speculated_differences(hybrid, known_plain) == 0


@pytest.mark.parametrize("mutation", BUGS, ids=lambda m: m.__name__)
def test_an_engine_with_the_bug_does_not_load(
    mutation: Mutation, hybrid: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mutation(monkeypatch)
    with pytest.raises(SelfTestError, match=r"differs from one-token decoding|gives other bits"):
        EngineDriver(engine_config(hybrid, self_test_rows=96))
    assert "exactness self-test: FAILED" in caplog.text


def test_blocks_put_together_from_ops_are_exact(
    hybrid: Path, known_plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_blocks_together_from_ops(monkeypatch)
    assert num_speculated_differences(hybrid, known_plain) == 0


@pytest.mark.parametrize("num_rows", [1, 10, 96, 300])
def test_the_self_test_passes_and_says_how_many_rows_it_saw(
    hybrid: Path, num_rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    driver = EngineDriver(engine_config(hybrid, self_test_rows=num_rows))
    assert num_rows <= driver.engine.statistics()["self_test_rows"] < num_rows + 30
    assert f"exactness self-test: {driver.engine.statistics()['self_test_rows']} rows bit-equal" in caplog.text


def test_a_self_test_of_no_rows_is_skipped_with_a_warning(hybrid: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = EngineDriver(engine_config(hybrid, self_test_rows=0))
    assert driver.engine.self_test is None
    assert driver.engine.statistics()["self_test_rows"] == 0
    assert [r.levelname for r in caplog.records if "exactness self-test: skipped" in r.message] == ["WARNING"]


def test_requests_do_not_see_what_the_self_test_left(hybrid: Path, plain: Plain) -> None:
    driver = EngineDriver(engine_config(hybrid, self_test_rows=96))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    result = driver.run(Request(request_id="1", prompt=Prompt(token_ids=(3, 4, 5)), params=params))
    assert num_different(result, plain.run((3, 4, 5), params)) == 0
