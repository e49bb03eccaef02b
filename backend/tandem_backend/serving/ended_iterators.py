# SPDX-License-Identifier: Apache-2.0
"""BLS response iterators outlive their use: Triton server's stub must be the first to let go of them."""

import itertools
import threading
from typing import Any


class EndedIterators:
    """Holds response iterators that have ended until the stub's own reference to them is gone.

    The stub drops it on a thread that does not hold the GIL (seen with 2.51). Were it the last one, the numpy arrays of
    all the iterator's responses would be freed there, beside running Python code; the heap is then corrupt, and some
    requests later the stub is gone without a word. The same thread asks Triton server what is_cancelled() wants to
    know, one after the other: with the answer, it has let go of every iterator that had ended before the question.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, Any] = {}
        self._numbers = itertools.count()

    def hold(self, responses: Any) -> None:
        """Take an iterator that has given its last response."""
        with self._lock:
            self._held[next(self._numbers)] = responses

    def ask_cancelled(self, sender: Any) -> bool:
        """sender.is_cancelled(). Not to be asked again after a yes, which would be answered without that thread."""
        with self._lock:
            ended = list(self._held)
        cancelled = bool(sender.is_cancelled())
        with self._lock:
            released = [self._held.pop(number, None) for number in ended]
        del released  # not under the lock: it frees what may be many megabytes
        return cancelled
