# SPDX-License-Identifier: Apache-2.0
"""The decoder's logits are transformers' in float32, for every family and odd sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tiny_model import LLAMA3_ROPE, edit_config, tiny_checkpoint
from model_driver import Driver, Rows
from tandem_backend.model.config import load_model_config
from tandem_backend.model.decoder import Decoder
from torch import Tensor
from transformers import AutoModelForCausalLM

NUM_TOKENS = 70  # more than a KV block
ATTENTION_ENDS = {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
FULL_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-default-head-dim": ("llama", {"head_dim": None, "hidden_size": 40, "num_key_value_heads": 4}),
    "llama-tied-gqa8": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 9, "num_key_value_heads": 1}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-bf16": ("llama", {"dtype": torch.bfloat16}),
    "llama-f16": ("llama", {"dtype": torch.float16}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-gqa8": ("qwen3", {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "qwen3-llama3-rope": ("qwen3", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next-attention-ends": ("qwen3_next", {**ATTENTION_ENDS, "tie_word_embeddings": True}),
    "qwen3_next-mlp-only": ("qwen3_next", {"num_experts": 8, "mlp_only_layers": [0, 1, 2]}),
    "qwen3_next-one-value-head-a-key-head": ("qwen3_next", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3}),
    "qwen3_5_text": ("qwen3_5_text", {}),
    "qwen3_5_text-attention-ends": ("qwen3_5_text", {**ATTENTION_ENDS, "num_key_value_heads": 1}),
    "qwen3_5_text-attention-only": ("qwen3_5_text", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    "qwen3_5_text-delta-only": ("qwen3_5_text", {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}),
    "qwen3_5_text-interval": (
        "qwen3_5_text",
        {"num_hidden_layers": 4, "layer_types": None, "full_attention_interval": 2},
    ),
    "qwen3_5_text-full-rotary": ("qwen3_5_text", FULL_ROTARY),
    "qwen3_5_text-tied-bf16-mtp": ("qwen3_5_text", {"dtype": torch.bfloat16, "tie_word_embeddings": True, "mtp": True}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5-tied-mtp": ("qwen3_5", {"tie_word_embeddings": True, "mtp": True}),
}


def _prompt(vocab_size: int) -> list[int]:
    return torch.randint(0, vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


def _our_logits(checkpoint: Path) -> Tensor:
    """All rows of a prompt, prefilled in two chunks."""
    decoder = Decoder(checkpoint)
    driver = Driver(decoder, block=64, max_len=NUM_TOKENS)
    prompt, seq = _prompt(decoder.config.vocab_size), driver.sequences[0]
    return torch.cat([driver.forward(Rows(seq, chunk))[0] for chunk in (prompt[:41], prompt[41:])])


@torch.inference_mode()
def _their_logits(checkpoint: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model(torch.tensor([_prompt(model.config.get_text_config().vocab_size)]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = CASES[name]
    checkpoint = tiny_checkpoint(tmp_path, family, **overrides)
    theirs = _their_logits(checkpoint)
    assert theirs.std() > 1.0  # a difference would show
    assert (_our_logits(checkpoint) - theirs).abs().max() < 1e-3


def test_shards_give_the_same_bits_as_one_file(tmp_path: Path) -> None:
    one = tiny_checkpoint(tmp_path / "one", "qwen3_5_text", mtp=True)
    many = tiny_checkpoint(tmp_path / "many", "qwen3_5_text", mtp=True, max_shard_size="20KB")
    assert len(list(many.glob("*.safetensors"))) > 3
    assert torch.equal(_our_logits(one), _our_logits(many))


@pytest.mark.parametrize(
    ("family", "rope", "older_keys"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        (
            "llama",
            LLAMA3_ROPE,
            {
                "rope_theta": LLAMA3_ROPE["rope_theta"],
                "rope_scaling": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
            },
        ),
        (
            "qwen3_5_text",
            {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        ),
    ],
)
def test_older_rope_keys_mean_the_same(
    tmp_path: Path, family: str, rope: dict[str, Any], older_keys: dict[str, Any]
) -> None:
    new = load_model_config(tiny_checkpoint(tmp_path, family, rope_parameters=rope))
    old = load_model_config(edit_config(tmp_path, "rope_parameters", **older_keys))
    assert old == new
    assert old.rope_theta == rope["rope_theta"]
