# SPDX-License-Identifier: Apache-2.0
"""Starter: turns a queued request into a running one."""

import time
from dataclasses import dataclass, field

from tandem_backend.engine.cache.spill import Spill
from tandem_backend.engine.limits import Limits
from tandem_backend.engine.prompts import PromptEncoder
from tandem_backend.engine.queue import Waiting
from tandem_backend.engine.receipts import Trail
from tandem_backend.engine.round import RoundRunner
from tandem_backend.engine.round_trees import TreeTeller
from tandem_backend.engine.sampling.request import start_sampling
from tandem_backend.engine.scheduler import Scheduler
from tandem_backend.engine.sequence import Generation, PreparedRequest, Sequence
from tandem_backend.engine.text_output import TextOutput
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import UnavailableError
from tandem_backend.types import CacheCounters, RequestStats


@dataclass(frozen=True, slots=True)
class Starter:
    """Gives a request its tokens, memory, drafters and stop rules. Holds no state but its counters."""

    prompts: PromptEncoder
    tokenizer: Tokenizer | None
    limits: Limits
    scheduler: Scheduler
    rounds: RoundRunner
    spill: Spill | None = None  # what of a prompt is on disk comes back at its start
    counters: CacheCounters = field(default_factory=CacheCounters)  # of the states that sessions kept

    def start(self, item: Waiting) -> None:
        """Run the request from the next round on. What raises leaves no memory behind.

        Raises InvalidRequestError where it does not fit behind its session's tokens (which stay as they are), and
        UnavailableError where that session is gone.
        """
        session = item.session
        if session is not None and not self.scheduler.is_open(session):
            raise UnavailableError(
                f"sequence {session.sequence_id!r} was dropped for memory while this turn waited; "
                "send sequence_start with the whole conversation"
            )
        kept = session.sequence if session is not None else None
        token_ids = list(item.prepared.prompt_ids)
        if session is not None and kept is not None and not item.prepared.request.whole_conversation:
            token_ids = self.prompts.continue_session(session, kept.token_ids, item.prepared.request.prompt)
        self.limits.check(item.prepared.request, len(token_ids))
        sequence = kept if kept is not None else self.scheduler.new_sequence()
        try:
            generation = self._generation(item, sequence, token_ids, is_new=kept is None)
        except Exception:
            self.scheduler.discard(sequence, session)
            raise
        if session is not None:
            session.begin_turn(generation, is_first=kept is None)
        self.scheduler.running.append(generation)

    def _begin(self, prepared: PreparedRequest, sequence: Sequence, token_ids: list[int], num_blocks: int) -> None:
        """Empty the sequence, then resume it from the longest cached prefix of its tokens, if there is one."""
        scheduler, drafting, cache = self.scheduler, self.rounds.drafting, self.scheduler.cache
        scheduler.empty(sequence)
        sequence.tenant = prepared.request.cache_salt
        drafting.begin(sequence.slot)
        if self.spill is not None and prepared.request.params.prompt_logprobs is None:
            self.spill.recall(sequence.tenant, token_ids, with_drafter=prepared.resumes_kv)
        match = scheduler.find(prepared, token_ids)
        if match is not None and not cache.make_room(num_blocks - match.num_shared_blocks, match):
            match = None
        if match is None:
            if not cache.make_room(num_blocks, None):
                raise UnavailableError("kv_cache_bytes: too few blocks are free for this turn's rewritten conversation")
            self.rounds.state.clear_slot(sequence.slot)
        else:
            cache.resume(match, sequence)
            if match.anchor is not None and match.anchor.hidden is not None and match.feeds_drafter():
                next_token_id = token_ids[match.position]
                drafting.resume(sequence.slot, match.position, match.anchor.hidden, next_token_id, sequence.block_table)
        cache.counters.count(sequence.num_computed)

    def _generation(self, item: Waiting, sequence: Sequence, token_ids: list[int], *, is_new: bool) -> Generation:
        request, kept_ids = item.prepared.request, sequence.token_ids
        room = self.scheduler.max_context_len - len(token_ids)
        max_tokens = min(self.scheduler.max_tokens(item.prepared), room)
        num_blocks = self.scheduler.num_blocks(len(token_ids) + max_tokens)
        is_continued = not is_new and token_ids[: len(kept_ids)] == kept_ids
        if not is_continued:
            self._begin(item.prepared, sequence, token_ids, num_blocks)
        if not is_new:
            self.counters.count(sequence.num_computed if is_continued else 0)
        sequence.token_ids = token_ids
        self.scheduler.reserve(sequence, len(token_ids) + max_tokens)
        text = None
        if self.tokenizer is not None:
            text = TextOutput(self.tokenizer, request.params.stop, include_stop=request.params.include_stop)
        stats = RequestStats(
            num_prompt_tokens=len(token_ids),
            num_cached_tokens=sequence.num_computed,
            arrival_time_ns=item.prepared.arrival_time_ns,
            first_scheduled_time_ns=time.time_ns(),
            seed=request.params.seed if request.params.temperature > 0 else None,
        )
        return Generation(
            prepared=item.prepared,
            sequence=sequence,
            max_tokens=max_tokens,
            stop_ids=self.limits.stop_ids(request),
            text=text,
            session=item.session,
            stats=stats,
            drafters=self.rounds.drafting.names(request.params.drafter),
            sampling=start_sampling(
                request.params,
                num_prompt=len(token_ids),
                vocab_size=self.limits.model.vocab_size,
                stop_ids=self.limits.stop_ids(request),
                bad_words=item.prepared.bad_words,
                constraint=item.prepared.constraint,
            ),
            trail=Trail() if request.return_receipt else None,
            trees=TreeTeller() if request.return_draft_trees else None,
        )
