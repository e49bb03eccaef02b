# SPDX-License-Identifier: Apache-2.0
"""ReasoningConstraint: bounds a reasoning block, and keeps a grammar waiting until the block is closed."""

from dataclasses import dataclass, replace

from torch import Tensor

from tandem_backend.engine.grammar import GrammarState
from tandem_backend.engine.reasoning.stall import StallDetector
from tandem_backend.engine.reasoning.tags import ReasoningTags
from tandem_backend.engine.sampling.constraint import MASK_BITS


@dataclass(slots=True)
class ReasoningConstraint:
    """A state after some output tokens: within a block, closing it, or in the answer.

    The block is closed by the template's own tokens, one a position, as if the target had chosen them.
    """

    tags: ReasoningTags
    max_tokens: int | None  # of the block; None: no limit
    stall: StallDetector | None
    grammar: GrammarState | None  # of the answer
    in_block: bool
    may_open: bool  # the block may still be opened by the target although a grammar waits
    eos_ids: tuple[int, ...] = ()  # end no block that a grammar waits for
    num_tokens: int = 0  # in blocks so far
    pending: tuple[int, ...] = ()  # what must come next

    def __post_init__(self) -> None:
        self._close_if_over()

    def fork(self) -> "ReasoningConstraint":
        copied = replace(self)
        copied.stall = self.stall.fork() if self.stall is not None else None
        copied.grammar = self.grammar.fork() if self.grammar is not None else None
        return copied

    def advance(self, token_id: int) -> bool:
        if self.pending:
            fits = token_id == self.pending[0]
            self.pending = self.pending[1:]
            return fits
        if self.in_block:
            self._advance_block(token_id)
            return True
        if token_id == self.tags.open_id and (self.may_open or self.grammar is None):
            self.in_block = True
            self._close_if_over()
            return True
        self.may_open = False
        return self.grammar is None or self.grammar.advance(token_id)

    def _advance_block(self, token_id: int) -> None:
        if token_id == self.tags.close_id:
            self.in_block = self.may_open = False
            # A grammar leaves no room for the template's line breaks, so they are written for it.
            self.pending = self.tags.after_close_ids if self.grammar is not None else ()
            return
        self.num_tokens += 1
        if self.stall is not None:
            self.stall.push(token_id)
        self._close_if_over()

    def _close_if_over(self) -> None:
        is_long = self.max_tokens is not None and self.num_tokens >= self.max_tokens
        if self.in_block and (is_long or (self.stall is not None and self.stall.is_stalled)):
            self.in_block = self.may_open = False
            self.pending = self.tags.closing_ids

    def fill_mask(self, mask: Tensor) -> None:
        if self.pending:
            mask.zero_()
            _allow(mask, self.pending[0])
        elif self.in_block or self.grammar is None:
            mask.fill_(-1)
            for token_id in self.eos_ids if self.grammar is not None else ():
                _forbid(mask, token_id)
        else:
            self.grammar.fill_mask(mask)
            if self.may_open:
                _allow(mask, self.tags.open_id)

    def settle(self, token_id: int) -> int | None:
        if self.pending:
            return self.pending[0]
        if self.grammar is None:
            return token_id
        if self.in_block:
            return None if token_id in self.eos_ids else token_id
        return None if self.may_open else self.grammar.settle(token_id)

    def forced(self) -> list[int]:
        if self.in_block or self.may_open:
            return []
        return [*self.pending, *(self.grammar.forced() if self.grammar is not None else ())]

    def is_finished(self) -> bool:
        is_answer = not self.in_block and not self.pending
        return is_answer and self.grammar is not None and self.grammar.is_finished()


def _allow(mask: Tensor, token_id: int) -> None:
    mask[token_id // MASK_BITS] |= _bit(token_id)


def _forbid(mask: Tensor, token_id: int) -> None:
    mask[token_id // MASK_BITS] &= ~_bit(token_id)


def _bit(token_id: int) -> int:
    """The token's bit in an int32."""
    place = token_id % MASK_BITS
    return 1 << place if place < MASK_BITS - 1 else -(1 << place)
