# SPDX-License-Identifier: Apache-2.0
"""Engine: requests in, one round after the other, outputs out. One thread drives it; only `prepare` is thread-safe."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace

import tandem_kernels as kernels

from tandem_backend.config import EngineConfig
from tandem_backend.engine.drafters.base import Drafter
from tandem_backend.engine.drafters.build import DrafterPlan, plan_drafters
from tandem_backend.engine.drafting import Drafting
from tandem_backend.engine.limits import Limits
from tandem_backend.engine.pools import IndexPool
from tandem_backend.engine.prompts import PromptEncoder
from tandem_backend.engine.round import RecordLogits, RoundRunner, Step
from tandem_backend.engine.router import Router, load_verify_curve
from tandem_backend.engine.scheduler import Scheduler, Waiting
from tandem_backend.engine.self_test import NUM_BLOCKS, NUM_SLOTS, SelfTestResult, run_self_test
from tandem_backend.engine.sequence import Generation, PreparedRequest, Session
from tandem_backend.engine.text_output import TextOutput
from tandem_backend.engine.tokenizer import Tokenizer, has_tokenizer
from tandem_backend.errors import (
    ConfigError,
    InternalError,
    SelfTestError,
    TandemError,
    UnavailableError,
)
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.state import KV_BLOCK, ModelState, allocate_state, block_bytes
from tandem_backend.types import EngineCounters, FinishReason, Request, RequestStats, SequenceId, StepOutput

logger = logging.getLogger(__name__)


class Engine:
    """Decodes many requests together; what a request gets never depends on the others."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        extra_drafters: Mapping[str, Drafter] | None = None,
        record_logits: RecordLogits | None = None,
    ) -> None:
        """Load the checkpoint and its drafters, allocate state, run the self-test. Raises ConfigError, CheckpointError.

        extra_drafters are asked beside the configured ones by requests that name them; record_logits sees the logits
        row that chose each output token.
        """
        kernels.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        self.config = config
        self.model = Decoder(config.checkpoint)
        self.tokenizer = Tokenizer(config.checkpoint) if has_tokenizer(config.checkpoint) else None
        self.max_context_len = config.max_context_len or self.model.config.max_position
        longest = self.model.config.max_position
        if self.max_context_len > longest:
            raise ConfigError(f"max_context_len: at most {longest} (the checkpoint's), got {self.max_context_len}")
        self.prompts = PromptEncoder(self.tokenizer, self.model.config.vocab_size, self.max_context_len)
        plan = plan_drafters(config, self.model, self.tokenizer)
        num_slots = max(config.max_active + config.max_sessions, NUM_SLOTS)
        num_blocks = self._num_blocks(plan, num_slots)
        drafters = {**plan.build(num_blocks, num_slots), **(extra_drafters or {})}
        router = Router(load_verify_curve(config.verify_curve), config.row_budget, always=config.router == "always")
        drafting = Drafting(drafters, plan.names, router, config.max_draft_tokens)
        state = allocate_state(self.model.config, num_blocks, num_slots)
        self.rounds = RoundRunner(self.model, state, drafting, record_logits)
        self.scheduler = Scheduler(
            config, self.max_context_len, KV_BLOCK, IndexPool(num_blocks), IndexPool(num_slots), on_free=drafting.end
        )
        self.limits = Limits(self.model.config, self.scheduler)
        self._outputs: list[StepOutput] = []
        self.self_test = self._run_self_test(state, num_blocks)

    def _run_self_test(self, state: ModelState, num_blocks: int) -> SelfTestResult | None:
        """None where the configuration skips it. Fails closed: a model that is not exact does not load."""
        if self.config.self_test_rows == 0:
            logger.warning("exactness self-test: skipped (self_test_rows is 0)")
            return None
        if num_blocks < NUM_BLOCKS:
            raise ConfigError(f"kv_cache_bytes: holds {num_blocks} KV blocks; the self-test needs {NUM_BLOCKS}")
        try:
            result = run_self_test(self.model, state, self.config.self_test_rows)
        except SelfTestError as error:
            logger.critical("exactness self-test: FAILED: %s", error)
            raise
        logger.info("exactness self-test: %d rows bit-equal in %.2f s", result.num_rows, result.seconds)
        return result

    def _num_blocks(self, plan: DrafterPlan, num_slots: int) -> int:
        """Blocks that kv_cache_bytes pays for; never more than all sequences could fill."""
        bytes_each = block_bytes(self.model.config) + plan.block_bytes()
        most = max(num_slots * -(-self.max_context_len // KV_BLOCK), NUM_BLOCKS)
        return min(self.config.kv_cache_bytes // bytes_each, most) if bytes_each else most

    def prepare(self, request: Request) -> PreparedRequest:
        """Check and tokenise a request; thread-safe. Raises InvalidRequestError naming the field."""
        prompt_ids = self.prompts.encode(request.prompt)
        prepared = PreparedRequest(request, tuple(prompt_ids), time.time_ns())
        self.limits.check(request, len(prompt_ids))
        self.rounds.drafting.names(request.params.drafter)
        return prepared

    def add(self, prepared: PreparedRequest) -> None:
        """Queue a request. Raises UnavailableError (queue full) or InvalidRequestError (unknown sequence)."""
        request = prepared.request
        self.scheduler.check_queue()
        if request.sequence_start and request.sequence_id is not None:
            self.close_sequence(request.sequence_id)
        self.scheduler.enqueue(prepared)

    def cancel(self, request_id: str) -> None:
        """End a request; the next step gives its last output. An unknown id is ignored."""
        for item in self.scheduler.waiting:
            if item.prepared.request.request_id == request_id:
                self.scheduler.waiting.remove(item)
                self._end_unstarted(item, StepOutput(request_id=request_id, finish_reason=FinishReason.CANCELLED))
                return
        for generation in self.scheduler.running:
            if generation.request.request_id == request_id:
                self._finish(generation, StepOutput(request_id=request_id, finish_reason=FinishReason.CANCELLED))
                return

    def close_sequence(self, sequence_id: SequenceId) -> None:
        """Cancel a sequence's requests and drop its state. An unknown id is ignored."""
        session = self.scheduler.sessions.get(sequence_id)
        if session is None:
            return
        for item in [item for item in self.scheduler.waiting if item.session is session]:
            self.cancel(item.prepared.request.request_id)
        if session.running is not None:
            self.cancel(session.running.request.request_id)
        self.scheduler.drop_session(session)

    def end_sequence(self, sequence_id: SequenceId) -> None:
        """Drop a sequence's state once its requests are done. An unknown id is ignored."""
        session = self.scheduler.sessions.get(sequence_id)
        if session is not None:
            session.ends = True
            self.scheduler.drop_if_over(session)

    def has_work(self) -> bool:
        return bool(self._outputs or self.scheduler.waiting or self.scheduler.running)

    def sweep(self) -> int:
        """Drop sessions idle for longer than session_idle_s; returns how many."""
        return self.scheduler.sweep(time.monotonic())

    def statistics(self) -> dict[str, float]:
        """What there is now, by name; serving reports every key as a metric."""
        s = self.scheduler
        return {
            "num_active": len(s.running),
            "num_queued": len(s.waiting),
            "num_sessions": len(s.sessions),
            "num_blocks": s.blocks.size,
            "num_free_blocks": s.blocks.num_free,
            "num_slots": s.slots.size,
            "num_free_slots": s.slots.num_free,
            "self_test_passed": int(self.self_test is not None),  # 0: skipped; an engine that fails it does not load
            "self_test_rows": self.self_test.num_rows if self.self_test is not None else 0,
        }

    def counters(self) -> EngineCounters:
        """What was done since the load; a copy."""
        counters = self.rounds.counters
        return replace(counters, drafter_tokens=dict(counters.drafter_tokens))

    def step(self) -> list[StepOutput]:
        """One round. An exception in it ends the round's requests with an error and leaves the others alone."""
        for item in self.scheduler.startable():
            try:
                self._start(item)
            except TandemError as error:
                self._end_unstarted(item, StepOutput(request_id=item.prepared.request.request_id, error=error))
            except Exception as error:
                logger.exception("a request could not be started")
                failure = InternalError(f"the request could not be started: {error}")
                self._end_unstarted(item, StepOutput(request_id=item.prepared.request.request_id, error=failure))
        scheduled = self.scheduler.schedule()
        if scheduled:
            try:
                steps = self.rounds.run(scheduled)
            except Exception as error:
                logger.exception("a round failed")
                for rows in scheduled:
                    self._fail(rows.generation, InternalError(f"the round failed: {error}"))
            else:
                for rows, step in zip(scheduled, steps, strict=True):
                    self._publish(rows.generation, step)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _publish(self, generation: Generation, step: Step) -> None:
        if step.output is None:
            return
        if step.output.is_last:
            self._finish(generation, step.output)
        else:
            self._outputs.append(step.output)

    def _start(self, item: Waiting) -> None:
        """Turn a queued request into a running one: its tokens, memory and stop rules."""
        request, session = item.prepared.request, item.session
        if session is not None and self.scheduler.sessions.get(session.sequence_id) is not session:
            raise UnavailableError(
                f"sequence {session.sequence_id!r} was dropped for memory while this turn waited; "
                "send sequence_start with the whole conversation"
            )
        kept = session.sequence if session is not None else None
        token_ids = list(item.prepared.prompt_ids)
        if session is not None and kept is not None:
            token_ids = self.prompts.continue_session(session, kept.token_ids, request.prompt)
        self.limits.check(request, len(token_ids))
        sequence = kept if kept is not None else self.scheduler.new_sequence()
        if kept is None or token_ids[: len(kept.token_ids)] != kept.token_ids:
            sequence.num_computed = 0
            self.rounds.state.clear_slot(sequence.slot)
            self.rounds.drafting.begin(sequence.slot)
        sequence.token_ids = token_ids
        max_tokens = min(self.scheduler.max_tokens(item.prepared), self.max_context_len - len(token_ids))
        self.scheduler.reserve(sequence, len(token_ids) + max_tokens)
        stats = RequestStats(
            num_prompt_tokens=len(token_ids),
            num_cached_tokens=sequence.num_computed,
            arrival_time_ns=item.prepared.arrival_time_ns,
            first_scheduled_time_ns=time.time_ns(),
        )
        text = None
        if self.tokenizer is not None:
            text = TextOutput(self.tokenizer, request.params.stop, include_stop=request.params.include_stop)
        generation = Generation(
            item.prepared,
            sequence,
            max_tokens,
            self.limits.stop_ids(request),
            text,
            session,
            stats,
            self.rounds.drafting.names(request.params.drafter),
        )
        if session is not None:
            session.sequence, session.running = sequence, generation
            _remember_prompt(session, request, is_first=kept is None)
        self.scheduler.running.append(generation)

    def _end_unstarted(self, item: Waiting, output: StepOutput) -> None:
        """Give the last output of a request that never ran; an END still ends its session."""
        self._outputs.append(output)
        if item.session is not None:
            self.scheduler.drop_if_over(item.session)

    def _finish(self, generation: Generation, output: StepOutput) -> None:
        """Give a request's last output and hand its state to its session, if it has one."""
        session = generation.session
        if session is not None and session.messages is not None and generation.text is not None:
            session.messages = [*session.messages, {"role": "assistant", "content": generation.text.text}]
        self.scheduler.finish(generation)
        self._outputs.append(replace(output, stats=generation.stats))

    def _fail(self, generation: Generation, error: TandemError) -> None:
        """End a request whose state can't be trusted any more: its session goes too."""
        session = generation.session
        self._finish(generation, StepOutput(request_id=generation.request.request_id, error=error))
        if session is not None and session.sequence is not None:
            self.close_sequence(session.sequence_id)


def _remember_prompt(session: Session, request: Request, *, is_first: bool) -> None:
    """Keep the conversation as messages while every turn comes so; it is rendered again as a whole next turn."""
    if request.prompt.messages is None:
        session.messages = None
    elif is_first:
        session.messages = list(request.prompt.messages)
    elif session.messages is not None:
        session.messages = [*session.messages, *request.prompt.messages]
