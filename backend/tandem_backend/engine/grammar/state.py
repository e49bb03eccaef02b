# SPDX-License-Identifier: Apache-2.0
"""GrammarState: llguidance's matcher as a constraint of the sampling hook."""

from dataclasses import dataclass

from llguidance import LLMatcher
from torch import Tensor

from tandem_backend.engine.sampling.constraint import MASK_BITS


@dataclass(slots=True)
class GrammarState:
    """A grammar after some tokens. A fork costs microseconds; the grammar itself is shared."""

    matcher: LLMatcher
    vocab_size: int  # of the mask; the tokenizer may know fewer tokens

    def fork(self) -> "GrammarState":
        return GrammarState(self.matcher.deep_copy(), self.vocab_size)

    def advance(self, token_id: int) -> bool:
        return self.matcher.consume_token(token_id)

    def fill_mask(self, mask: Tensor) -> None:
        """Where the text is known the mask has one token: the tokenizer's own next one."""
        assert mask.is_contiguous()
        assert len(mask) == -(-self.vocab_size // MASK_BITS)
        self.matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        if self.matcher.is_error():  # a limit of the parser: nothing may follow, which ends the request with an error
            mask.zero_()

    def forced(self) -> list[int]:
        """Tokens that must come next, as far as the text is known."""
        return self.matcher.compute_ff_tokens()

    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can be added to it."""
        return self.matcher.is_stopped()
