# SPDX-License-Identifier: Apache-2.0
"""Engine: requests in, one round after the other, outputs out. One thread drives it; only `prepare` is thread-safe."""

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace

import tandem_kernels as kernels
import torch

from tandem_backend.config import EngineConfig
from tandem_backend.engine.answer_form import AnswerForms
from tandem_backend.engine.assembly import assemble
from tandem_backend.engine.cache.responses import ResponseCache, response_key
from tandem_backend.engine.cache.spill import Spill
from tandem_backend.engine.check import context_len
from tandem_backend.engine.choices import split_choices
from tandem_backend.engine.drafters.base import Drafter
from tandem_backend.engine.endings import Endings
from tandem_backend.engine.fingerprint import Fingerprint, take_fingerprint
from tandem_backend.engine.health import Health
from tandem_backend.engine.limits import Limits
from tandem_backend.engine.pools import IndexPool
from tandem_backend.engine.prompts import PromptEncoder
from tandem_backend.engine.queue import RequestQueue
from tandem_backend.engine.round import RecordLogits
from tandem_backend.engine.sampling.request import fresh_seed
from tandem_backend.engine.scheduler import Scheduler
from tandem_backend.engine.self_test import self_test_at_load
from tandem_backend.engine.sequence import PreparedRequest
from tandem_backend.engine.start import Starter
from tandem_backend.engine.statistics import counters, statistics
from tandem_backend.engine.tokenizer import Tokenizer, has_tokenizer
from tandem_backend.errors import (
    ConfigError,
    InternalError,
    InvalidRequestError,
    TandemError,
)
from tandem_backend.model.checkpoint import Weights
from tandem_backend.model.decoder import Decoder
from tandem_backend.types import EngineCounters, FinishReason, Request, SequenceId, SessionEnd, StepOutput

logger = logging.getLogger(__name__)


