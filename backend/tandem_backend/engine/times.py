# SPDX-License-Identifier: Apache-2.0
"""What a round's parts cost."""

import time
from dataclasses import dataclass, fields

PARTS = ("draft", "verify", "accept", "commit", "host")


@dataclass(slots=True)
class RoundTimes:
    """Milliseconds of one round, or totals over several; host_ms is what no other part covers."""

    num_rounds: int = 0
    num_rows: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    accept_ms: float = 0.0
    commit_ms: float = 0.0
    host_ms: float = 0.0

    def add(self, other: "RoundTimes") -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def part_ms(self, part: str) -> float:
        """The time of one of PARTS."""
        return float(getattr(self, f"{part}_ms"))


class Stopwatch:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap_ms(self) -> float:
        """Milliseconds since the last lap."""
        now = time.perf_counter()
        lap, self._last = 1e3 * (now - self._last), now
        return lap
