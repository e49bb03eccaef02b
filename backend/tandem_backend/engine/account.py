# SPDX-License-Identifier: Apache-2.0
"""What one sequence has taught about a drafter: whether it pays (Account), and how far its scores hold here (Trust)."""

from collections.abc import Sequence
from dataclasses import dataclass

# In tokens, as all amounts of an account: what a token costs without drafts is the unit of time.
CREDIT = 0.2  # for a sequence that nothing is known of yet
CAP = 2.0  # how much of earlier gains a drafter may lose again
RATE = 0.005  # a round's deposit: the share of time that goes to trying a drafter that does not pay
NUM_LOOKED_BACK = 4  # tokens that a drafter on trial guesses too, where as many rows cost it hardly more than one
PRICE = 0.6  # of a token that a drafter guesses in looking back: what an ask and its rows cost at least
NUM_ACCEPTED = 2.0  # tokens that a drafter may bring when asked, where nothing is known: an even chance of each
NUM_ROWS = 3.0  # and the rows that it takes for them
TRIAL_DEPTH = 1  # of drafts until the first success: one token shows as well as several whether drafts hold here


@dataclass(slots=True)
class Account:
    """A drafter works on credit: it is asked while its balance is positive, pays its time and earns what it saved.

    So drafting that never succeeds costs a sequence its first credit and RATE of its time, whatever the text. The
    balance is not charged for rows: the router weighs them by calibrated probabilities, and num_rows tells whether the
    next call is worth it.
    """

    balance: float = CREDIT
    num_accepted: float = NUM_ACCEPTED  # running mean of the tokens it brings when asked
    num_rows: float = NUM_ROWS  # of the rows that are verified for them
    num_asked: int = 0
    is_on_trial: bool = True  # nothing accepted yet, or not since the balance was spent

    @property
    def is_open(self) -> bool:
        return self.balance > 0

    def wait(self) -> None:
        """A round in which the drafter was not asked. What was learned fades: texts change."""
        self.num_accepted += RATE * (NUM_ACCEPTED - self.num_accepted)
        self.num_rows += RATE * (NUM_ROWS - self.num_rows)
        if self.balance <= 0:
            self.balance += RATE

    def look_back(self, guesses: Sequence[tuple[float, bool]]) -> None:
        """Earn what it would have saved, had it been asked before; debts are not made afterwards."""
        self.balance = min(self.balance + max(0.0, sum(is_right - PRICE for _, is_right in guesses)), CAP)

    def settle(self, num_accepted: int, cost: float, num_rows: int) -> None:
        """A round in which it was asked; cost is its time in tokens, num_rows its nodes that were verified."""
        self.num_asked += 1
        rate = max(0.1, 1 / (1 + self.num_asked))
        self.num_accepted += rate * (num_accepted - self.num_accepted)
        self.num_rows += rate * (num_rows - self.num_rows)
        self.balance = min(self.balance + num_accepted - cost, CAP)
        if self.is_on_trial and not num_accepted:  # again only when there is something new to look back at
            self.balance = min(self.balance, -RATE * NUM_LOOKED_BACK)
        self.is_on_trial = not num_accepted and (self.is_on_trial or self.balance <= 0)


@dataclass(slots=True)
class Trust:
    """Accepted against expected nodes of one sequence; scores are calibrated over all sequences, texts differ."""

    accepted: float = 0.0
    expected: float = 0.0

    WEIGHT = 1.5  # expected nodes of evidence that the general calibration counts for
    MEMORY = 0.98  # of each node

    @property
    def factor(self) -> float:
        return min((self.accepted + self.WEIGHT) / (self.expected + self.WEIGHT), 1.5)

    def probability(self, general: float) -> float:
        """A node's probability here, from the one over all sequences. More than certain it does not get."""
        return general * self.factor if self.factor < 1 else 1 - (1 - general) / self.factor

    def learn(self, expected: float, *, taken: bool) -> None:
        self.accepted = self.MEMORY * self.accepted + taken
        self.expected = self.MEMORY * self.expected + expected
