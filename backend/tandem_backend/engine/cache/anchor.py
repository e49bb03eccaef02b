# SPDX-License-Identifier: Apache-2.0
"""Anchor: a position of a prefix from which a request can go on, with the recurrent state there."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tandem_backend.model.state import SlotState

if TYPE_CHECKING:
    from tandem_backend.engine.cache.radix import Node


@dataclass(slots=True, eq=False)
class Anchor:
    """After `position` tokens of the prefix that ends in `node`."""

    tenant: Hashable
    node: "Node"
    position: int
    state: SlotState  # recurrent state after that many tokens
    hidden: Tensor | None = None  # [1, hidden_size], the target's at the last token: drafters with KV go on from it
    priority: tuple[float, int] = (0.0, 0)  # the lowest goes first; see eviction.py

    @property
    def num_bytes(self) -> int:
        return self.state.num_bytes + (self.hidden.nbytes if self.hidden is not None else 0)

    def token_ids(self) -> list[int]:
        """The prefix, [position] token ids."""
        return [token_id for node in self.node.path() for token_id in node.token_ids][: self.position]

    def block_ids(self) -> list[int]:
        """The blocks that hold the prefix's KV; the last one in its first rows."""
        return [node.block for node in self.node.path()]
