# SPDX-License-Identifier: Apache-2.0
"""The `draft_model` drafter: a chain from another, smaller checkpoint with the same tokenizer (Leviathan et al. 2023).

Its KV lies in blocks of the same ids as the target's. A draft's rows are never committed: each depth runs the whole
chain again, which for the few rows of a draft costs about one row.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import tandem_kernels as kernels
from torch import Tensor

from tandem_backend.engine.drafters.base import DraftContext, Proposal
from tandem_backend.model.batch import SequenceRows, build_batch
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.state import ModelState

MAX_PREFILL_ROWS = 256


class DraftModelDrafter:
    """Reads token ids only; catches up with the target's committed tokens when it drafts."""

    name = "draft_model"

    def __init__(self, decoder: Decoder, state: ModelState) -> None:
        self.decoder, self.state = decoder, state
        self._num_computed: dict[int, int] = {}
        self._step_ms = 0.0

    def begin(self, key: int) -> None:
        self._num_computed[key] = 0
        self.state.clear_slot(key)

    def end(self, key: int) -> None:
        self._num_computed.pop(key, None)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        return [self._draft(context) for context in contexts]

    def _draft(self, context: DraftContext) -> Proposal:
        chain = _Chain()
        chain.add(context, self._catch_up(context))
        longest = min(context.max_nodes, context.max_depth)
        while len(chain.token_ids) < longest and chain.pays(context, context.row_ms + self._step_ms):
            begun = time.perf_counter()
            chain.add(context, self._run(context, chain.token_ids, commit=False))
            self._step_ms += 0.1 * (1e3 * (time.perf_counter() - begun) - self._step_ms)
        return Proposal(chain.token_ids, range(-1, len(chain.token_ids) - 1), chain.scores, chain.q)

    def _catch_up(self, context: DraftContext) -> Tensor:
        """Commit every token up to the anchor; returns the logits after it, [1, vocab]."""
        pending = context.token_ids[self._num_computed[context.key] :]
        for first in range(0, len(pending), MAX_PREFILL_ROWS):
            logits = self._run(context, pending[first : first + MAX_PREFILL_ROWS], commit=True)
        return logits

    def _run(self, context: DraftContext, token_ids: Sequence[int], *, commit: bool) -> Tensor:
        prefix_len = self._num_computed[context.key]
        last = len(token_ids) - 1
        rows = SequenceRows(token_ids, prefix_len, context.key, context.block_table, logit_rows=[last])
        batch = build_batch([rows])
        result = self.decoder.forward(batch, self.state)
        if commit:
            self.decoder.commit(result, batch, [range(len(token_ids))], self.state)
            self._num_computed[context.key] = prefix_len + len(token_ids)
        return result.logits


@dataclass(slots=True)
class _Chain:
    """A draft as it grows, each token from the logits after the one before."""

    token_ids: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    path: float = 1.0  # product of the scores
    paths: float = 0.0  # sum of the products down to each token

    def pays(self, context: DraftContext, step_ms: float) -> bool:
        return context.pays(self.path, self.paths, len(self.token_ids) * step_ms, step_ms)

    def add(self, context: DraftContext, logits: Tensor) -> None:
        if context.sampler is None:
            ids, logprobs = kernels.argmax(logits)
            token_id, score = int(ids), float(logprobs.exp())
        else:
            token_id, q = context.sampler.draw(logits, len(self.token_ids))
            score = float(q[token_id])
            self.q.append(q)
        self.token_ids.append(token_id)
        self.scores.append(score)
        self.path *= score
        self.paths += self.path
