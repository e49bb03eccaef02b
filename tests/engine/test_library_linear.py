# SPDX-License-Identifier: Apache-2.0
"""prefill_linear: cublas. The library is used where it gives our bits and nowhere else."""

from pathlib import Path

import pytest
from engine_driver import EngineDriver, engine_config
from fakes.tiny_model import tiny_checkpoint
from tandem_backend.engine import library_linear
from tandem_backend.engine.library_linear import allow_library
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.state import allocate_state
from tandem_kernels import PackedWeight
from torch import Tensor


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    return Decoder(tiny_checkpoint(tmp_path, "qwen3_5_text"))


def allowed_rows(decoder: Decoder) -> set[frozenset[int]]:
    return {frozenset(weight.library_rows) for weight in decoder.residual_weights()}


def test_what_gives_the_same_bits_is_allowed(decoder: Decoder) -> None:
    """Up to the rows of a prompt pass and to the context; on the CPU the library is our kernel."""
    state = allocate_state(decoder.config, 1, 1)
    assert allow_library(decoder, state, 300) == {128, 256, 300}
    assert allowed_rows(decoder) == {frozenset({128, 256, 300})}
    assert allow_library(decoder, state, 8192) == {128, 256, 512}


def test_a_shape_with_other_bits_is_left_out(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, shape = library_linear.kernels.linear, decoder.layers[0].mlp.kernel.down

    def inexact(x: Tensor, weight: PackedWeight, residual: Tensor | None = None) -> Tensor:
        return linear(x, weight, residual) + (1.0 if weight is shape and len(x) in weight.library_rows else 0.0)

    monkeypatch.setattr(library_linear.kernels, "linear", inexact)
    assert allow_library(decoder, allocate_state(decoder.config, 1, 1), 128) == {128}
    for weight in decoder.residual_weights():
        is_of_the_shape = (weight.num_outputs, weight.num_inputs) == (shape.num_outputs, shape.num_inputs)
        assert weight.library_rows == (set() if is_of_the_shape else {128})


def test_a_pass_with_other_bits_allows_nothing(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, num_passes = library_linear._pass, iter(range(10))

    def inexact(decoder: Decoder, *args: object) -> tuple[Tensor, Tensor]:
        logits, hidden = forward(decoder, *args)  # type: ignore[arg-type]
        return logits, hidden + next(num_passes) % 2

    monkeypatch.setattr(library_linear, "_pass", inexact)
    assert allow_library(decoder, allocate_state(decoder.config, 1, 1), 256) == set()
    assert allowed_rows(decoder) == {frozenset()}


def test_an_engine_takes_the_option(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid, prefill_linear="cublas", max_prefill_rows=128, self_test_rows=40))
    model = driver.engine.model
    if model.device.type == "cpu":
        assert allowed_rows(model) == {frozenset({128})}
    assert driver.engine.self_test is not None
