# SPDX-License-Identifier: Apache-2.0
"""What an engine takes of its device's memory, and whether that fits."""

from dataclasses import dataclass

import tandem_kernels as kernels

from tandem_backend.config import EngineConfig
from tandem_backend.engine.sizes import MemorySizes
from tandem_backend.errors import ConfigError
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.state import slot_bytes

RESERVED_BYTES = 2 << 30  # for captured passes, and what passes need beyond what they keep until commit


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use. What captured passes take is measured once they exist."""

    weights: int
    kv: int  # blocks of the target's and the drafters' KV
    states: int  # recurrent slots
    anchors: int  # copies of recurrent slots in the prefix cache, at most
    rows: int  # what the largest pass keeps until commit
    graphs: int = 0  # captured passes

    @classmethod
    def of(
        cls, model: Decoder, sizes: MemorySizes, config: EngineConfig, num_blocks: int, num_slots: int
    ) -> "MemoryPlan":
        each = slot_bytes(model.config, model.device)
        anchors = config.prefix_cache_bytes if each else 0
        joint_rows = max(config.max_active, config.row_budget) + config.joint_prefill_rows
        rows = model.pass_bytes(max(config.max_prefill_rows, joint_rows))
        return cls(model.num_weight_bytes(), num_blocks * sizes.block_bytes, num_slots * each, anchors, rows)

    def statistics(self) -> dict[str, float]:
        return {"weight_bytes": self.weights, "state_bytes": self.states, "graph_bytes": self.graphs}

    def check(self, model: Decoder) -> None:
        """Raises ConfigError where KV, states and passes don't fit beside the weights, which are loaded already."""
        free = kernels.free_bytes(model.device)
        passes = self.rows + RESERVED_BYTES
        if free is not None and self.kv + self.states + self.anchors + passes > free:
            raise ConfigError(
                f"kv_cache_bytes, max_active, max_sessions, prefix_cache_bytes, max_prefill_rows: {_gib(self.kv)} of "
                f"KV, {_gib(self.states)} of recurrent state and {_gib(self.anchors)} of cached states do not fit into "
                f"the {_gib(free)} that {_gib(self.weights)} of weights leave of {model.device}, with {_gib(passes)} "
                "kept for passes"
            )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
