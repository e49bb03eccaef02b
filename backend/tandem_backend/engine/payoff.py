# SPDX-License-Identifier: Apache-2.0
"""What one sequence has taught about a drafter: whether it pays (Payoff), and how far its scores hold here (Trust)."""

from dataclasses import dataclass

FIRST_PAUSE, MAX_PAUSE = 8, 64  # rounds; doubled each time another trial was a loss
MIN_TRIALS = 3


@dataclass(slots=True)
class Payoff:
    """Running means over the rounds in which a costly drafter was asked; a loss leaves it out for a while."""

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
        self.gain_ms += (gain_ms - self.gain_ms) / min(self.trials, 8)
        if self.trials >= MIN_TRIALS and self.gain_ms < 0:
            # After the pause one more trial decides, with the weight of half of what was seen so far.
            self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, MAX_PAUSE)
            self.trials = MIN_TRIALS - 1
        elif self.gain_ms > 0:
            self.next_pause = FIRST_PAUSE


@dataclass(slots=True)
class Trust:
    """Accepted against expected nodes of one sequence; scores are calibrated over all sequences, texts differ."""

    accepted: float = 0.0
    expected: float = 0.0

    WEIGHT = 4.0  # expected nodes of evidence that the general calibration counts for
    MEMORY = 0.98  # of each node

    @property
    def factor(self) -> float:
        return min((self.accepted + self.WEIGHT) / (self.expected + self.WEIGHT), 1.5)

    def learn(self, expected: float, *, taken: bool) -> None:
        self.accepted = self.MEMORY * self.accepted + taken
        self.expected = self.MEMORY * self.expected + expected
