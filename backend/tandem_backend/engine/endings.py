# SPDX-License-Identifier: Apache-2.0
"""Endings: every request's last output, and what becomes of the session behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tandem_backend.engine.cache.responses import ResponseCache
from tandem_backend.engine.fingerprint import Fingerprint
from tandem_backend.engine.queue import Waiting
from tandem_backend.engine.receipts import make_receipt
from tandem_backend.engine.scheduler import Scheduler
from tandem_backend.engine.sequence import Generation, Session
from tandem_backend.engine.suffix_store import StoredTexts
from tandem_backend.errors import InternalError, TandemError, UnavailableError
from tandem_backend.types import FinishReason, SessionEnd, StepOutput


@dataclass(slots=True)
class Endings:
    """Collects the outputs of a round; what ends between two rounds is given out with the next."""

    scheduler: Scheduler
    stored_texts: StoredTexts
    responses: ResponseCache
    fingerprint: Callable[[], Fingerprint]  # for receipts
    _outputs: list[StepOutput] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._outputs)

    def take(self) -> list[StepOutput]:
        outputs, self._outputs = self._outputs, []
        self.responses.watch(outputs)
        return outputs

    def give(self, known: StepOutput) -> None:
        """A whole answer that was there before the request."""
        self._outputs.append(known)

    def publish(self, generation: Generation, output: StepOutput) -> None:
        """A round's output; the last one hands the request's state to its session, if it has one."""
        if generation.trail is not None:
            generation.trail.add(output.token_ids, output.logprobs)
        if not output.is_last:
            self._outputs.append(output)
            return
        if generation.trail is not None and output.finish_reason is not None:
            receipt = make_receipt(generation, generation.trail, output.finish_reason, self.fingerprint())
            output = replace(output, receipt=receipt.dump())
        if output.error is None:
            token_ids, stats = generation.sequence.token_ids, generation.stats
            self.stored_texts.add(token_ids, stats.num_cached_tokens, generation.num_output)
        self.scheduler.finish(generation)
        self._outputs.append(replace(output, stats=generation.stats))

    def finish(self, generation: Generation, reason: FinishReason, text: str = "") -> None:
        request_id = generation.request.request_id
        self.publish(generation, StepOutput(request_id=request_id, text=text, finish_reason=reason))

    def fail(self, generation: Generation, error: TandemError) -> None:
        """End a request whose state can't be trusted any more: its session goes too."""
        session = generation.session
        generation.sequence.is_sound = False
        self.publish(generation, StepOutput(request_id=generation.request.request_id, error=error))
        if session is not None:
            self._lose_session(session, InternalError(_lost(session, str(error))))

    def end_unstarted(
        self, item: Waiting, reason: FinishReason | None = None, error: TandemError | None = None
    ) -> None:
        """End a request that never ran and is off the queue; an END still ends its session."""
        request, session = item.prepared.request, item.session
        self._outputs.append(StepOutput(request_id=request.request_id, finish_reason=reason, error=error))
        if session is None or self.scheduler.drop_if_over(session):
            return
        if request.sequence_start:
            self._lose_session(session, UnavailableError(_lost(session, "its first turn never ran")))

    def close(self, session: Session, why: SessionEnd) -> None:
        """Cancel a session's requests and drop its state."""
        self._end_turns(self.scheduler.waiting.take_turns(session), FinishReason.CANCELLED, None)
        if session.running is not None:
            self.finish(session.running, FinishReason.CANCELLED)
        self.scheduler.drop_session(session, why)

    def end_overdue(self, now_s: float) -> None:
        """End what has waited or run for too long by time.monotonic()."""
        for item in self.scheduler.waiting.take_overdue(now_s):
            if item.prepared.deadline_s <= now_s:
                self.end_unstarted(item, FinishReason.TIMEOUT)
            else:
                text = f"queue_timeout_s: waited for {self.scheduler.config.queue_timeout_s:g} s"
                hint = self.scheduler.waiting.retry_after_s(len(self.scheduler.running))
                self.end_unstarted(item, error=UnavailableError(text, retry_after_s=hint))
        for generation in [g for g in self.scheduler.running if g.prepared.deadline_s <= now_s]:
            self.finish(generation, FinishReason.TIMEOUT, text=generation.flush())

    def _lose_session(self, session: Session, error: TandemError) -> None:
        """Drop a session that has nothing its next turns could continue; those that wait end with `error`."""
        self._end_turns(self.scheduler.waiting.take_turns(session), None, error)
        self.scheduler.drop_session(session, SessionEnd.FAILED)

    def _end_turns(self, turns: Sequence[Waiting], reason: FinishReason | None, error: TandemError | None) -> None:
        for item in turns:
            request_id = item.prepared.request.request_id
            self._outputs.append(StepOutput(request_id=request_id, finish_reason=reason, error=error))


def _lost(session: Session, why: str) -> str:
    return f"sequence {session.sequence_id!r} is lost: {why}; send sequence_start with the whole conversation"
