# SPDX-License-Identifier: Apache-2.0
"""Scheduler: which requests run, what each brings to a round, and who owns which memory. Knows no tensors."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tandem_backend.config import EngineConfig
from tandem_backend.engine.pools import IndexPool
from tandem_backend.engine.sequence import Generation, PreparedRequest, Sequence, Session
from tandem_backend.errors import InvalidRequestError, UnavailableError
from tandem_backend.types import SequenceId


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue, with the session it belongs to."""

    prepared: PreparedRequest
    session: Session | None


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """What one request brings to a round: prompt tokens (num_prompt_rows > 0) or its draft tree."""

    generation: Generation
    num_prompt_rows: int  # 0: a decoding sequence
    ends_prompt: bool  # the chunk's last row yields the first token


@dataclass(slots=True)
class Scheduler:
    """Queue, running requests and sessions. Requests start in order; those of one session one after the other."""

    config: EngineConfig
    max_context_len: int
    block: int
    blocks: IndexPool
    slots: IndexPool
    on_free: Callable[[int], None]  # told the slot of every sequence that is gone
    waiting: deque[Waiting] = field(default_factory=deque)
    running: list[Generation] = field(default_factory=list)
    sessions: dict[SequenceId, Session] = field(default_factory=dict)

    def check_queue(self) -> None:
        """Raises UnavailableError when no further request is taken."""
        if len(self.waiting) + len(self.running) >= self.config.max_active + self.config.max_queued:
            raise UnavailableError(
                f"the queue is full ({len(self.waiting)} waiting, {len(self.running)} running); retry later"
            )

    def enqueue(self, prepared: PreparedRequest) -> None:
        """Queue a request. Raises InvalidRequestError where it continues no open sequence."""
        request = prepared.request
        session = None
        if request.sequence_id is not None:
            session = self.sessions.get(request.sequence_id)
            if request.sequence_start:
                session = self.sessions[request.sequence_id] = Session(request.sequence_id)
            elif session is None or session.ends:
                raise InvalidRequestError(
                    f"sequence_id: no open sequence {request.sequence_id!r} (never started, ended, idle for too long "
                    "or dropped for memory); send sequence_start with the whole conversation"
                )
            session.ends = request.sequence_end
        self.waiting.append(Waiting(prepared, session))

    def startable(self) -> Iterator[Waiting]:
        """Take requests off the queue as long as one may start. The caller starts each before it asks for the next."""
        while len(self.running) < self.config.max_active:
            item = next((w for w in self.waiting if w.session is None or w.session.running is None), None)
            if item is None or not self._make_room(item):
                return
            self.waiting.remove(item)
            yield item

    def _make_room(self, item: Waiting) -> bool:
        """Drop idle sessions, least recently used first, until the request's worst case fits.

        When nothing runs that could make room, sessions with a waiting turn go too, the last to be served first: each
        one's state would keep the others waiting for ever.
        """
        kept = item.session.sequence if item.session is not None else None
        while True:
            needs_slot = kept is None and self.slots.num_free == 0
            # The conversation's own blocks serve its next turn too.
            owned = len(kept.block_table) if kept is not None else 0
            if not needs_slot and self._worst_blocks(item, kept) <= self.blocks.num_free + owned:
                return True
            others = [s for s in self.sessions.values() if s is not item.session]
            idle = [s for s in others if self._is_idle(s)]
            if idle:
                self.drop_session(min(idle, key=lambda s: s.last_used_s))
            elif self.running:
                return False
            else:
                turns = [waiting.session for waiting in self.waiting]
                self.drop_session(max((s for s in others if s.sequence is not None), key=turns.index))

    def _worst_blocks(self, item: Waiting, kept: Sequence | None) -> int:
        prompt = item.prepared.num_prompt_tokens + (len(kept.token_ids) if kept is not None else 0)
        if item.session is not None and item.session.messages is not None:
            # The template may write earlier turns longer than they were kept; only the context bounds it.
            prompt = self.max_context_len
        worst = self.num_blocks(min(prompt + self.max_tokens(item.prepared), self.max_context_len))
        # More than there are never come free; whether the turn really needs them is seen at its start.
        return min(worst, self.blocks.size)

    def max_tokens(self, prepared: PreparedRequest) -> int:
        asked = prepared.request.params.max_tokens
        return self.config.default_max_tokens if asked is None else asked

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block)

    def new_sequence(self) -> Sequence:
        return Sequence(slot=self.slots.allocate())

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence blocks for so many tokens; `startable` made sure that they are there."""
        while len(sequence.block_table) < self.num_blocks(num_tokens):
            sequence.block_table.append(self.blocks.allocate())

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the blocks past so many tokens."""
        while len(sequence.block_table) > self.num_blocks(num_tokens):
            self.blocks.release(sequence.block_table.pop())

    def schedule(self) -> list[ScheduledRows]:
        """Every decoding request, and prompt rows within the round's budget, oldest request first."""
        is_anyone_decoding = any(g.is_decoding for g in self.running)
        budget = self.config.joint_prefill_rows if is_anyone_decoding else self.config.max_prefill_rows
        scheduled = []
        for generation in self.running:
            if generation.is_decoding:
                scheduled.append(ScheduledRows(generation, 0, ends_prompt=False))
                continue
            pending = generation.sequence.num_pending
            rows = min(pending, budget)
            if rows > 0:
                budget -= rows
                scheduled.append(ScheduledRows(generation, rows, ends_prompt=rows == pending))
        return scheduled

    def finish(self, generation: Generation) -> None:
        """Take a request out. Its session keeps the state for the next turn unless it ends here."""
        self.running.remove(generation)
        session = generation.session
        if session is None:
            self.free(generation.sequence)
            return
        session.running = None
        session.last_used_s = time.monotonic()
        if self.sessions.get(session.sequence_id) is not session:
            self.free(generation.sequence)
            session.sequence = None
        elif not self.drop_if_over(session):
            self.trim(generation.sequence, generation.sequence.num_computed)

    def free(self, sequence: Sequence) -> None:
        self.trim(sequence, 0)
        self.slots.release(sequence.slot)
        self.on_free(sequence.slot)

    def drop_session(self, session: Session) -> None:
        """Forget a session that runs nothing."""
        assert session.running is None, "a running session is finished before it is dropped"
        if self.sessions.get(session.sequence_id) is session:
            del self.sessions[session.sequence_id]
        if session.sequence is not None:
            self.free(session.sequence)
            session.sequence = None

    def drop_if_over(self, session: Session) -> bool:
        """Forget a session whose END came once no turn of it is left; says whether it did."""
        is_over = session.ends and self._is_idle(session)
        if is_over:
            self.drop_session(session)
        return is_over

    def _is_idle(self, session: Session) -> bool:
        return session.running is None and all(item.session is not session for item in self.waiting)

    def sweep(self, now_s: float) -> int:
        """Drop sessions that were idle for longer than session_idle_s; returns how many."""
        limit = now_s - self.config.session_idle_s
        stale = [s for s in self.sessions.values() if s.last_used_s < limit and self._is_idle(s)]
        for session in stale:
            self.drop_session(session)
        return len(stale)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block and slot is free or has exactly its owners."""
        sequences = [g.sequence for g in self.running]
        sequences += [s.sequence for s in self.sessions.values() if s.sequence is not None and s.running is None]
        self.blocks.check_integrity(block for s in sequences for block in s.block_table)
        self.slots.check_integrity(s.slot for s in sequences)
