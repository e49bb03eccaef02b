# SPDX-License-Identifier: Apache-2.0
"""Constraint: the hook by which a grammar, a reasoning budget or anything else says which tokens may come next."""

from collections.abc import Sequence
from typing import Protocol, Self

from torch import Tensor

MASK_BITS = 32  # of a mask's word, which is an int32


class Constraint(Protocol):
    """A state after some output tokens of one request.

    The engine holds the state after the committed output (`RequestSampling.constraint`). In a round it forks that state
    for the nodes of the draft tree, each along its own path, so a rejected draft never touches it; committed tokens
    advance it one by one. All calls come from the engine's thread.
    """

    def fork(self) -> Self:
        """An independent copy: advancing one leaves the other as it is."""

    def advance(self, token_id: int) -> bool:
        """Take a token. False where it may not come here; the state must then not be used any more.

        Called for drafts, which may be anything, and for committed tokens, which the mask has let through.
        """

    def fill_mask(self, mask: Tensor) -> None:
        """Write which tokens may come next. mask: [ceil(vocab / 32)] int32, all bits of it; bit i % 32 of word i // 32
        stands for token i, 1 allows it. Bits past the vocabulary are ignored.

        It decides about end-of-sequence tokens too: none are added. A mask that lets nothing through ends the request
        with an error.
        """

    def settle(self, token_id: int) -> int | None:
        """`token_id` where it may come next, or the one token that may, if that is known for less than a mask costs.

        None: a mask has to tell. What it says must be what the mask would.
        """

    def forced(self) -> Sequence[int]:
        """Tokens that come next whatever the target thinks, as far as that is known; they are drafted for nothing."""

    def is_finished(self) -> bool:
        """Whether the output is complete and nothing may be added: the request ends here, before min_tokens too."""


def node_states(root: Constraint, token_ids: Sequence[int], parents: Sequence[int]) -> list[Constraint | None]:
    """The state at each node of a draft tree (node 0 is the anchor, whose state is `root`).

    None: the node's token may not come there, so the target never walks to it or below it.
    """
    states: list[Constraint | None] = [root]
    for token_id, parent in zip(token_ids[1:], parents[1:], strict=True):
        before = states[parent]
        state = before.fork() if before is not None else None
        states.append(state if state is not None and state.advance(token_id) else None)
    return states
