# SPDX-License-Identifier: Apache-2.0
"""GrammarState: llguidance's matcher as a constraint of the sampling hook."""

from dataclasses import dataclass

from llguidance import LLMatcher
from torch import Tensor

from tandem_backend.engine.sampling.constraint import MASK_BITS

MAX_FORCED = 64  # more than a draft tree holds


@dataclass(slots=True)
class GrammarState:
    """A grammar after some tokens. A fork costs microseconds; the grammar itself is shared."""

    matcher: LLMatcher
    vocab_size: int  # of the mask; the tokenizer may know fewer tokens
    # A run of forced tokens found before, and how many of them have come: a long one is not worked out every round.
    run: tuple[int, ...] = ()
    num_passed: int = 0

    def fork(self) -> "GrammarState":
        return GrammarState(self.matcher.deep_copy(), self.vocab_size, self.run, self.num_passed)

    def advance(self, token_id: int) -> bool:
        if self.num_passed < len(self.run) and self.run[self.num_passed] == token_id:
            self.num_passed += 1
        else:
            self.run, self.num_passed = (), 0
        return self.matcher.consume_token(token_id)

    def fill_mask(self, mask: Tensor) -> None:
        """Where the text is known the mask has one token: the tokenizer's own next one."""
        assert mask.is_contiguous()
        assert len(mask) == -(-self.vocab_size // MASK_BITS)
        self.matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        if self.matcher.is_error():  # a limit of the parser: nothing may follow, which ends the request with an error
            mask.zero_()

    def settle(self, token_id: int) -> int | None:
        if self.matcher.is_error():
            return None
        if forced := self.forced():
            return forced[0]
        return token_id if self.matcher.validate_tokens([token_id]) == 1 else None

    def forced(self) -> list[int]:
        """Tokens that must come next: as far as the text is known, but no more than MAX_FORCED."""
        if self.num_passed == len(self.run):
            self.run, self.num_passed = tuple(self.matcher.compute_ff_tokens()), 0
        return list(self.run[self.num_passed : self.num_passed + MAX_FORCED])

    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can be added to it."""
        return self.matcher.is_stopped()
