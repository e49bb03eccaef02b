# SPDX-License-Identifier: Apache-2.0
"""Spill: between the prefix cache and the disk. Copies anchors out as they go, and back in when they are needed."""

import hashlib
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_backend.engine.cache.anchor import Anchor
from tandem_backend.engine.cache.disk_files import Entry
from tandem_backend.engine.cache.disk_tier import TOKEN_IDS, DiskTier, Record, num_drafter_rows
from tandem_backend.engine.cache.eviction import anchors_above
from tandem_backend.engine.cache.prefix_cache import PrefixCache
from tandem_backend.engine.cache.radix import Match, Node
from tandem_backend.engine.fingerprint import Fingerprint
from tandem_backend.model.state import SlotState, copy_block

HIDDEN = "hidden"


def state_fingerprint(fingerprint: Fingerprint, cache: PrefixCache) -> str:
    """SHA-256 over all that an anchor's bytes depend on: the fingerprint, and which layers of drafters it has too."""
    layout = [(list(part.shape[1:]), str(part.dtype)) for layer in cache.kv for part in (layer.keys, layer.values)]
    whole = [fingerprint.model_dump_json(), str(layout)]
    return hashlib.sha256("\n".join(whole).encode()).hexdigest()


class Spill:
    """All calls come from the engine's thread."""

    def __init__(self, cache: PrefixCache, tier: DiskTier) -> None:
        self.cache, self.tier = cache, tier
        self._until_s = 0.0  # time.monotonic() up to which a full queue is waited for
        cache.on_evict = self.keep

    def keep(self, anchor: Anchor) -> None:
        """Copy an anchor out, after those before it that are not on disk yet. Drops it where too much waits."""
        if not self.tier.files.is_owner:
            return
        tenant, token_ids = str(anchor.tenant), anchor.token_ids()
        line = [*reversed(list(anchors_above(anchor))), anchor]
        digests = self.tier.digests(tenant, token_ids, [each.position for each in line])
        ends = self.tier.known_ends(tenant, token_ids, anchor.position - 1)
        for each in line:
            digest, rows = digests[each.position], min(_drafter_rows(each.node.path()), each.position)
            if not self.tier.has(digest, rows, has_hidden=each.hidden is not None):
                before = max((end for end in ends if end[0] < each.position), default=(0, ""))
                if not self.tier.has_room(self._num_bytes(each, before[0]), self._until_s - time.monotonic()):
                    self.tier.num_dropped += 1
                    return
                header = self.tier.header(tenant, each.position, before, rows, has_hidden=each.hidden is not None)
                tensors = self._copy_out(each, header.first_row, token_ids[: each.position])
                self.tier.put(Record(digest, header, tensors))
            ends.append((each.position, digest))

    def recall(self, tenant: str, token_ids: Sequence[int], *, with_drafter: bool) -> None:
        """Take into the prefix cache what the disk has of a request's tokens beyond what the cache has."""
        match = self.cache.find(tenant, token_ids, with_drafter=with_drafter)
        known = match.position if match is not None else 0
        num_saved, parts = 0, None
        while parts is None:
            entries = self.tier.chain(tenant, token_ids, len(token_ids) - 1, with_drafter=with_drafter)
            missing = [entry for entry in entries if entry.header.position > known]
            if not missing or not self._fits(missing[-1].header.position):
                break
            parts = self._read(missing, token_ids)
        if parts is not None and self._take_in(tenant, token_ids, match, missing, parts):
            self.tier.files.touch(entries)
            num_saved = missing[-1].header.position - known
        self.tier.counters.count(num_saved)

    def _take_in(
        self,
        tenant: str,
        token_ids: Sequence[int],
        match: Match | None,
        entries: Sequence[Entry],
        parts: Sequence[dict[str, Tensor]],
    ) -> bool:
        """Put the state after the last entry into the cache; says whether there was room.

        What the cache has of the prefix before the first entry, it has in the match's blocks; those that are written to
        are copied, the one with the parent's last row among them.
        """
        first, position = entries[0].header, entries[-1].header.position
        num_shared, within = divmod(first.first_row, self.cache.state.block)
        num_blocks = self._num_blocks(position) - num_shared
        if not self.cache.make_room(num_blocks, match):
            return False
        pool, path = self.cache.index.blocks, list[Node]() if match is None else match.node.path()
        table = [node.block for node in path[:num_shared]]
        for block in table:
            pool.share(block)
        table += [pool.allocate() for _ in range(num_blocks)]
        if within:
            copy_block(self.cache.kv, path[num_shared].block, table[num_shared])
        for entry, tensors in zip(entries, parts, strict=True):
            self._copy_in(entry, tensors, table)
        num_rows = num_drafter_rows(entries, min(_drafter_rows(path), first.start))
        self._add(tenant, token_ids[:position], table, parts[-1], num_rows)
        for block in table:
            pool.release(block)
        return True

    def wait_for_disk(self, timeout_s: float) -> None:
        """From now on and for so long, an anchor waits for its place in the queue."""
        self._until_s = time.monotonic() + timeout_s

    def flush(self) -> None:
        """Write all of the cache, the anchors that would be kept longest first, while the disk is waited for."""
        for anchor in reversed(self.cache.anchors()):
            if time.monotonic() > self._until_s:
                break
            self.keep(anchor)
        self.tier.close(self._until_s - time.monotonic())

    def _fits(self, position: int) -> bool:
        return self._num_blocks(position) * self.cache.block_bytes <= self.cache.max_bytes

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.state.block)

    def _num_bytes(self, anchor: Anchor, start: int) -> int:
        return anchor.num_bytes + (anchor.position - start) * (self.cache.block_bytes // self.cache.state.block + 4)

    def _copy_out(self, anchor: Anchor, first_row: int, token_ids: Sequence[int]) -> dict[str, Tensor]:
        tensors = {TOKEN_IDS: torch.tensor(token_ids, dtype=torch.int32)}
        blocks, places = self._places(anchor.block_ids(), first_row, anchor.position)
        for name, part in self._parts():
            tensors[name] = part[blocks, :, places].to("cpu")  # [rows, kv_heads, head_dim]
        for i, tensor in enumerate(anchor.state.tensors):
            tensors[f"state.{i}"] = tensor.to("cpu", copy=True)
        if anchor.hidden is not None:
            tensors[HIDDEN] = anchor.hidden.to("cpu", copy=True)
        return tensors

    def _copy_in(self, entry: Entry, tensors: dict[str, Tensor], table: Sequence[int]) -> None:
        blocks, places = self._places(table, entry.header.first_row, entry.header.position)
        for name, part in self._parts():
            part[blocks, :, places] = tensors[name].to(part.device)

    def _read(self, entries: Sequence[Entry], token_ids: Sequence[int]) -> list[dict[str, Tensor]] | None:
        """The tensors of all of them; None where one is not what it should be, which has gone then."""
        parts = []
        for entry in entries:
            tensors = self.tier.read(entry, token_ids[: entry.header.position])
            if tensors is None:
                return None
            parts.append(tensors)
        return parts

    def _add(
        self, tenant: str, token_ids: Sequence[int], table: Sequence[int], tensors: dict[str, Tensor], num_rows: int
    ) -> None:
        device = self.cache.state.device
        count = sum(name.startswith("state.") for name in tensors)
        state = SlotState(tuple(tensors[f"state.{i}"].to(device) for i in range(count)))
        hidden = tensors[HIDDEN].to(device) if HIDDEN in tensors else None
        self.cache.add(tenant, token_ids, table, state, hidden, num_rows)

    def _parts(self) -> list[tuple[str, Tensor]]:
        return [
            part
            for i, layer in enumerate(self.cache.kv)
            for part in ((f"keys.{i}", layer.keys), (f"values.{i}", layer.values))
        ]

    def _places(self, table: Sequence[int], first: int, end: int) -> tuple[Tensor, Tensor]:
        """Blocks and places in them of rows [first, end)."""
        rows = torch.arange(first, end)
        block = self.cache.state.block
        places = (torch.tensor(table)[rows // block], rows % block)
        return places[0].to(self.cache.state.device), places[1].to(self.cache.state.device)


def _drafter_rows(path: Sequence[Node]) -> int:
    """Rows from the prefix's first that hold a block drafter's KV too."""
    rows = 0
    for node in path:
        rows += node.num_drafter_rows
        if node.num_drafter_rows < len(node.token_ids):
            break
    return rows
