# SPDX-License-Identifier: Apache-2.0
"""What a round's parts cost."""

import time
from dataclasses import dataclass

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
        # Written out, since it runs once a round.
        self.num_rounds += other.num_rounds
        self.num_rows += other.num_rows
        self.draft_ms += other.draft_ms
        self.verify_ms += other.verify_ms
        self.accept_ms += other.accept_ms
        self.commit_ms += other.commit_ms
        self.host_ms += other.host_ms

    @property
    def total_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.accept_ms + self.commit_ms + self.host_ms

    def by_part_s(self) -> dict[str, float]:
        """Seconds of each of PARTS."""
        return {part: getattr(self, f"{part}_ms") / 1e3 for part in PARTS}


class Stopwatch:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap_ms(self) -> float:
        """Milliseconds since the last lap."""
        now = time.perf_counter()
        lap, self._last = 1e3 * (now - self._last), now
        return lap
