# SPDX-License-Identifier: Apache-2.0
"""Scheduler: which requests run, what each brings to a round, and who owns which memory. Knows no tensors."""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from tandem_backend.config import EngineConfig
from tandem_backend.engine.cache.prefix_cache import PrefixCache
from tandem_backend.engine.cache.radix import Match
from tandem_backend.engine.pools import IndexPool
from tandem_backend.engine.prompt_rows import share_rows
from tandem_backend.engine.queue import RequestQueue, Waiting
from tandem_backend.engine.sequence import Generation, PreparedRequest, Sequence, Session
from tandem_backend.engine.sizes import MemorySizes
from tandem_backend.errors import InvalidRequestError, UnavailableError
from tandem_backend.types import Request, SequenceId, SessionEnd


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """What one request brings to a round: prompt tokens (num_prompt_rows > 0) or its draft tree."""

    generation: Generation
    num_prompt_rows: int  # 0: a decoding sequence
    ends_prompt: bool  # the chunk's last row yields the first token

    @property
    def num_prompt_logits(self) -> int:
        """How many of the last prompt rows need logits: the one that yields a token, or all for prompt_logprobs."""
        wants_all = self.generation.request.params.prompt_logprobs is not None
        return self.num_prompt_rows if wants_all else int(self.ends_prompt)


