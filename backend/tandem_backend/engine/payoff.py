# SPDX-License-Identifier: Apache-2.0
"""Payoff: whether a costly drafter pays for one sequence, and the pauses while it does not."""

from dataclasses import dataclass

FIRST_PAUSE, MAX_PAUSE = 4, 64  # rounds; doubled each time another trial was a loss
MIN_TRIALS = 4


@dataclass(slots=True)
class Payoff:
    """Running means over the rounds in which the drafter was asked."""

    gain_ms: float = 0.0
    num_accepted: float = 2.0  # tokens a round; an even chance to begin with
    trials: int = 0
    pause: int = 0
    next_pause: int = FIRST_PAUSE

    def is_due(self) -> bool:
        """Count a round; whether the drafter may be asked in it."""
        if self.pause:
            self.pause -= 1
            return False
        return True

    def learn(self, num_accepted: int, gain_ms: float) -> None:
        self.trials += 1
        self.num_accepted += 0.1 * (num_accepted - self.num_accepted)
        self.gain_ms += (gain_ms - self.gain_ms) / min(self.trials, 10)
        if self.trials >= MIN_TRIALS and self.gain_ms < 0:
            self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, MAX_PAUSE)
            self.trials = MIN_TRIALS - 2
        elif self.gain_ms > 0:
            self.next_pause = FIRST_PAUSE
