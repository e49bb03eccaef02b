# SPDX-License-Identifier: Apache-2.0
"""Journal: rows go to its file by a thread of its own, so that no request ever waits for the disk."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tandem_client.gateway.journal_file import JournalRow, insert, open_for_writing, prune

_LOGGER = logging.getLogger(__name__)

MAX_PENDING = 10_000  # rows that wait for the disk; further ones are dropped and counted
_MAX_BATCH = 500  # rows of one transaction
_PRUNE_EVERY_S = 60.0


class Journal:
    """Writes to `path` and keeps the rows of the last `max_age_s` seconds, at most `max_rows`. Thread-safe.

    Raises JournalFileError where the file can't be used. What goes wrong later is logged and costs rows, no requests.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_age_s: float,
        max_rows: int,
        max_pending: int = MAX_PENDING,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._connection = open_for_writing(path)
        self._max_age_s, self._max_rows, self._clock = max_age_s, max_rows, clock
        self._pending: queue.Queue[JournalRow | None] = queue.Queue(max_pending)
        self._pruned_s = float("-inf")
        self._num_since_pruned = 0
        self.num_written = 0
        self.num_dropped = 0  # too many waited, or the file could not be written
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, row: JournalRow) -> None:
        """Hand a row over; never waits."""
        try:
            self._pending.put_nowait(row)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what waits, then close the file; to be called once, by a thread that may wait."""
        self._pending.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._pending.get()]
            while len(batch) < _MAX_BATCH and not self._pending.empty():
                batch.append(self._pending.get())
            is_open = None not in batch
            self._write([row for row in batch if row is not None])

    def _write(self, rows: list[JournalRow]) -> None:
        try:
            insert(self._connection, rows)
            self.num_written += len(rows)
            self._num_since_pruned += len(rows)
            self._prune_if_due()
        except Exception as error:  # whatever it is: the next rows may go through
            self.num_dropped += len(rows)
            _LOGGER.warning("journal: %d rows were not written: %s", len(rows), error)

    def _prune_if_due(self) -> None:
        now = self._clock()
        if now - self._pruned_s > _PRUNE_EVERY_S or self._num_since_pruned > self._max_rows // 10:
            prune(self._connection, older_than=now - self._max_age_s, max_rows=self._max_rows)
            self._pruned_s, self._num_since_pruned = now, 0