class Engine:
    """Decodes many requests together; what a request gets never depends on the others."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        extra_drafters: Mapping[str, Drafter] | None = None,
        record_logits: RecordLogits | None = None,
        weights: Weights | None = None,
    ) -> None:
        """Load the checkpoint and its drafters, allocate state, run the self-test. Raises ConfigError, CheckpointError.

        extra_drafters are asked beside the configured ones by requests that name them; record_logits sees the logits
        row that chose each output token; weights take the place of the checkpoint's own.
        """
        if config.allow_relaxed_acceptance:
            logger.warning("allow_relaxed_acceptance: requests with relax_tau get text that depends on the drafts")
        if weights is not None and config.disk_cache is not None:
            raise ConfigError(
                "disk_cache: its fingerprint is of the checkpoint's own weights, and others take their place"
            )
        kernels.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        self.config = config
        self.model = Decoder(config.checkpoint, _find_device(config.device), weights)
        self.tokenizer = Tokenizer(config.checkpoint) if has_tokenizer(config.checkpoint) else None
        self.max_context_len = context_len(config, self.model.config)
        self.prompts = PromptEncoder(self.tokenizer, self.model.config.vocab_size, self.max_context_len)
        self._forms = AnswerForms(self.tokenizer, self.model.config)
        self._fingerprint: Fingerprint | None = None
        parts = assemble(
            config,
            self.model,
            self.tokenizer,
            self.max_context_len,
            extra_drafters,
            record_logits,
            self.fingerprint,
        )
        self.sizes, self.memory, self.stored_texts = parts.sizes, parts.memory, parts.stored_texts
        self.rounds, self.spill = parts.rounds, parts.spill
        self.scheduler = Scheduler(
            config,
            self.max_context_len,
            self.sizes,
            self.rounds.cache,
            IndexPool(parts.num_slots),
            on_free=self.rounds.leave,
            on_session_end=self._count_session_end,
            waiting=RequestQueue(config),
        )
        self.limits = Limits(self.model.config, self.scheduler)
        self._starter = Starter(self.prompts, self.tokenizer, self.limits, self.scheduler, self.rounds, self.spill)
        self.responses = ResponseCache(config.response_cache_bytes, config.response_cache_ttl_s)
        self.health = Health(config.max_failed_rounds)
        self.endings = Endings(self.scheduler, self.stored_texts, self.responses, self.fingerprint)
        self.self_test = self_test_at_load(self.model, self.rounds.state, self.rounds.passes, config.self_test_rows)

    def fingerprint(self) -> Fingerprint:
        """Of receipts and states on disk; the first call reads the whole checkpoint."""
        if self._fingerprint is None:
            self._fingerprint = take_fingerprint(self.config.checkpoint, self.model.device)
        return self._fingerprint

    def prepare(self, request: Request) -> PreparedRequest:
        """Check and tokenise a request; thread-safe. Raises InvalidRequestError naming the field."""
        if request.return_receipt:
            if request.params.depends_on_drafts:
                raise InvalidRequestError("return_receipt: the request's text may depend on what is drafted for it")
            self.fingerprint()  # here and not in a round
        prompt_ids = tuple(self.prompts.encode(request.prompt))
        key = response_key(request, prompt_ids)
        if request.params.temperature > 0 and request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=fresh_seed()))
        drafting, form = self.rounds.drafting, self._forms.form(request, prompt_ids)
        prepared = PreparedRequest(
            request,
            prompt_ids,
            time.time_ns(),
            time.monotonic(),
            resumes_kv=drafting.resumes_kv(drafting.names(request.params.drafter)),
            bad_words=self.prompts.encode_bad_words(request.params.bad_words),
            constraint=self._forms.constraint(request, form),
            form=form,
            response_key=key,
        )
        self.limits.check(request, len(prompt_ids))
        return prepared

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, which need not be whole characters; none without a tokenizer."""
        return self._forms.token_bytes(token_id)

    def close(self, timeout_s: float = math.inf) -> None:
        """Write what stores on disk wait for and all cached prefixes, the latter for so long; it is not used after."""
        self.stored_texts.close()
        self.flush(timeout_s)

    def flush(self, timeout_s: float) -> None:
        """End all sessions and write all cached prefixes to disk, for so long; another process may have that then."""
        if self.spill is not None:
            try:
                self._flush(self.spill, timeout_s)
            except Exception:
                logger.exception("the disk cache could not be flushed")

    def _flush(self, spill: Spill, timeout_s: float) -> None:
        """An engine that broke writes no state any more."""
        spill.wait_for_disk(timeout_s)
        if self.health.is_broken:
            spill.tier.close(timeout_s)
            return
        for generation in list(self.scheduler.running):
            self.endings.finish(generation, FinishReason.CANCELLED)
        for sequence_id in list(self.scheduler.sessions):
            self.close_sequence(sequence_id)
        spill.flush()

    def add(self, prepared: PreparedRequest) -> None:
        """Queue a request, or all its choices: they have outputs under `choices.choice_ids`.

        Raises UnavailableError (queue full) or InvalidRequestError (unknown sequence).
        """
        request, known, new = prepared.request, [], []
        for choice in split_choices(prepared):
            id_, arrival_ns = choice.request.request_id, choice.arrival_time_ns
            answer = self.responses.answer(choice.response_key, id_, arrival_ns)
            if answer is not None:
                known.append(answer)
            else:
                new.append(choice)
        if new:
            self.scheduler.check_room(request, len(new))
        if request.sequence_start and request.sequence_id is not None:
            self.close_sequence(request.sequence_id, SessionEnd.RESET)
        for choice in new:
            self.scheduler.enqueue(choice)
            self.responses.expect(choice.request.request_id, choice.response_key)
        for answer in known:
            self.endings.give(answer)

    def cancel(self, request_id: str) -> None:
        """End a request, or one choice of it; the next step gives its last output. An unknown id is ignored."""
        item = self.scheduler.waiting.find(request_id)
        if item is not None:
            self.scheduler.waiting.remove(item)
            self.endings.end_unstarted(item, FinishReason.CANCELLED)
            return
        for generation in self.scheduler.running:
            if generation.request.request_id == request_id:
                self.endings.finish(generation, FinishReason.CANCELLED)
                return

    def close_sequence(self, sequence_id: SequenceId, why: SessionEnd = SessionEnd.ENDED) -> None:
        """Cancel a sequence's requests and drop its state. An unknown id is ignored."""
        for request_id in self.scheduler.choices_of(sequence_id):
            self.cancel(request_id)
        session = self.scheduler.sessions.get(sequence_id)
        if session is not None:
            self.endings.close(session, why)

    def end_sequence(self, sequence_id: SequenceId) -> None:
        """Drop a sequence's state once its requests are done. An unknown id is ignored."""
        session = self.scheduler.sessions.get(sequence_id)
        if session is not None:
            session.ends = True
            self.scheduler.drop_if_over(session)

    def has_work(self) -> bool:
        return bool(self.endings or self.scheduler.waiting or self.scheduler.running)

    def sweep(self) -> int:
        """Drop sessions idle for longer than session_idle_s; returns how many."""
        return self.scheduler.sweep(time.monotonic())

    def statistics(self) -> dict[str, float]:
        """What there is now, by name; serving reports every key as a metric."""
        own = {**self.memory.statistics(), **self.stored_texts.statistics()}
        own |= self.spill.tier.statistics() if self.spill is not None else {}
        return statistics(self.scheduler, self.sizes, self.self_test, self.responses) | own

    def counters(self) -> EngineCounters:
        """What was done since the load; a copy."""
        tier = self.spill.tier if self.spill is not None else None
        return counters(
            self.rounds.counters, self.rounds.times, self.scheduler, self._starter.counters, self.responses, tier
        )

    def clear_caches(self) -> dict[str, int]:
        """Forget cached prefixes and responses; returns how many there were, by cache. Sessions keep their state."""
        cleared = {"prefix": self.scheduler.cache.clear(), "response": self.responses.clear()}
        return cleared | ({"disk": self.spill.tier.clear()} if self.spill is not None else {})

    def _count_session_end(self, why: SessionEnd) -> None:
        self.rounds.counters.ended_sessions[why] += 1

    def step(self) -> list[StepOutput]:
        """One round. An exception in it ends the round's requests with an error and leaves the others alone."""
        self.endings.end_overdue(time.monotonic())
        self._start_waiting()
        scheduled = self.scheduler.schedule()
        if scheduled:
            try:
                steps = self.rounds.run(scheduled)
            except Exception as error:
                logger.exception("a round failed")
                self.health.failed()
                for rows in scheduled:
                    self.endings.fail(rows.generation, InternalError(f"the round failed: {error}"))
            else:
                self.health.went_well()
                for rows, step in zip(scheduled, steps, strict=True):
                    if step.output is not None:
                        self.endings.publish(rows.generation, step.output)
        return self.endings.take()

    def _start_waiting(self) -> None:
        for item in self.scheduler.startable():
            try:
                self._starter.start(item)
            except TandemError as error:
                self.endings.end_unstarted(item, error=error)
            except Exception as error:
                logger.exception("a request could not be started")
                failure = InternalError(f"the request could not be started: {error}")
                self.endings.end_unstarted(item, error=failure)


def _find_device(name: str) -> torch.device:
    try:
        return kernels.find_device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {error}") from error
