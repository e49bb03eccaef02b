# SPDX-License-Identifier: Apache-2.0
"""PrefixCache: states of token prefixes, for any request of the same tenant that begins with them.

KV is shared block by block, recurrent state is copied at anchors. Everything lies within one byte budget; blocks are
the pool's, so they also go when requests need them.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from torch import Tensor

from tandem_backend.engine.cache import eviction
from tandem_backend.engine.cache.anchor import Anchor
from tandem_backend.engine.cache.radix import Match, RadixIndex, TokenHash
from tandem_backend.engine.pools import IndexPool
from tandem_backend.model.state import KVLayer, ModelState, SlotState, copy_block
from tandem_backend.types import CacheCounters

EvictionHook = Callable[[Anchor], None]  # called while the anchor's state and blocks are still there


class Resumable(Protocol):
    """What the cache needs to know of a sequence."""

    slot: int
    num_computed: int
    block_table: list[int]


class PrefixCache:
    """`max_bytes` 0 turns it off: nothing is kept and nothing found."""

    def __init__(
        self,
        state: ModelState,
        blocks: IndexPool,
        *,
        drafter_kv: Sequence[KVLayer],
        block_bytes: int,
        max_bytes: int,
        grid: int,
        on_evict: EvictionHook | None = None,
        hash_tokens: TokenHash = hash,
    ) -> None:
        """drafter_kv: KV of drafters under the same block ids; block_bytes: of a block, theirs included.

        An anchor is kept every `grid` tokens beside those at the ends of prompts and answers; 0: only those.
        """
        self.state, self.max_bytes, self.grid = state, max_bytes, grid
        self.block_bytes = block_bytes
        self.on_evict = on_evict
        self.counters = CacheCounters()
        self.kv = [*state.kv_layers(), *drafter_kv]
        self._anchors: dict[int, Anchor] = {}  # by id()
        self._anchor_bytes = 0
        self._clock, self._num_uses = 0.0, 0
        has_kv_only = not state.has_recurrent_layers
        self.index = RadixIndex(state.block, blocks, anywhere=has_kv_only, hash_tokens=hash_tokens)

    @property
    def is_on(self) -> bool:
        return self.max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._anchor_bytes + self.index.num_nodes * self.block_bytes

    @property
    def num_anchors(self) -> int:
        return len(self._anchors)

    def anchor_positions(self, start: int, end: int, num_prompt_tokens: int) -> list[int]:
        """Where in (start, end] anchors are to be taken: before the prompt's last token, and on the grid.

        The same prompt sent again computes just its last token; a longer one resumes there too.
        """
        if not self.is_on:
            return []
        positions = set(range((start // self.grid + 1) * self.grid, end + 1, self.grid)) if self.grid else set()
        if start < num_prompt_tokens - 1 <= end:
            positions.add(num_prompt_tokens - 1)
        return sorted(positions)

    def find(self, tenant: Hashable, token_ids: Sequence[int], *, with_drafter: bool) -> Match | None:
        """The longest prefix that a request of these tokens may resume from; its last token is always computed."""
        return self.index.match(tenant, token_ids, len(token_ids) - 1, with_drafter=with_drafter)

    def resume(self, match: Match, sequence: Resumable) -> None:
        """Give an empty sequence with a slot the match's state. Needs one free block.

        Full blocks are shared. The block of the last token is copied: the sequence goes on writing there.
        """
        assert not sequence.block_table, "a sequence resumes with no blocks of its own"
        path = match.node.path()
        for node in path[:-1]:
            self.index.blocks.share(node.block)
            sequence.block_table.append(node.block)
        own = self.index.blocks.allocate()
        copy_block(self.kv, path[-1].block, own)
        sequence.block_table.append(own)
        if match.anchor is not None:
            self.state.restore_slot(sequence.slot, match.anchor.state)
        sequence.num_computed = match.position
        self._touch(match.anchor or next(eviction.anchors_from(match.node)))

    def add(
        self,
        tenant: Hashable,
        token_ids: Sequence[int],
        block_table: Sequence[int],
        state: SlotState | Callable[[], SlotState],
        hidden: Tensor | None,
        num_drafter_rows: int,
    ) -> None:
        """Keep the state after token_ids, whose KV lies in block_table.

        state: of the recurrent layers, or what copies it if it isn't known yet. hidden: [1, hidden_size] of the last
        token, for block drafters, who have written num_drafter_rows.
        """
        if not self.is_on or not token_ids:
            return
        node = self.index.insert(tenant, token_ids, block_table, num_drafter_rows)
        anchor = node.anchors.get(len(token_ids))
        if anchor is None:
            saved = state if isinstance(state, SlotState) else state()
            anchor = Anchor(tenant, node, len(token_ids), saved)
            node.anchors[anchor.position] = self._anchors[id(anchor)] = anchor
            self._anchor_bytes += anchor.num_bytes
        if anchor.hidden is None and hidden is not None:
            anchor.hidden = hidden
            self._anchor_bytes += hidden.nbytes
        self._touch(anchor)
        self._shrink()

    def make_room(self, num_blocks: int, kept: Match | None) -> bool:
        """Let prefixes go until so many blocks are free, sparing what `kept` needs; says whether they are."""
        blocks = self.index.blocks
        if blocks.num_free >= num_blocks:
            return True
        spared = {node.block for node in kept.node.path()} if kept is not None else set()
        num_spared = sum(self.is_only_here(block) for block in spared)
        if blocks.num_free + self.num_evictable - num_spared < num_blocks:
            return False
        while blocks.num_free < num_blocks:
            anchor = eviction.to_free_blocks(self._anchors.values(), blocks, kept.node if kept is not None else None)
            assert anchor is not None, "as long as there are evictable blocks an anchor holds them"
            self._evict(anchor)
        return True

    @property
    def num_evictable(self) -> int:
        """Blocks that no sequence has."""
        return sum(self.is_only_here(block) for block in self.index.block_ids)

    def is_only_here(self, block: int) -> bool:
        """Whether no sequence has a cached block."""
        return self.index.blocks.num_references(block) == 1

    def comes_free(self, block: int) -> bool:
        """Whether a sequence's block could serve others without that sequence; maybe after an eviction."""
        return self.index.blocks.num_references(block) == 1 + (block in self.index.block_ids)

    def clear(self) -> int:
        """Forget everything, the eviction hook is not asked; returns how many anchors there were."""
        num_anchors = len(self._anchors)
        for anchor in list(self._anchors.values()):
            self._drop(anchor)
        return num_anchors

    def anchors(self) -> list[Anchor]:
        """All there are, the ones that would go first in front."""
        return sorted(self._anchors.values(), key=lambda anchor: anchor.priority)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books are wrong; blocks are checked by their pool."""
        self.index.check_integrity()
        held = [anchor for node in self.index.nodes() for anchor in node.anchors.values()]
        assert {id(anchor) for anchor in held} == set(self._anchors), "anchors in the tree and in the books differ"
        assert sum(anchor.num_bytes for anchor in held) == self._anchor_bytes, "anchor bytes are counted wrongly"
        assert self.num_bytes <= self.max_bytes or not held, f"{self.num_bytes} bytes of {self.max_bytes}"

    def _touch(self, anchor: Anchor) -> None:
        self._num_uses += 1
        anchor.priority = (self._clock + eviction.benefit(anchor, self.block_bytes), self._num_uses)

    def _shrink(self) -> None:
        while self.num_bytes > self.max_bytes:
            anchor = eviction.to_save_bytes(self._anchors.values())
            assert anchor is not None, "as long as there are bytes an anchor holds them"
            self._evict(anchor)

    def _evict(self, anchor: Anchor) -> None:
        if self.on_evict is not None:
            self.on_evict(anchor)
        self._clock = max(self._clock, anchor.priority[0])
        self.counters.num_evictions += 1
        self._drop(anchor)

    def _drop(self, anchor: Anchor) -> None:
        del self._anchors[id(anchor)]
        del anchor.node.anchors[anchor.position]
        self._anchor_bytes -= anchor.num_bytes
        self.index.prune(anchor.node)
