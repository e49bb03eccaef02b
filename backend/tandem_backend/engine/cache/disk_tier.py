# SPDX-License-Identifier: Apache-2.0
"""DiskTier: which prefixes are on disk, and the thread that writes them. No round waits for a disk to write."""

import hashlib
import logging
import math
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tandem_backend.engine.cache.anchor_file import AnchorHeader
from tandem_backend.engine.cache.disk_files import DiskFiles, Entry
from tandem_backend.types import CacheCounters

logger = logging.getLogger(__name__)

TOKEN_IDS = "token_ids"  # int32 [position], in every file
MAX_PENDING_BYTES = 256 << 20  # that wait to be written; what comes on top is dropped
CARE_INTERVAL_S = 10.0  # between looks for files whose time is over, and for a directory that has come free


@dataclass(frozen=True, slots=True)
class Record:
    """An anchor on its way to disk; the tensors are copies."""

    digest: str
    header: AnchorHeader
    tensors: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class DiskTier:
    """Calls come from the engine's thread; a thread of its own writes."""

    def __init__(self, files: DiskFiles, fingerprint: str, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self.files, self._fingerprint = files, fingerprint
        self.counters = CacheCounters()
        self.num_dropped = self.num_failed = 0
        self._max_pending_bytes = max_pending_bytes
        self._pending: dict[str, Record] = {}  # those that wait, and the one that is being written
        self._pending_bytes = 0
        self._changed = threading.Condition()  # guards what is pending
        self._jobs: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._stops = threading.Event()
        self._writer = threading.Thread(target=self._run, name="disk-cache", daemon=True)
        self._writer.start()

    def header(
        self, tenant: str, position: int, before: tuple[int, str], num_drafter_rows: int, *, has_hidden: bool
    ) -> AnchorHeader:
        """Of an anchor that goes on from the one `before`, by its position and digest; (0, ""): from nothing."""
        start, parent = before
        return AnchorHeader(
            fingerprint=self._fingerprint,
            tenant=_tenant_digest(tenant),
            position=position,
            start=start,
            parent=parent,
            num_drafter_rows=num_drafter_rows,
            has_hidden=has_hidden,
        )

    def digests(self, tenant: str, token_ids: Sequence[int], positions: Iterable[int]) -> dict[int, str]:
        """By position, in ascending order, of the prefix of so many tokens."""
        data = memoryview(np.array(token_ids, dtype=np.int32).tobytes())
        total = hashlib.sha256(f"{self._fingerprint} {_tenant_digest(tenant)} ".encode())
        found, done = {}, 0
        for position in sorted(positions):
            total.update(data[4 * done : 4 * position])
            found[position], done = total.hexdigest(), position
        return found

    def chain(self, tenant: str, token_ids: Sequence[int], limit: int, *, with_drafter: bool = False) -> list[Entry]:
        """The longest prefix of token_ids[:limit] on disk: its files, each the parent of the next. Maybe none."""
        positions = [p for p in self.files.positions(_tenant_digest(tenant)) if p <= limit]
        digests = self.digests(tenant, token_ids, positions)
        for position in reversed(positions):
            entries = self._ancestry(digests[position])
            if entries and (not with_drafter or _feeds_drafter(entries)):
                return entries
        return []

    def known_ends(self, tenant: str, token_ids: Sequence[int], limit: int) -> list[tuple[int, str]]:
        """Position and digest of the prefixes of token_ids[:limit] that are on disk or on their way."""
        key = _tenant_digest(tenant)
        pending = [r.header.position for r in list(self._pending.values()) if r.header.tenant == key]
        positions = [p for p in {*self.files.positions(key), *pending} if p <= limit]
        digests = self.digests(tenant, token_ids, positions)
        return [end for end in digests.items() if end[1] in self._pending or self._ancestry(end[1])]

    def _ancestry(self, digest: str) -> list[Entry]:
        """An entry with all before it; none where one is missing."""
        entries: list[Entry] = []
        while digest:
            entry = self.files.get(digest)
            if entry is None:
                return []
            entries.append(entry)
            digest = entry.header.parent
        return entries[::-1]

    def read(self, entry: Entry, token_ids: Sequence[int]) -> dict[str, Tensor] | None:
        """A file's tensors, if it holds the state after exactly these tokens, compared one by one."""
        tensors = self.files.read(entry)
        if tensors is None or (TOKEN_IDS in tensors and tensors[TOKEN_IDS].tolist() == list(token_ids)):
            return tensors
        self.files.reject(entry, "it holds the state after other tokens")
        return None

    def has(self, digest: str, num_drafter_rows: int, *, has_hidden: bool) -> bool:
        """Whether an anchor is on disk or on its way, with as much for block drafters."""
        entry = self.files.get(digest)
        pending = self._pending.get(digest)
        headers = [entry.header] if entry is not None else []
        headers += [pending.header] if pending is not None else []
        return any(h.num_drafter_rows >= num_drafter_rows and h.has_hidden >= has_hidden for h in headers)

    def has_room(self, num_bytes: int, wait_s: float = 0.0) -> bool:
        """Whether so many bytes more may wait to be written, maybe after a while."""
        if not self.files.is_owner:
            return False
        with self._changed:
            return self._changed.wait_for(
                lambda: self._pending_bytes + num_bytes <= self._max_pending_bytes or not self._pending_bytes,
                _bounded(wait_s),
            )

    def put(self, record: Record) -> None:
        """Write it soon; the caller asked for room."""
        with self._changed:
            self._pending[record.digest] = record
            self._pending_bytes += record.num_bytes
        self._jobs.put(record)

    def settle(self, timeout_s: float = math.inf) -> bool:
        """Wait until nothing is pending; says whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending_bytes, _bounded(timeout_s))

    def clear(self) -> int:
        """Forget all files, those on their way too; returns how many there were. Only the directory's owner does."""
        with self._changed:
            num_pending = len(self._pending)
            self._pending.clear()
        return num_pending + self.files.remove(self.files.entries())

    def close(self, timeout_s: float = math.inf) -> None:
        """Write what waits, for so long at most, and let another process have the directory."""
        is_settled = self.settle(timeout_s)
        self._stops.set()
        self._jobs.put(None)
        if is_settled:
            self._writer.join()
            self.files.close()
        else:
            logger.warning("the disk cache was closed before %d anchors were written", len(self._pending))

    def statistics(self) -> dict[str, float]:
        return {
            "disk_cache_bytes": self.files.num_bytes,
            "num_disk_anchors": self.files.num_files,
            "disk_cache_pending_bytes": self._pending_bytes,
            "disk_cache_dropped_total": self.num_dropped,
            "disk_cache_write_errors_total": self.num_failed,
            "disk_cache_bad_files_total": self.files.num_bad,
        }

    # The writer's thread.

    def _run(self) -> None:
        next_care_s = time.monotonic() + CARE_INTERVAL_S
        while not self._stops.is_set():
            try:
                record = self._jobs.get(timeout=max(next_care_s - time.monotonic(), 0))
            except queue.Empty:
                record = None
            if record is not None:
                self._write(record)
            if time.monotonic() >= next_care_s:
                self._take_care()
                next_care_s = time.monotonic() + CARE_INTERVAL_S

    def _write(self, record: Record) -> None:
        try:
            if self._is_wanted(record):
                self.files.touch(self._ancestry(record.header.parent))
                entry = self.files.write(record.digest, record.header, record.tensors)
                if entry is None:
                    self.num_dropped += 1
                elif not self._is_wanted(record):
                    self.files.remove([entry])
        except Exception as error:
            # A full disk, say: requests go on without, and the next anchor is tried again.
            self.num_failed += 1
            if self.num_failed == 1 or not isinstance(error, OSError):
                logger.exception("the disk cache can't be written; this is said once, and counted from now on")
        finally:
            with self._changed:
                self._pending_bytes -= record.num_bytes
                if self._is_wanted(record):
                    del self._pending[record.digest]
                self._changed.notify_all()

    def _is_wanted(self, record: Record) -> bool:
        """Not cleared meanwhile, nor replaced by one that has more for block drafters."""
        return self._pending.get(record.digest) is record

    def _take_care(self) -> None:
        try:
            if not self.files.own():
                self.files.refresh()
            self.files.expire()
        except Exception:
            logger.exception("the disk cache's directory can't be looked after")


def _bounded(timeout_s: float) -> float:
    return min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)


def _tenant_digest(tenant: str) -> str:
    return hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()


def num_drafter_rows(entries: Sequence[Entry], rows: int = 0) -> int:
    """Rows from the prefix's first that hold a block drafter's KV once all the entries are read, in this order.

    rows: those that hold it before.
    """
    for header in (entry.header for entry in entries):
        if rows >= header.first_row and header.num_drafter_rows > header.first_row:
            rows = header.num_drafter_rows
        else:
            rows = min(rows, header.first_row)
    return rows


def _feeds_drafter(entries: Sequence[Entry]) -> bool:
    header = entries[-1].header
    return header.has_hidden and num_drafter_rows(entries) >= header.position - 1