@dataclass(slots=True)
class Scheduler:
    """Running requests, sessions and the queue. Who is first in the queue starts first; nobody passes it.

    `on_free` is told of every sequence before it is gone, `on_session_end` why each session was dropped. KV blocks are
    counted in the prefix cache's pool: what it holds comes free where requests need it.
    """

    config: EngineConfig
    max_context_len: int
    sizes: MemorySizes
    cache: PrefixCache
    slots: IndexPool
    on_free: Callable[[Sequence], None]
    on_session_end: Callable[[SessionEnd], None]
    waiting: RequestQueue
    running: list[Generation] = field(default_factory=list)
    sessions: dict[SequenceId, Session] = field(default_factory=dict)

    @property
    def blocks(self) -> IndexPool:
        return self.cache.index.blocks

    def check_room(self, request: Request, num_choices: int = 1) -> None:
        """Raises UnavailableError when the request can't be queued: nothing has changed then."""
        self.waiting.check_room(len(self.running), num_choices)
        if self._opens_session(request):
            kept = self._kept_sessions(request)
            if len(kept) >= self.config.max_sessions and not any(session.is_idle for session in kept):
                raise UnavailableError(
                    f"max_sessions: all {len(kept)} open sequences are busy",
                    retry_after_s=self.waiting.retry_after_s(len(self.running)),
                )

    def enqueue(self, prepared: PreparedRequest) -> None:
        """Queue a request that `check_room` let pass. Raises InvalidRequestError where it continues no open sequence.

        A new session takes the place of the least recently used idle one if there are max_sessions. Choices have none:
        no turn follows them.
        """
        request, session = prepared.request, None
        if request.sequence_id is not None and prepared.choice_of is None:
            if self._opens_session(request):
                kept = self._kept_sessions(request)
                if len(kept) >= self.config.max_sessions:
                    self._drop_least_recent([session for session in kept if session.is_idle])
            session = self._session_of(request, request.sequence_id)
            session.ends = request.sequence_end
        self.waiting.push(Waiting(prepared, session))

    def _opens_session(self, request: Request) -> bool:
        """START with END is a single request: nothing of it is kept."""
        return request.sequence_id is not None and request.sequence_start and not request.sequence_end

    def _kept_sessions(self, request: Request) -> list[Session]:
        """The sessions that max_sessions counts, but for the one that the request begins anew."""
        return [s for s in self.sessions.values() if not s.ends and s.sequence_id != request.sequence_id]

    def _session_of(self, request: Request, sequence_id: SequenceId) -> Session:
        session = self.sessions.get(sequence_id)
        if request.sequence_start:
            session = self.sessions[sequence_id] = Session(sequence_id)
        elif session is None or session.ends:
            raise InvalidRequestError(
                f"sequence_id: no open sequence {sequence_id!r} (never started, ended, idle for too long "
                "or dropped for memory); send sequence_start with the whole conversation"
            )
        return session

    def startable(self) -> Iterator[Waiting]:
        """Take requests off the queue as long as one may start. The caller starts each before it asks for the next."""
        while len(self.running) < self.config.max_active:
            item = self.waiting.first(self._read_for_choices())
            if item is None or not self._make_room(item):
                return
            self.waiting.remove(item)
            yield item

    def _read_for_choices(self) -> set[str]:
        """The requests of which a choice computes the prompt, where the prefix cache will give it to the others."""
        if not self.cache.is_on:
            return set()
        return {g.prepared.choice_of for g in self.running if g.prepared.choice_of is not None and g.is_reading}

    def choices_of(self, sequence_id: SequenceId) -> list[str]:
        """Ids of the choices that run or wait under a sequence id; they belong to no session."""
        prepared = [*(item.prepared for item in self.waiting), *(g.prepared for g in self.running)]
        return [
            p.request.request_id for p in prepared if p.choice_of is not None and p.request.sequence_id == sequence_id
        ]

    def _make_room(self, item: Waiting) -> bool:
        """Drop idle sessions, least recently used first, until the request's worst case fits.

        False: it has to wait for running requests. Where nothing runs, sessions with waiting turns are dropped as well,
        the one whose turn is last in the queue first: each one's state would keep the others waiting for ever.
        """
        kept = item.session.sequence if item.session is not None else None
        while True:
            needs_slot = kept is None and self.slots.num_free == 0
            if not needs_slot and self._make_blocks(item, kept):
                return True
            others = [s for s in self.sessions.values() if s is not item.session and s.sequence is not None]
            idle = [s for s in others if s.is_idle]
            if idle:
                self._drop_least_recent(idle)
            elif self.running:
                return False
            else:
                turns = [waiting.session for waiting in self.waiting]
                self.drop_session(max(others, key=turns.index), SessionEnd.MEMORY)

    def _make_blocks(self, item: Waiting, kept: Sequence | None) -> bool:
        """Let cached prefixes go until the request's worst case fits, if it can fit that way."""
        needed = self._worst_blocks(item, kept)
        if kept is not None:
            # The conversation's own blocks serve its next turn too, or come free where it begins anew.
            is_continued = not self._may_begin_anew(item)
            table = kept.block_table
            needed -= len(table) if is_continued else sum(self.cache.comes_free(block) for block in table)
            return self.cache.make_room(needed, None)
        if needed > self.blocks.num_free + self.cache.index.num_nodes:
            return False
        match = self.find(item.prepared)
        shared = match.num_shared_blocks if match is not None else 0
        return self.cache.make_room(needed - shared, match) or self.cache.make_room(needed, None)

    def find(self, prepared: PreparedRequest, token_ids: Rows[int] | None = None) -> Match | None:
        """The cached prefix that a request may resume from; token_ids: all of its sequence, if not just its prompt."""
        if prepared.request.params.prompt_logprobs is not None:
            return None  # the rows of all prompt tokens are asked for
        token_ids = prepared.prompt_ids if token_ids is None else token_ids
        return self.cache.find(prepared.request.cache_salt, token_ids, with_drafter=prepared.resumes_kv)

    def _drop_least_recent(self, sessions: list[Session]) -> None:
        self.drop_session(min(sessions, key=lambda session: session.last_used_s), SessionEnd.MEMORY)

    def _may_begin_anew(self, item: Waiting) -> bool:
        """Whether a later turn's tokens may begin differently from those that its session keeps."""
        is_of_messages = item.session is not None and item.session.messages is not None
        return is_of_messages or item.prepared.request.whole_conversation

    def _worst_blocks(self, item: Waiting, kept: Sequence | None) -> int:
        prompt = item.prepared.num_prompt_tokens
        if kept is not None and not item.prepared.request.whole_conversation:
            # The template may write earlier turns longer than they were kept; only the context bounds it.
            prompt = self.max_context_len if self._may_begin_anew(item) else prompt + len(kept.token_ids)
        worst = self.num_blocks(min(prompt + self.max_tokens(item.prepared), self.max_context_len))
        # More than there are never come free; whether the turn really needs them is seen at its start.
        return min(worst, self.blocks.size)

    def max_tokens(self, prepared: PreparedRequest) -> int:
        asked = prepared.request.params.max_tokens
        return self.config.default_max_tokens if asked is None else asked

    def num_blocks(self, num_tokens: int) -> int:
        return self.sizes.num_blocks(num_tokens)

    def new_sequence(self) -> Sequence:
        return Sequence(slot=self.slots.allocate())

    def empty(self, sequence: Sequence) -> None:
        """Let a sequence begin anew in its slot, and tell `on_free` of what it was."""
        if sequence.num_computed:
            self.on_free(sequence)
        self.trim(sequence, 0)
        sequence.num_computed = 0

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence blocks for so many tokens; `startable` made sure that they are there."""
        while len(sequence.block_table) < self.num_blocks(num_tokens):
            sequence.block_table.append(self.blocks.allocate())

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the blocks past so many tokens."""
        while len(sequence.block_table) > self.num_blocks(num_tokens):
            self.blocks.release(sequence.block_table.pop())

    def schedule(self) -> list[ScheduledRows]:
        """Every decoding request, and the prompts' shares of the round's budget."""
        is_anyone_decoding = any(g.is_decoding for g in self.running)
        budget = self.config.joint_prefill_rows if is_anyone_decoding else self.config.max_prefill_rows
        pending = [0 if g.is_decoding else g.sequence.num_pending for g in self.running]
        shares = share_rows(pending, [g.request.priority for g in self.running], budget)
        return [
            ScheduledRows(generation, rows, ends_prompt=0 < rows == num_pending)
            for generation, rows, num_pending in zip(self.running, shares, pending, strict=True)
            if rows or generation.is_decoding
        ]

    def finish(self, generation: Generation) -> None:
        """Take a request out. Its session keeps the state for the next turn unless it ends here."""
        self.running.remove(generation)
        self.waiting.learn_duration(time.monotonic() - generation.started_s)
        session = generation.session
        if session is None:
            self.free(generation.sequence)
            return
        session.end_turn(generation)
        if not self.drop_if_over(session):
            self.trim(generation.sequence, generation.sequence.num_computed)

    def free(self, sequence: Sequence) -> None:
        self.on_free(sequence)
        self.trim(sequence, 0)
        self.slots.release(sequence.slot)

    def discard(self, sequence: Sequence, session: Session | None) -> None:
        """Free a sequence that could not be started; with it goes what its session had kept."""
        sequence.is_sound = False
        sequence.is_sound = False
        if session is not None and session.sequence is sequence:
            self.drop_session(session, SessionEnd.FAILED)
        else:
            self.free(sequence)

    def is_open(self, session: Session) -> bool:
        return self.sessions.get(session.sequence_id) is session

    def drop_session(self, session: Session, why: SessionEnd) -> None:
        """Forget a session that runs nothing; one that was dropped before is left as it is."""
        assert session.running is None, "a running session is finished before it is dropped"
        if not self.is_open(session):
            return
        del self.sessions[session.sequence_id]
        self.on_session_end(why)
        if session.sequence is not None:
            self.free(session.sequence)
            session.sequence = None

    def drop_if_over(self, session: Session) -> bool:
        """Forget a session whose END came once no turn of it is left; says whether it did."""
        is_over = session.ends and session.is_idle
        if is_over:
            self.drop_session(session, SessionEnd.ENDED)
        return is_over

    def sweep(self, now_s: float) -> int:
        """Drop sessions that were idle for longer than session_idle_s; returns how many."""
        limit = now_s - self.config.session_idle_s
        stale = [s for s in self.sessions.values() if s.last_used_s < limit and s.is_idle]
        for session in stale:
            self.drop_session(session, SessionEnd.IDLE)
        return len(stale)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block and slot is free or has exactly its owners."""
        sequences = [g.sequence for g in self.running]
        sequences += [s.sequence for s in self.sessions.values() if s.sequence is not None and s.running is None]
        self.cache.check_integrity()
        cached = [node.block for node in self.cache.index.nodes()]
        self.blocks.check_integrity([*cached, *(block for s in sequences for block in s.block_table)])
        self.slots.check_integrity(s.slot for s in sequences)
