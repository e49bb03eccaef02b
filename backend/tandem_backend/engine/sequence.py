# SPDX-License-Identifier: Apache-2.0
"""Sequence (tokens with committed state), Generation (one request being decoded on it) and Session (its turns)."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem_backend.engine.answer_form import AnswerForm
from tandem_backend.engine.cache.responses import ResponseKey
from tandem_backend.engine.receipts import Trail
from tandem_backend.engine.round_trees import TreeTeller
from tandem_backend.engine.sampling import Constraint, RequestSampling
from tandem_backend.engine.sampling.rejection import DraftSampler
from tandem_backend.engine.text_output import TextOutput
from tandem_backend.types import FinishReason, PromptLogprob, Request, RequestStats, SequenceId


@dataclass(slots=True)
class Sequence:
    """Tokens and where their state lies. KV and recurrent state hold exactly token_ids[:num_computed]."""

    slot: int
    tenant: str = ""  # the cache_salt of the request that began it
    is_sound: bool = True  # False: a round failed on it, so its state is good for nothing
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        """Tokens whose state is not written: the prompt's rest, or 1, the anchor, while decoding."""
        return len(self.token_ids) - self.num_computed


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that was checked and tokenised. A later turn's tokens depend on the session and come at its start."""

    request: Request
    prompt_ids: tuple[int, ...]  # of the prompt by itself
    arrival_time_ns: int
    arrival_s: float  # time.monotonic() at the same moment
    response_key: ResponseKey | None = None  # under which its answer may be kept and found
    resumes_kv: bool = False  # drafts with a drafter that goes on only where its own KV is kept too
    bad_words: tuple[tuple[int, ...], ...] = ()  # their token ids
    constraint: Constraint | None = None  # before the first output token; each generation forks it
    form: AnswerForm = field(default_factory=AnswerForm)
    choice_of: str | None = None  # the request that this is one of several choices of

    @property
    def is_later_choice(self) -> bool:
        """Whether this is a choice after the first: one of a request that is being served already."""
        return self.choice_of is not None and self.choice_of != self.request.request_id

    @property
    def deadline_s(self) -> float:
        """By time.monotonic(): when the request ends with what it has."""
        timeout_ms = self.request.timeout_ms
        return math.inf if timeout_ms is None else self.arrival_s + timeout_ms / 1e3

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)


@dataclass(slots=True)
class Session:
    """The state behind a sequence id, kept between turns."""

    sequence_id: SequenceId
    sequence: Sequence | None = None  # None until its first turn starts
    running: "Generation | None" = None
    num_waiting: int = 0  # turns in the queue
    messages: list[Mapping[str, Any]] | None = None  # the conversation so far, where every turn came as messages
    last_used_s: float = field(default_factory=lambda: time.monotonic())
    ends: bool = False  # END was sent: no further turn is taken

    @property
    def is_idle(self) -> bool:
        return self.running is None and self.num_waiting == 0

    def begin_turn(self, generation: "Generation", *, is_first: bool) -> None:
        """Take a turn that starts, and keep the conversation as messages while every turn comes so.

        It is rendered again as a whole with the next turn.
        """
        self.sequence, self.running = generation.sequence, generation
        messages = generation.request.prompt.messages
        if messages is None:
            self.messages = None
        elif is_first or generation.request.whole_conversation:
            self.messages = list(messages)
        elif self.messages is not None:
            self.messages = [*self.messages, *messages]

    def end_turn(self, generation: "Generation") -> None:
        """Remember the answer of a turn that has ended."""
        self.running, self.last_used_s = None, time.monotonic()
        if self.messages is not None and generation.text is not None:
            self.messages = [*self.messages, {"role": "assistant", "content": generation.text.text}]


@dataclass(slots=True)
class Generation:
    """One request being decoded."""

    prepared: PreparedRequest
    sequence: Sequence
    max_tokens: int
    stop_ids: frozenset[int]
    text: TextOutput | None  # None for a checkpoint without tokenizer
    session: Session | None
    stats: RequestStats
    drafters: frozenset[str]
    sampling: RequestSampling
    num_output: int = 0
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)  # not given out yet
    started_s: float = field(default_factory=lambda: time.monotonic())
    trail: Trail | None = None  # of a request that wants a receipt
    trees: TreeTeller | None = None  # of a request that wants its draft trees

    @property
    def request(self) -> Request:
        return self.prepared.request

    @property
    def is_decoding(self) -> bool:
        return self.sequence.num_pending == 1 and self.num_output > 0

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is being computed, of which others that begin with it will find the state."""
        return self.sequence.num_pending > 1

    @property
    def draft_sampler(self) -> DraftSampler | None:
        """Where the request asks for the rejection rule, with which drafters may draw."""
        if not self.request.params.uses_rejection:
            return None
        return DraftSampler(self.sampling, len(self.sequence.token_ids))

    def take(self, token_ids: list[int]) -> tuple[int, str, FinishReason | None]:
        """Append the target's tokens up to the first that ends the request, or that its constraint fails on.

        Returns how many were kept, the text they made final, and why the request ended, if it did.
        """
        pieces: list[str] = []
        for n, token_id in enumerate(token_ids, start=1):
            self.sampling.commit(token_id)
            if self.sampling.fault is not None:
                return n - 1, "".join(pieces), None
            self.sequence.token_ids.append(token_id)
            self.num_output += 1
            reason = self._push(token_id, pieces)
            if reason is not None:
                return n, "".join(pieces), reason
        return len(token_ids), "".join(pieces), None

    def take_prompt_logprobs(self) -> tuple[PromptLogprob | None, ...]:
        """One entry a prompt token, with the first output and only where the request asks for them.

        None for the first token, before which there is nothing, and for those whose state was kept from before.
        """
        if self.request.params.prompt_logprobs is None or self.num_output > 1:
            return ()
        missing = self.stats.num_prompt_tokens - len(self.prompt_logprobs)
        found, self.prompt_logprobs = (*[None] * missing, *self.prompt_logprobs), []
        return found

    def _push(self, token_id: int, pieces: list[str]) -> FinishReason | None:
        may_stop = self.num_output > self.request.params.min_tokens
        if may_stop and token_id in self.stop_ids:
            # The stop token itself is no text, whether or not the tokenizer calls it special.
            pieces.append(self.flush())
            return FinishReason.STOP
        if self.text is not None:
            piece, stopped = self.text.push(token_id, may_stop=may_stop)
            pieces.append(piece)
            if stopped:
                return FinishReason.STOP
        if self.sampling.is_finished:
            pieces.append(self.flush())
            return FinishReason.STOP
        if self.num_output >= self.max_tokens:
            pieces.append(self.flush())
            return FinishReason.LENGTH
        return None

    def flush(self) -> str:
        """The text that is held back: an unfinished character, or what may have become a stop string."""
        return self.text.flush() if self.text is not None else ""
