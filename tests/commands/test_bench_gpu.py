# SPDX-License-Identifier: Apache-2.0
"""`tandem bench gpu`, as far as it goes without a GPU."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tandem_backend.benchmarks.shapes import SHAPES, write_shape
from tandem_backend.commands.bench import bench
from tandem_backend.model.config import load_model_config
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.random_weights import RandomWeights


@pytest.mark.parametrize(("shape", "billions"), [("qwen3.5-4b", 4.2), ("qwen3.5-9b", 8.95), ("qwen3.5-27b", 26.9)])
def test_a_named_shape_has_its_sizes(shape: str, billions: float, tmp_path: Path) -> None:
    c = load_model_config(write_shape(shape, tmp_path))
    delta = c.delta
    assert delta is not None
    values = delta.value_heads * delta.value_dim
    mixers = {
        "delta": delta.conv_channels + values + 2 * delta.value_heads + values,
        "attention": 3 * c.num_heads * c.head_dim + 2 * c.num_kv_heads * c.head_dim,
    }
    layers = sum(c.hidden_size * (mixers[kind] + 3 * c.intermediate_size) for kind in c.layer_kinds)
    tables = c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
    assert (layers + tables) / 1e9 == pytest.approx(billions, abs=0.05)


def test_random_weights_make_a_decoder(tmp_path: Path) -> None:
    """The same seed gives the same weights."""
    small = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    SHAPES["small"] = {**SHAPES["qwen3.5-4b"], **small}
    try:
        write_shape("small", tmp_path)
    finally:
        del SHAPES["small"]
    cpu = torch.device("cpu")
    one, other = (Decoder(tmp_path, cpu, RandomWeights(cpu, seed=3)) for _ in range(2))
    assert torch.equal(one.head.data, other.head.data)
    assert one.num_weight_bytes() == sum(weight.num_bytes for weight in one.packed_weights()) > 0


@pytest.mark.parametrize("arguments", [[], ["--shape", "qwen3.5-4b", "--checkpoint", "."]])
def test_a_shape_or_a_checkpoint_is_needed(arguments: list[str]) -> None:
    result = CliRunner().invoke(bench, ["gpu", *arguments])
    assert result.exit_code == 2
    assert "either --shape or --checkpoint" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message of a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(bench, ["gpu", "--shape", "qwen3.5-4b"])
    assert result.exit_code == 1
    assert "CUDA is not available" in result.output
