# SPDX-License-Identifier: Apache-2.0
"""Sizes of published models, as their config.json has them: enough to measure with random weights."""

import json
from pathlib import Path
from typing import Any

_QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-4b": {**_QWEN3_5, "hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
    "qwen3.5-9b": {**_QWEN3_5, "hidden_size": 4096, "intermediate_size": 12288},
    "qwen3.5-27b": {
        **_QWEN3_5,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
    },
}


def write_shape(name: str, directory: Path) -> Path:
    """A directory with nothing but the config.json of a named shape."""
    (directory / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    return directory
