# SPDX-License-Identifier: Apache-2.0
"""Regenerate: a conversation that is sent again wants another answer, and a greedy one would be the same again."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from tandem_client.gateway.errors import invalid

HEADER = "X-Tandem-Regenerate"


class Answered:
    """Digests of the conversations answered lately: the newest `max_entries` of the last `window_s` seconds."""

    def __init__(self, *, max_entries: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries, self._window_s, self._clock = max_entries, window_s, clock
        self._answered_s: OrderedDict[bytes, float] = OrderedDict()

    def add(self, digest: bytes) -> None:
        """The conversation has a complete answer."""
        self._answered_s[digest] = self._clock()
        self._answered_s.move_to_end(digest)
        if len(self._answered_s) > self._max_entries:
            self._answered_s.popitem(last=False)

    def __contains__(self, digest: bytes) -> bool:
        answered_s = self._answered_s.get(digest)
        return answered_s is not None and self._clock() - answered_s <= self._window_s

    def __len__(self) -> int:
        return len(self._answered_s)


def read_header(headers: Mapping[str, str]) -> bool | None:
    """What the request's header says, None where there is none. Raises ApiError 400 for anything but 0 and 1."""
    value = headers.get(HEADER.lower())
    if value not in (None, "0", "1"):
        raise invalid(HEADER, f"must be 0 or 1, got {value[:20]!r}")
    return None if value is None else value == "1"
