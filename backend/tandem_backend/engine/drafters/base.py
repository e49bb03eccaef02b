# SPDX-License-Identifier: Apache-2.0
"""The interface of drafters. A drafter guesses; it can change how fast a text comes, never the text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from tandem_backend.engine.sampling.rejection import DraftSampler
from tandem_backend.model.state import KVLayer

# What follows is made in every round; frozen fields would take longer to set.


@dataclass(slots=True)
class DraftContext:
    """A decoding sequence that a drafter may draft for."""

    key: int  # names the sequence from `begin` to `end`
    token_ids: Sequence[int]  # every committed token; the last one is the anchor
    num_prompt_tokens: int  # tokens of this turn's prompt, kept ones included
    block_table: Sequence[int]  # KV blocks of the sequence, for drafters that keep KV beside the target's
    max_nodes: int  # nodes worth proposing, the anchor not counted; at least 1
    max_depth: int  # tokens the request can still take; at least 1
    token_ms: float = math.inf  # what a token costs without drafts
    row_ms: float = 0.0  # what a node's row costs in the pass
    trust: float = 1.0  # how often the drafter's nodes were taken in this text, against what is usual
    num_looked_back: int = 0  # of the latest tokens, which the drafter shall guess too: what it would have been worth
    sampler: DraftSampler | None = None  # set where a drafter may draw its tokens and say from what

    def pays(self, path: float, paths: float, drafted_ms: float, added_ms: float) -> bool:
        """Whether a token that the path's probability promises is worth added_ms.

        It has to bring more than the draft as it is, or than plain decoding: paths is the sum of the probabilities of
        the draft's nodes, drafted_ms what these cost.
        """
        rate = max(1 / self.token_ms, (1 + self.trust * paths) / (self.token_ms + drafted_ms))
        return self.trust * path > rate * added_ms


@dataclass(slots=True)
class Proposal:
    """Draft nodes in any order in which a parent comes before its children; the anchor is not among them."""

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()  # index into this proposal, -1: the anchor
    scores: Sequence[float] = ()  # the drafter's guess that the target takes the node, given that it took the parent
    # By node the distribution that its token was drawn from, by `DraftContext.sampler`. Such a proposal stands in
    # depth-first pre-order and is verified alone, whole and in that order: a choice among drawn tokens would bias them.
    q: Sequence[Tensor] = ()
    looked_back: Sequence[tuple[float, bool]] = ()  # by token that was guessed again: its guess's score, whether right


@dataclass(slots=True)
class CommittedRows:
    """Rows of the target that a round kept of one sequence."""

    key: int
    start: int  # position of the first row
    hidden: Tensor  # [rows, hidden_size] float32, after the target's final norm
    next_token_ids: Sequence[int]  # the token after each row
    block_table: Sequence[int]


class Drafter(Protocol):
    """What the engine asks of a drafter; all calls come from the engine's thread."""

    name: str

    def begin(self, key: int) -> None:
        """A sequence starts from nothing under `key`; whatever was known under it is void."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        """One proposal a context; an empty one declines."""

    def end(self, key: int) -> None:
        """The sequence is gone."""


@runtime_checkable
class ObservingDrafter(Protocol):
    """A drafter that reads the target's hidden states."""

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        """A round committed these rows of requests that use the drafter; it need not have drafted in the round.

        A sequence's rows may begin after a gap, where an earlier turn did without the drafter.
        """


@runtime_checkable
class QuickDrafter(Protocol):
    """What a drafter may offer that often has nothing to propose: to find that out before a round builds anything."""

    def has_proposal(self, key: int, token_ids: Sequence[int]) -> bool:
        """Whether `propose` would not decline; token_ids: every committed token."""


@runtime_checkable
class KVDrafter(Protocol):
    """What else the prefix cache asks of a drafter whose KV lies beside the target's, under the same block ids.

    Its row of a position may depend on the token after it.
    """

    def kv_layers(self) -> list[KVLayer]:
        """Copied with the target's, when a block is."""

    def kept(self, key: int) -> tuple[int, Tensor | None]:
        """Positions whose KV is written, and the target's hidden state [1, hidden_size] at the last of them."""

    def resume(self, key: int, position: int, hidden: Tensor, next_token_id: int, block_table: Sequence[int]) -> None:
        """A sequence that has begun goes on after `position` tokens: the KV of all but the last lies in its blocks.

        hidden: [1, hidden_size], the target's at the last of them.
        """
