# SPDX-License-Identifier: Apache-2.0
"""The `draft_model` drafter: a chain from another, smaller checkpoint with the same tokenizer (Leviathan et al. 2023).

Its KV lies in blocks of the same ids as the target's. A draft's rows are never committed: each depth runs the whole
chain again, which for the few rows of a draft costs about one row.
"""

import time
from collections.abc import Sequence

import tandem_kernels as kernels

from tandem_backend.engine.drafters.base import CommittedRows, DraftContext, Proposal
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

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        pass

    def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        return [self._draft(context) for context in contexts]

    def _draft(self, context: DraftContext) -> Proposal:
        token_id, score = self._catch_up(context)
        token_ids, scores, path = [token_id], [score], score
        longest = min(context.max_nodes, context.max_depth)
        while len(token_ids) < longest and path * context.token_ms > context.row_ms + self._step_ms:
            begun = time.perf_counter()
            token_id, score = self._run(context, token_ids, commit=False)
            token_ids.append(token_id)
            scores.append(score)
            path *= score
            self._step_ms += 0.1 * (1e3 * (time.perf_counter() - begun) - self._step_ms)
        return Proposal(token_ids, range(-1, len(token_ids) - 1), scores)

    def _catch_up(self, context: DraftContext) -> tuple[int, float]:
        """Commit every token up to the anchor; returns the guess after it."""
        pending = context.token_ids[self._num_computed[context.key] :]
        for first in range(0, len(pending), MAX_PREFILL_ROWS):
            guess = self._run(context, pending[first : first + MAX_PREFILL_ROWS], commit=True)
        return guess

    def _run(self, context: DraftContext, token_ids: Sequence[int], *, commit: bool) -> tuple[int, float]:
        prefix_len = self._num_computed[context.key]
        last = len(token_ids) - 1
        rows = SequenceRows(token_ids, prefix_len, context.key, context.block_table, logit_rows=[last])
        batch = build_batch([rows])
        result = self.decoder.forward(batch, self.state)
        if commit:
            self.decoder.commit(result, batch, [range(len(token_ids))], self.state)
            self._num_computed[context.key] = prefix_len + len(token_ids)
        ids, logprobs = kernels.argmax(result.logits)
        return int(ids), float(logprobs.exp())
