# SPDX-License-Identifier: Apache-2.0
"""A whole drafter: it proposes what followed the last token the last time, and what followed that, and so on."""

from collections.abc import Sequence

from tandem_backend.engine.drafters.base import DraftContext, Proposal


class BigramDrafter:
    name = "bigram"

    def __init__(self) -> None:
        self._next: dict[int, dict[int, int]] = {}  # sequence -> token -> the token that followed it last
        self._num_read: dict[int, int] = {}

    def begin(self, key: int) -> None:
        self._next[key], self._num_read[key] = {}, 1

    def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        return [self._propose(context) for context in contexts]

    def end(self, key: int) -> None:
        del self._next[key], self._num_read[key]

    def _propose(self, context: DraftContext) -> Proposal:
        following, tokens = self._next[context.key], context.token_ids
        for position in range(self._num_read[context.key], len(tokens)):
            following[tokens[position - 1]] = tokens[position]
        self._num_read[context.key] = len(tokens)
        chain: list[int] = []
        token = tokens[-1]
        while token in following and len(chain) < min(context.max_nodes, context.max_depth):
            token = following[token]
            chain.append(token)
        return Proposal(chain, range(-1, len(chain) - 1), [0.5] * len(chain))
