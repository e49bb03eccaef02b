# SPDX-License-Identifier: Apache-2.0
"""DiskFiles: the anchor files of a directory and their index. One process owns a directory; others only read it."""

import contextlib
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tandem_backend.engine.cache.anchor_file import AnchorHeader, BadFileError, read_file, read_header, write_file
from tandem_backend.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = re.compile(r"[0-9a-f]{64}\.safetensors")  # the prefix's digest
SCRATCH = re.compile(r"[0-9a-f]{64}\.[0-9]+\.tmp")  # on its way to such a file
MAX_OWN_BYTES = 1 << 16  # of a file beside its tensors, about
OTHERS = 0o077  # permission bits of everyone but the owner


@dataclass(slots=True, eq=False)
class Entry:
    """A file that can be read."""

    digest: str  # of fingerprint, tenant and token ids
    header: AnchorHeader
    num_bytes: int
    used_s: float  # by time.time(); on disk it is the file's modification time


class DiskFiles:
    """Thread-safe. What the directory holds of others' is left alone, unless its name is one of ours.

    Whoever uses an anchor touches those before it as well, so the least recently used file is nobody's parent.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: str,
        *,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
        key: str = "disk_cache",
    ) -> None:
        """key: the configuration's name for the directory. Raises ConfigError where it can't even be read."""
        self._directory, self._fingerprint, self._clock = directory, fingerprint, clock
        self._max_bytes, self._ttl_s = max_bytes, ttl_s
        self._lock = threading.Lock()  # guards the index
        self._entries: dict[str, Entry] = {}
        self._at: dict[str, Counter[int]] = {}  # entries by tenant and position
        self._lock_file: int | None = None
        self._scanned_ns = self._num_foreign = 0
        self.num_bytes = self.num_evictions = self.num_bad = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.stat()
            if status.st_uid not in (0, os.geteuid()):
                raise ConfigError(f"{key}: {directory} belongs to another user, who could write any state there")
            os.listdir(directory)
        except OSError as error:
            raise ConfigError(f"{key}: {directory}: {error.strerror or error}") from error
        self._close_to_others(status.st_mode, key)
        if not self.own():
            logger.warning("%s: can't be written by this process now; the disk cache is only read", directory)
            self._scan()

    @property
    def is_owner(self) -> bool:
        return self._lock_file is not None

    @property
    def num_files(self) -> int:
        return len(self._entries)

    def own(self) -> bool:
        """Become the one who writes here, if nobody is; reads the directory anew then. Says whether this is the one."""
        if self._lock_file is not None:
            return True
        descriptor = -1
        try:
            descriptor = os.open(self._directory / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            return False
        self._lock_file = descriptor
        self._scan()
        return True

    def refresh(self) -> None:
        """Index what the directory's owner, another process, has written and removed meanwhile."""
        if not self.is_owner and self._directory.stat().st_mtime_ns != self._scanned_ns:
            self._scan()

    def close(self) -> None:
        """Let another process have the directory."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def positions(self, tenant: str) -> list[int]:
        """Where the tenant has anchors, in ascending order."""
        with self._lock:
            return sorted(self._at.get(tenant, ()))

    def get(self, digest: str) -> Entry | None:
        """None too for one whose time is over."""
        entry = self._entries.get(digest)
        return entry if entry is not None and not self._is_over(entry) else None

    def read(self, entry: Entry) -> dict[str, Tensor] | None:
        """A file's tensors, every byte of them as it was written; None where it has gone, changed or was damaged.

        The index knows then: ask it again.
        """
        path = self._path(entry.digest)
        try:
            header, tensors = read_file(path)
            if header == entry.header:
                return tensors
            if _prefix(header) != _prefix(entry.header):
                raise BadFileError("another file stands in its place")
            # The same prefix was written anew just now, with more for block drafters.
            self._add(Entry(entry.digest, header, path.stat().st_size, entry.used_s))
        except FileNotFoundError:
            logger.info("%s: has gone", path)
            self._forget([entry])
        except (OSError, BadFileError) as error:
            self.reject(entry, str(error))
        return None

    def reject(self, entry: Entry, why: str) -> None:
        """Never read a file again that does not hold what it should."""
        self._forget([entry])
        self._reject(self._path(entry.digest), why)

    def touch(self, entries: Iterable[Entry]) -> None:
        """Take note that all of them were used just now."""
        now = self._clock()
        for entry in entries:
            entry.used_s = now
            if self.is_owner:
                self._set_time(self._path(entry.digest), now)

    def write(self, digest: str, header: AnchorHeader, tensors: Mapping[str, Tensor]) -> Entry | None:
        """Let the least recently used go until a file fits, and write it under its digest. Raises OSError.

        One that goes on from a file that is not there is left out.
        """
        self._make_room(sum(tensor.nbytes for tensor in tensors.values()) + MAX_OWN_BYTES)
        if header.parent and header.parent not in self._entries:
            return None  # its prefix is longer than all that is kept, or what it goes on from could not be written
        scratch, path = self._directory / f"{digest}.{os.getpid()}.tmp", self._path(digest)
        try:
            num_bytes, now = write_file(scratch, header, tensors), self._clock()
            self._set_time(scratch, now)
            scratch.replace(path)
        except OSError:
            self._unlink(scratch)
            raise
        self._sync_directory()
        entry = Entry(digest, header, num_bytes, now)
        self._add(entry)
        self._make_room(0)
        return entry

    def expire(self) -> None:
        """Remove what was not used for the time to live."""
        self.remove([entry for entry in list(self._entries.values()) if self._is_over(entry)])

    def remove(self, entries: Iterable[Entry]) -> int:
        """Remove files that nobody's anchor needs; returns how many. Nothing goes where others own the directory."""
        entries = list(entries) if self.is_owner else []
        self._forget(entries)
        for entry in entries:
            self._unlink(self._path(entry.digest))
        return len(entries)

    def entries(self) -> list[Entry]:
        """All there are: the least recently used first, and those behind an anchor before it."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda entry: (entry.used_s, -entry.header.position))

    def _make_room(self, num_bytes: int) -> None:
        for entry in self.entries():
            if self.num_bytes + num_bytes <= self._max_bytes:
                return
            self.num_evictions += self.remove([entry])

    def _scan(self) -> None:
        """Index what is there; who owns the directory removes what can't be used."""
        self._scanned_ns = self._directory.stat().st_mtime_ns  # before it is read: what comes meanwhile is seen later
        entries, num_foreign = [], 0
        for path in sorted(self._directory.iterdir()):
            if SCRATCH.fullmatch(path.name) and self.is_owner:
                logger.info("%s: was never finished; removed", path)
                self._unlink(path)
            if not NAME.fullmatch(path.name):
                continue
            try:
                header, num_bytes, used_s = read_header(path)
            except (OSError, BadFileError) as error:
                if self.is_owner:
                    self._reject(path, str(error))
                continue
            if header.fingerprint == self._fingerprint:
                entries.append(Entry(path.stem, header, num_bytes, used_s))
                continue
            num_foreign += 1
            if self.is_owner:
                self._unlink(path)
        if num_foreign > self._num_foreign:
            done = "removed" if self.is_owner else "skipped"
            logger.warning("%s: %d files of other weights, kernels or settings %s", self._directory, num_foreign, done)
        self._num_foreign = num_foreign
        with self._lock:
            self._entries, self._at, self.num_bytes = {}, {}, 0
        for entry in entries:
            self._add(entry)
        if self.is_owner:
            self.expire()
            self._make_room(0)

    def _add(self, entry: Entry) -> None:
        known = self._entries.get(entry.digest)
        if known is not None:
            self._forget([known])
        with self._lock:
            self._entries[entry.digest] = entry
            self._at.setdefault(entry.header.tenant, Counter())[entry.header.position] += 1
            self.num_bytes += entry.num_bytes

    def _forget(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            for entry in entries:
                if self._entries.get(entry.digest) is not entry:
                    continue
                del self._entries[entry.digest]
                self.num_bytes -= entry.num_bytes
                positions = self._at[entry.header.tenant]
                positions[entry.header.position] -= 1
                if not positions[entry.header.position]:
                    del positions[entry.header.position]
                if not positions:
                    del self._at[entry.header.tenant]

    def _is_over(self, entry: Entry) -> bool:
        return self._clock() - entry.used_s > self._ttl_s

    def _reject(self, path: Path, why: str) -> None:
        self.num_bad += 1
        logger.warning("%s: not read as state, and removed: %s", path, why)
        self._unlink(path)

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}.safetensors"

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s: can't be removed: %s", path, error.strerror or error)

    def _set_time(self, path: Path, time_s: float) -> None:
        with contextlib.suppress(OSError):  # it only says which file goes first
            os.utime(path, (time_s, time_s))

    def _sync_directory(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _close_to_others(self, mode: int, key: str) -> None:
        if not mode & OTHERS:
            return
        try:
            self._directory.chmod(stat.S_IMODE(mode) & ~OTHERS)
        except OSError as error:
            if mode & 0o022:
                raise ConfigError(f"{key}: {self._directory} can be written by other users") from error


def _prefix(header: AnchorHeader) -> tuple[str, str, int]:
    return header.fingerprint, header.tenant, header.position
