# SPDX-License-Identifier: Apache-2.0
"""An engine whose outputs are written down beforehand: the contract of `tandem_backend.engine` without a model."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem_backend.engine.answer_form import AnswerForm
from tandem_backend.engine.choices import choice_ids
from tandem_backend.engine.health import Health
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import EngineCounters, FinishReason, Request, SequenceId, StepOutput

# A step that raises it fails as a whole, as an engine bug would.
Script = Sequence[StepOutput | Exception]


@dataclass(frozen=True, slots=True)
class FakePrepared:
    request: Request
    num_prompt_tokens: int
    form: AnswerForm = field(default_factory=AnswerForm)


def chunk(text: str = "", *, finish_reason: FinishReason | None = None, **values: object) -> StepOutput:
    """One scripted output: a token per word, each with logprob -0.5."""
    num_tokens = len(text.split())
    fields = {"token_ids": tuple(range(num_tokens)), "logprobs": (-0.5,) * num_tokens} | values
    return StepOutput(request_id="", text=text, finish_reason=finish_reason, **fields)


class ScriptedEngine:
    """Plays the script named by a request's prompt text, one output a step, and the same for each of its choices.

    A script without a last output runs until it is cancelled.
    """

    tokenizer = None

    def __init__(self, scripts: Mapping[str, Script]) -> None:
        self.scripts = scripts
        self.requests: dict[str, Request] = {}
        self.sessions: set[SequenceId] = set()
        self.num_sweeps = 0
        self.is_closed = False
        self.num_flushes = 0
        self.num_rounds = 0
        self._left: dict[str, list[StepOutput | Exception]] = {}
        self._cancelled: set[str] = set()
        self.health = Health(max_failed_rounds=3)

    def flush(self, timeout_s: float) -> None:
        assert not self.has_work()
        self.num_flushes += 1

    def close(self, timeout_s: float) -> None:
        self.is_closed = True

    def prepare(self, request: Request) -> FakePrepared:
        if not request.prompt.text:
            raise InvalidRequestError("text_input: must not be empty")
        return FakePrepared(request, len(request.prompt.text.split()))

    def add(self, prepared: FakePrepared) -> None:
        request = prepared.request
        if request.sequence_id is not None:
            if not request.sequence_start and request.sequence_id not in self.sessions:
                raise InvalidRequestError(f"sequence_id: {request.sequence_id} is not known, send START")
            self.sessions.add(request.sequence_id)
        for request_id in choice_ids(request):
            self.requests[request_id] = request
            self._left[request_id] = list(self.scripts[request.prompt.text])

    def cancel(self, request_id: str) -> None:
        if request_id in self._left:
            self._cancelled.add(request_id)

    def close_sequence(self, sequence_id: SequenceId) -> None:
        self.sessions.discard(sequence_id)
        for request_id in self._left:
            if self.requests[request_id].sequence_id == sequence_id:
                self.cancel(request_id)

    def end_sequence(self, sequence_id: SequenceId) -> None:
        self.sessions.discard(sequence_id)

    def clear_caches(self) -> dict[str, int]:
        return {"prefix": 3, "response": 1}

    def has_work(self) -> bool:
        return bool(self._left)

    def step(self) -> list[StepOutput]:
        time.sleep(0.001)
        self.num_rounds += 1
        outputs = []
        for request_id, script in list(self._left.items()):
            if request_id in self._cancelled:
                outputs.append(StepOutput(request_id=request_id, finish_reason=FinishReason.CANCELLED))
            elif script:
                item = script.pop(0)
                if isinstance(item, Exception):
                    raise item
                outputs.append(replace(item, request_id=request_id))
        for output in outputs:
            if output.is_last:
                del self._left[output.request_id]
                self._cancelled.discard(output.request_id)
        return outputs

    def sweep(self) -> int:
        self.num_sweeps += 1
        return 0

    def statistics(self) -> dict[str, float]:
        return {"num_active": len(self._left)}

    def counters(self) -> EngineCounters:
        return EngineCounters(num_rounds=self.num_rounds)
