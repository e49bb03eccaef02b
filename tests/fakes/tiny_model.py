# SPDX-License-Identifier: Apache-2.0
"""Random tiny checkpoints of every family on disk, built from transformers' own models."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

LOGIT_SPREAD = 3.0  # standard deviation of the logits, about

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# No size is a multiple of 16, and the vocabulary is odd.
_SIZES = {
    "vocab_size": 151,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.3},
}
# family: (transformers' config class, its model class, what it adds to the sizes)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_DELTA, "num_experts": 0}),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _DELTA),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _DELTA),
}


def tiny_checkpoint(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    mtp: bool = False,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a checkpoint of random weights that depend on `seed` only; `overrides` are keys of config.json.

    `mtp` adds the tensors of a multi-token-prediction head (hybrid families). A small `max_shard_size` ("20KB") gives
    several files with an index. The family "qwen3_5" is nested as in its multimodal checkpoints, with a visual tensor.
    Returns `directory`.
    """
    config_class, model_class, defaults = _FAMILIES[family]
    config = getattr(transformers, config_class)(**{**_SIZES, **defaults, **overrides})
    generator = torch.Generator().manual_seed(seed)
    tensors = _random_weights(getattr(transformers, model_class)(config), generator)
    if mtp:
        head = getattr(transformers, model_class)(_one_attention_layer(config))
        tensors.update(_mtp_weights(_random_weights(head, generator), config.hidden_size, generator))
        config.mtp_num_hidden_layers = 1
    config.architectures = [model_class]
    if family == "qwen3_5":
        config, tensors = _nest(config, tensors)
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_torch_state_dict(stored, str(directory), max_shard_size=max_shard_size)
    return directory


def edit_config(checkpoint: Path, *dropped: str, **changes: Any) -> Path:
    """Rewrite keys of a checkpoint's config.json. Returns `checkpoint`."""
    path = checkpoint / "config.json"
    values = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if key not in dropped}), encoding="utf-8")
    return checkpoint


def _random_weights(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Tensor]:
    tied = model.config.tie_word_embeddings
    return {
        name: _random_tensor(name, tensor, generator)
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def _random_tensor(name: str, initial: Tensor, generator: torch.Generator) -> Tensor:
    """Scaled so that every layer adds about as much as it gets, and the logits lie well apart."""
    noise = torch.randn(initial.shape, generator=generator)
    if name.endswith("A_log"):
        return noise * 0.7 - 1.0
    if name.endswith("dt_bias"):
        return noise * 0.5
    if name.endswith("norm.weight"):
        return initial.float() + 0.1 * noise  # transformers starts plain norms at 1, zero-centred ones at 0
    if name.endswith("conv1d.weight"):
        return noise * 0.5
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return noise * LOGIT_SPREAD / math.sqrt(initial.shape[-1])
    return noise / math.sqrt(initial.shape[-1])


def _one_attention_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    return type(config).from_dict({**config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]})


def _mtp_weights(model: dict[str, Tensor], hidden: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The head's tensors from those of a one-layer model of the same sizes."""
    layer = {f"mtp.{name.removeprefix('model.')}": model[name] for name in model if ".layers." in name}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {
        **layer,
        "mtp.fc.weight": torch.randn(hidden, 2 * hidden, generator=generator) / math.sqrt(2 * hidden),
        **{f"mtp.{name}.weight": 0.1 * torch.randn(hidden, generator=generator) for name in norms},
    }


def _nest(text: PreTrainedConfig, tensors: dict[str, Tensor]) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": text.hidden_size}
    config = transformers.Qwen3_5Config(
        text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=text.tie_word_embeddings
    )
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    renamed = {
        f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    return config, {**renamed, "model.visual.merger.norm.weight": torch.ones(8)}
