# SPDX-License-Identifier: Apache-2.0
"""StallDetector: notices reasoning that goes round in circles."""

from collections.abc import Sequence
from dataclasses import dataclass

MIN_REPEATS = 4


@dataclass(slots=True)
class StallDetector:
    """The last `num_tokens` tokens of a block repeat one pattern, at least four times over."""

    num_tokens: int
    recent: tuple[int, ...] = ()
    is_stalled: bool = False

    def fork(self) -> "StallDetector":
        return StallDetector(self.num_tokens, self.recent, self.is_stalled)

    def push(self, token_id: int) -> None:
        self.recent = (*self.recent, token_id)[-self.num_tokens :]
        if len(self.recent) == self.num_tokens:
            self.is_stalled = has_period(self.recent, self.num_tokens // MIN_REPEATS)


def has_period(tokens: Sequence[int], longest: int) -> bool:
    """Whether the tokens are one pattern of at most `longest` tokens over and over, the last time perhaps in part."""
    return any(tokens[period:] == tokens[: len(tokens) - period] for period in range(1, longest + 1))
