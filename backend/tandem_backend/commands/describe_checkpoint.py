# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is, from its config.json and the headers of its files; no weight is read."""

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tandem_backend.errors import CheckpointError
from tandem_backend.model.checkpoint import SKIPPED_PREFIXES, Checkpoint
from tandem_backend.model.config import ModelConfig, load_model_config
from tandem_backend.model.state import KV_BLOCK, block_bytes, slot_bytes

MTP_PREFIX = "mtp."
CUDA = torch.device("cuda")  # its sizes: none needs to be there
# Bytes of an element, by safetensors' names of types.
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1} | {
    f"{sign}{8 * size}": size for sign in "IU" for size in (1, 2, 4, 8)
}


def describe_checkpoint(directory: Path) -> dict[str, Any]:
    """A JSON object for `tandem inspect`. Raises CheckpointError naming the file, key or tensor."""
    config = load_model_config(directory)
    checkpoint = Checkpoint(directory)
    parameters: Counter[str] = Counter(target=0, mtp=0, other=0)
    stored: Counter[str] = Counter()
    for name in checkpoint.names():
        count, dtype = math.prod(checkpoint.shape(name)), checkpoint.dtype(name)
        if dtype not in DTYPE_BYTES:
            raise CheckpointError(f"{directory}: tensor {name!r} has the unknown type {dtype}")
        parameters[_part_of(name)] += count
        stored[dtype] += count * DTYPE_BYTES[dtype]
    return {
        "checkpoint": str(directory),
        "family": config.model_type,
        "layers": dict(Counter(config.layer_kinds)),
        "parameters": dict(parameters),
        "bytes": dict(stored),
        **_describe_config(config),
        "drafters": {"mtp": _count_mtp_layers(checkpoint)} if parameters["mtp"] else {},
        "kv_bytes_per_token": block_bytes(config) // KV_BLOCK,
        "slot_bytes": slot_bytes(config),
        "cuda": {
            "weight_bytes": 2 * parameters["target"],
            "kv_bytes_per_token": block_bytes(config, device=CUDA) // KV_BLOCK,
            "slot_bytes": slot_bytes(config, CUDA),
        },
    }


def _describe_config(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        "sizes": {
            "hidden": config.hidden_size,
            "intermediate": config.intermediate_size,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
        },
        "delta": None if config.delta is None else asdict(config.delta),
        "rope": {
            "theta": config.rope_theta,
            "rotary_dim": config.rotary_dim,
            "scaling_type": "llama3" if scaling else None,
            **(scaling or {}),
        },
        "context": config.max_position,
        "vocab_size": config.vocab_size,
        "tied": config.tie_embeddings,
        "eos_token_ids": list(config.eos_token_ids),
    }


def _part_of(name: str) -> str:
    if name.startswith(MTP_PREFIX):
        return "mtp"
    return "other" if name.startswith(SKIPPED_PREFIXES) else "target"


def _count_mtp_layers(checkpoint: Checkpoint) -> int:
    prefix = f"{MTP_PREFIX}layers."
    return len({name.removeprefix(prefix).split(".")[0] for name in checkpoint.names() if name.startswith(prefix)})
