# SPDX-License-Identifier: Apache-2.0
"""What sequences and anchors take, in bytes: for admission, the caches' budgets and `tandem inspect --memory`."""

from dataclasses import dataclass

import tandem_kernels as kernels
import torch
from tandem_kernels.device import CPU

from tandem_backend.config import EngineConfig
from tandem_backend.engine.self_test import NUM_BLOCKS
from tandem_backend.errors import ConfigError
from tandem_backend.model.config import ModelConfig
from tandem_backend.model.state import KV_BLOCK, block_bytes, slot_bytes


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Of one checkpoint with its drafters."""

    block: int  # tokens of a KV block
    block_bytes: int  # of one block over all layers, drafters' included
    slot_bytes: int  # recurrent state of a sequence, a draft model's included
    anchor_bytes: int  # recurrent state kept for later, with what the mtp drafter goes on from

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block)

    def num_pool_blocks(self, config: EngineConfig, num_sequences: int, max_context_len: int) -> int:
        """Blocks that kv_cache_bytes pays for; never more than the sequences and the prefix cache could fill.

        Raises ConfigError where they are too few for the self-test.
        """
        most = max(num_sequences * self.num_blocks(max_context_len), NUM_BLOCKS)
        if not self.block_bytes:
            return most
        wanted = most * self.block_bytes + config.prefix_cache_bytes
        num_blocks = min(config.kv_cache_bytes, wanted) // self.block_bytes
        if config.self_test_rows and num_blocks < NUM_BLOCKS:
            raise ConfigError(f"kv_cache_bytes: holds {num_blocks} KV blocks; the self-test needs {NUM_BLOCKS}")
        return num_blocks

    def sequence_bytes(self, num_tokens: int) -> int:
        """A sequence's whole state after so many tokens."""
        return self.num_blocks(num_tokens) * self.block_bytes + self.slot_bytes


def memory_sizes(
    target: ModelConfig, *, with_mtp: bool, draft_model: ModelConfig | None, device: torch.device = CPU
) -> MemorySizes:
    """The sizes for a target that drafts with its mtp head, another checkpoint, both or neither."""
    own_slot, hidden = slot_bytes(target, device), kernels.row_dtype(device).itemsize * target.hidden_size
    return MemorySizes(
        block=KV_BLOCK,
        block_bytes=block_bytes(target, num_extra_layers=int(with_mtp), device=device)
        + (block_bytes(draft_model, device=device) if draft_model is not None else 0),
        slot_bytes=own_slot + (slot_bytes(draft_model, device) if draft_model is not None else 0),
        anchor_bytes=own_slot + (hidden if with_mtp else 0),
    )
