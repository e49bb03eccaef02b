# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that can't be served are refused at load, naming the file, the key or the tensor."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tiny_model import LLAMA3_ROPE, edit_config, tiny_checkpoint
from safetensors.torch import load_file, save_file
from tandem_backend.errors import CheckpointError
from tandem_backend.model.config import load_model_config
from tandem_backend.model.decoder import Decoder
from torch import Tensor

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def _edit_tensors(checkpoint: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    return checkpoint


def _assert_refused(checkpoint: Path, *words: str) -> None:
    with pytest.raises(CheckpointError, match=".*".join(re.escape(word) for word in words)):
        Decoder(checkpoint)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"model_type": "gpt2"}, ["config.json", "model_type 'gpt2'", "llama, qwen3, qwen3_next, qwen3_5"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ("llama", {"attention_bias": True}, ["attention_bias True"]),
        ("llama", {"mlp_bias": True}, ["mlp_bias True"]),
        ("qwen3", {"use_sliding_window": True}, ["use_sliding_window True"]),
        ("qwen3_5_text", {"attn_output_gate": False}, ["attn_output_gate False"]),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, ["rope_type 'yarn'", "default, llama3"]),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": None}, ["rope_type 'linear'"]),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ("qwen3_next", {"rope_parameters": {"partial_rotary_factor": 0.25}}, ["partial_rotary_factor 0.25", "even"]),
        ("qwen3_next", {"num_experts": 8}, ["num_experts 8", "mixture-of-experts"]),
        ("qwen3_next", {"num_experts": 8, "mlp_only_layers": [0, 2]}, ["num_experts 8", "mixture-of-experts"]),
        ("qwen3_5_text", {"layer_types": ["full_attention"]}, ["layer_types", "1 entries for 3 layers"]),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, ["layer_types 'sliding_attention'"]),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, ["layer_types 'linear_attention'"]),
        ("llama", {"num_attention_heads": 3}, ["num_attention_heads", "num_key_value_heads"]),
        ("qwen3_5_text", {"linear_num_value_heads": 5}, ["linear_num_value_heads", "linear_num_key_heads"]),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 17}, ["linear_conv_kernel_dim", "16"]),
        ("llama", {"hidden_size": None}, ["hidden_size"]),
        ("llama", {"vocab_size": "many"}, ["vocab_size", "'many'"]),
        ("llama", {"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1"]),
        ("llama", {"num_hidden_layers": 2.5}, ["num_hidden_layers", "integer"]),
        ("llama", {"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
        ("qwen3_5", {"text_config": None}, ["text_config", "object"]),
    ],
)
def test_configs_are_refused_by_key(family: str, changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    _assert_refused(edit_config(tiny_checkpoint(tmp_path, family), **changes), *words)


@pytest.mark.parametrize("value", [None, "text", [], [1], {}, {"a": 1}, -1, 0, 2.5, True, [[]]], ids=repr)
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "qwen3_5_text"])
def test_a_wrong_value_of_any_key_is_read_or_refused(family: str, value: object, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family)
    original = (tmp_path / "config.json").read_text(encoding="utf-8")
    for key in [*json.loads(original), "rope_scaling", "rope_theta", "full_attention_interval", "mlp_only_layers"]:
        edit_config(tmp_path, **{key: value})
        try:
            load_model_config(tmp_path)
        except CheckpointError as error:
            assert "config.json" in str(error)  # noqa: PT017
        (tmp_path / "config.json").write_text(original, encoding="utf-8")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(Q_PROJ), [repr(Q_PROJ), "missing"]),
        (lambda tensors: tensors.pop("lm_head.weight"), ["'lm_head.weight'", "missing"]),
        (lambda tensors: tensors.update({"model.layers.3.x": torch.ones(1)}), ["unexpected tensor 'model.layers.3.x'"]),
        (lambda tensors: tensors.update(a=torch.ones(1), b=torch.ones(1)), ["unexpected tensor 'a'", "1 more"]),
        (lambda tensors: tensors.update({Q_PROJ: torch.ones(80, 35)}), [repr(Q_PROJ), "(80, 35)", "(80, 36)"]),
        (lambda tensors: tensors.update({Q_PROJ: torch.ones(80, 36, dtype=torch.int8)}), [repr(Q_PROJ), "I8", "BF16"]),
    ],
    ids=["missing", "no-head", "extra", "two-extra", "shape", "type"],
)
def test_tensors_are_refused_by_name(
    edit: Callable[[dict[str, Tensor]], Any], words: list[str], tmp_path: Path
) -> None:
    _assert_refused(_edit_tensors(tiny_checkpoint(tmp_path, "llama"), edit), *words)


def test_a_stored_head_must_be_the_tied_embedding(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    _edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    Decoder(tmp_path)
    _edit_tensors(tmp_path, lambda tensors: tensors["lm_head.weight"].mul_(2))
    _assert_refused(tmp_path, "lm_head.weight differs", "tie_word_embeddings")


def test_parts_that_the_decoder_does_not_use_are_skipped(tmp_path: Path) -> None:
    def add_parts(tensors: dict[str, Tensor]) -> None:
        names = ("mtp.a", "visual.a", "model.visual.a", "model.layers.0.self_attn.rotary_emb.inv_freq")
        tensors.update({name: torch.ones(1) for name in names})

    Decoder(_edit_tensors(tiny_checkpoint(tmp_path, "llama"), add_parts))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "{", ["config.json", "not valid JSON"]),
        ("config.json", "[]", ["config.json", "JSON object"]),
        ("config.json", None, ["config.json", "No such file"]),
        ("generation_config.json", "nonsense", ["generation_config.json", "not valid JSON"]),
        ("model.safetensors", "nonsense", ["model.safetensors", "can't be read"]),
        ("model.safetensors", None, ["neither model.safetensors nor model.safetensors.index.json"]),
        ("model.safetensors.index.json", "{}", ["index.json", "weight_map"]),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', ["index.json", "weight_map"]),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../x"}}', ["weight_map", "'../x'", "plain file name"]),
        ("model.safetensors.index.json", '{"weight_map": {"a": "gone"}}', ["gone", "can't be read"]),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"no.such": "model.safetensors"}}',
            ["model.safetensors", "'no.such'", "missing"],
        ),
    ],
)
def test_files_are_refused_by_name(file: str, content: str | None, words: list[str], tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama") / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content, encoding="utf-8")
    _assert_refused(tmp_path, *words)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    _assert_refused(tmp_path / "nowhere", "nowhere", "No such file")


def test_stop_tokens_of_generation_config_come_first(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama", rope_parameters=LLAMA3_ROPE)
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}', encoding="utf-8")
    assert load_model_config(tmp_path).eos_token_ids == (7, 9)
