# SPDX-License-Identifier: Apache-2.0
"""What sequences of a checkpoint take, by the arithmetic that admission uses (engine/sizes.py), on the CPU."""

from pathlib import Path
from typing import Any

from tandem_backend.config import EngineConfig
from tandem_backend.engine.sizes import memory_sizes
from tandem_backend.errors import CheckpointError
from tandem_backend.model.config import load_model_config


def describe_memory(directory: Path, context: int | None) -> dict[str, Any]:
    """A JSON object for `tandem inspect --memory`; context: tokens, None for as many as the checkpoint allows.

    Raises CheckpointError.
    """
    config = load_model_config(directory)
    if context is not None and context > config.max_position:
        raise CheckpointError(f"context: at most {config.max_position} (the checkpoint's), got {context}")
    num_tokens = context or config.max_position
    sizes = memory_sizes(config, with_mtp=config.num_mtp_layers > 0, draft_model=None)
    defaults = EngineConfig(checkpoint=directory)
    kv_bytes = sizes.num_blocks(num_tokens) * sizes.block_bytes
    return {
        "context": num_tokens,
        "with_mtp": config.num_mtp_layers > 0,
        "bytes_per_token": sizes.token_bytes,
        "block_tokens": sizes.block,
        "block_bytes": sizes.block_bytes,
        "blocks_per_sequence": sizes.num_blocks(num_tokens),
        "kv_bytes_per_sequence": kv_bytes,
        "state_bytes_per_sequence": sizes.slot_bytes,
        "bytes_per_sequence": sizes.sequence_bytes(num_tokens),
        "bytes_per_anchor": sizes.anchor_bytes,
        "kv_cache_bytes": defaults.kv_cache_bytes,
        "sequences_in_kv_cache": defaults.kv_cache_bytes // kv_bytes if kv_bytes else None,
        "prefix_cache_bytes": defaults.prefix_cache_bytes,
        "anchors_in_prefix_cache": defaults.prefix_cache_bytes // sizes.anchor_bytes if sizes.anchor_bytes else None,
    }


def render_memory(report: dict[str, Any]) -> str:
    drafts = ", the mtp drafter's included" if report["with_mtp"] else ""
    fit, anchors = report["sequences_in_kv_cache"], report["anchors_in_prefix_cache"]
    rows = {
        "a token": f"{report['bytes_per_token']:,} bytes of KV{drafts}",
        "a block": f"{report['block_bytes']:,} bytes, {report['block_tokens']} tokens",
        "a sequence": f"{report['bytes_per_sequence']:,} bytes: {report['blocks_per_sequence']:,} blocks and "
        f"{report['state_bytes_per_sequence']:,} bytes of recurrent state",
        "an anchor": f"{report['bytes_per_anchor']:,} bytes",
        "kv_cache": f"{report['kv_cache_bytes']:,} bytes by default: "
        + ("any number of sequences" if fit is None else f"{fit:,} such sequences"),
        "prefix_cache": f"{report['prefix_cache_bytes']:,} bytes by default, blocks and anchors"
        + ("" if anchors is None else f": at most {anchors:,} anchors"),
    }
    title = f"memory at {report['context']:,} tokens"
    return "\n".join([title, *(f"  {name:<14}{value}" for name, value in rows.items())])
