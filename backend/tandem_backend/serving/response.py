# SPDX-License-Identifier: Apache-2.0
"""The answer to one request: data responses and, whatever happens, exactly one FINAL flag."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import triton_python_backend_utils as pb_utils

from tandem_backend.errors import InternalError, TandemError
from tandem_backend.serving.answer import AnswerReader, Piece
from tandem_backend.serving.answer_fields import ReasoningFormat
from tandem_backend.serving.draft_trees import DraftTreeWriter
from tandem_backend.serving.request import ResponseOptions
from tandem_backend.serving.triton_errors import FINAL, error_output, triton_error
from tandem_backend.types import FinishReason, PromptLogprob, RequestStats, StepOutput, TopLogprobs

FAILED = "error"  # the outcome of a request that got no finish reason
# vLLM's text while a request runs; its clients compare with it.
NO_FINISH_REASON = "None"
TOOL_CALLS = "tool_calls"  # the finish reason of an answer that stopped and called tools, as in the OpenAI API


TokenBytes = Callable[[int], bytes]


class Sender(Protocol):
    """Triton's response sender. Sending after FINAL raises; a client whose request never gets FINAL hangs."""

    def send(self, response: Any = None, flags: int = 0) -> None: ...

    def is_cancelled(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of a request's several choices a Responder answers."""

    index: int
    unstarted: RequestStats  # its figures where it ended before it ran


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request, or one of its choices, ended: a finish reason, or "error" and which."""

    outcome: str
    is_streaming: bool
    stats: RequestStats | None = None  # of a request that ran
    error: TandemError | None = None
    choice_index: int | None = None  # where it has several


class Responder:
    """Turns StepOutputs into responses. The engine loop's sender thread owns it once it is submitted.

    One thread for all is more than convenience: Triton server frees what is_cancelled() reads when FINAL comes, and
    crashes when both happen at once (seen with 2.51). `on_end` is told once, after the last response.
    """

    def __init__(
        self,
        sender: Sender,
        options: ResponseOptions | None = None,
        num_prompt_tokens: int = 0,
        on_end: Callable[[Ended], None] | None = None,
        *,
        error_as_output: bool = False,
        reader: AnswerReader | None = None,
        choice: Choice | None = None,
        token_bytes: TokenBytes | None = None,
        trees: DraftTreeWriter | None = None,
    ) -> None:
        self._sender, self._reader, self._choice = sender, reader, choice
        self._token_bytes, self._trees = token_bytes, trees
        self._on_end = on_end
        self._error_as_output = error_as_output
        self._options = options or ResponseOptions()
        self._num_prompt_tokens = num_prompt_tokens
        self._piece = Piece(self._options.echo)
        self._token_ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []
        self._prompt_logprobs: list[dict[str, Any] | None] = []
        self._cumulative_logprob = 0.0
        self.finished = False

    @property
    def is_streaming(self) -> bool:
        return self._options.stream

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled or gone away (about 0.1 ms: not for every round)."""
        return bool(self._sender.is_cancelled())

    def output(self, output: StepOutput) -> None:
        """Take one round's output; send it if the client streams or it is the last. Never raises."""
        if self.finished:
            return
        if output.error is not None:
            self.fail(output.error, output.stats)
            return
        try:
            self._read(output)
        except Exception as error:
            self.fail(InternalError(f"the answer could not be read: {error}"), output.stats)
            return
        self._token_ids += output.token_ids
        if self._options.return_logprobs:
            self._logprobs += _logprob_entries(output, self._token_bytes)
        self._prompt_logprobs += [_prompt_entry(entry) for entry in output.prompt_logprobs]
        for logprob in output.logprobs:  # one by one: how the tokens fell into outputs must not show in the sum
            self._cumulative_logprob += logprob
        if not output.is_last and not (self._options.stream and (self._piece.text or self._token_ids)):
            return
        ended = self._ended(output.finish_reason, output.stats) if output.finish_reason else None
        try:
            # Held here while it is sent: the stub would free a tensor that was not requested without the GIL.
            tensors = self._tensors(output)
            self._send(pb_utils.InferenceResponse(output_tensors=tensors), ended)
        except Exception as error:
            self.fail(InternalError(f"the response could not be sent: {error}"), output.stats)
        self._piece, self._token_ids, self._logprobs, self._prompt_logprobs = Piece(), [], [], []

    def _read(self, output: StepOutput) -> None:
        if self._trees is not None:
            self._trees.push(output)
        if self._reader is None:
            self._piece.text += output.text
            return
        self._piece.add(self._reader.push(output.text))
        if output.is_last:
            self._piece.add(self._reader.finish())

    def fail(self, error: TandemError, stats: RequestStats | None = None) -> None:
        """Answer with `error` and FINAL. Never raises."""
        if self.finished:
            return
        ended = self._ended(FAILED, stats, error)
        try:
            self._send(self._error_response(error), ended)
        except Exception:
            self._send_bare_final(ended)

    def _ended(self, outcome: str, stats: RequestStats | None, error: TandemError | None = None) -> Ended:
        index = self._choice.index if self._choice is not None else None
        return Ended(outcome, self.is_streaming, stats, error, index)

    def _error_response(self, error: TandemError) -> Any:
        if not self._error_as_output:
            return pb_utils.InferenceResponse(output_tensors=[], error=triton_error(error))
        return pb_utils.InferenceResponse([error_output(error)])

    def _send(self, response: Any, ended: Ended | None) -> None:
        """Send a response, the last one where the request has ended."""
        self._sender.send(response, flags=0 if ended is None else FINAL)
        if ended is not None:
            self._end(ended)

    def _end(self, ended: Ended) -> None:
        self.finished = True
        if self._on_end is not None:
            self._on_end(ended)

    def _send_bare_final(self, ended: Ended) -> None:
        """The last resort: the client at least stops waiting."""
        self._end(ended)
        try:
            self._sender.send(flags=FINAL)
        except Exception as error:
            pb_utils.Logger.log_error(f"a request could not be finished: {error}")

    def _tensors(self, output: StepOutput) -> list[Any]:
        options, reader = self._options, self._reader
        reason = output.finish_reason or NO_FINISH_REASON
        if reader is not None and reader.num_calls and reason == FinishReason.STOP:
            reason = TOOL_CALLS
        is_choice = self._choice is not None
        # Without it the token ids of several choices in one response could not be told apart.
        must_count = is_choice and options.return_token_ids
        owes_receipt = is_choice and options.return_receipt and output.is_last
        columns: list[tuple[str, bool, Any, list[Any]]] = [
            ("text_output", True, object, [self._piece.text]),
            ("finish_reason", options.return_finish_reason, object, [reason]),
            ("reasoning_content", _has_reasoning(reader), object, [self._piece.reasoning]),
            ("tool_calls", reader is not None and reader.finds_calls, object, [json.dumps(self._piece.calls)]),
            ("cumulative_logprob", options.return_cumulative_logprob, np.float32, [self._cumulative_logprob]),
            ("logprobs", options.return_logprobs, object, [json.dumps(self._logprobs)]),
            ("prompt_logprobs", bool(self._prompt_logprobs), object, [json.dumps(self._prompt_logprobs)]),
            ("num_input_tokens", options.return_num_input_tokens, np.uint32, [self._num_prompt_tokens]),
            ("num_output_tokens", options.return_num_output_tokens or must_count, np.uint32, [len(self._token_ids)]),
            ("token_ids", options.return_token_ids, np.int32, self._token_ids),
            ("receipt", output.receipt is not None or owes_receipt, object, [output.receipt or ""]),
            ("relaxed_acceptance", options.relaxed_acceptance, np.bool_, [True]),
            ("draft_trees", self._trees is not None, object, [self._trees.take() if self._trees is not None else ""]),
        ]
        stats = output.stats
        if self._choice is not None:
            columns.append(("choice_index", True, np.int32, [self._choice.index]))
            # Every choice has its element in each output.
            stats = stats or self._choice.unstarted
        if options.return_perf_metrics and output.is_last and stats is not None:
            columns += _perf_columns(stats)
            columns += [("seed", stats.seed is not None, np.uint64, [stats.seed or 0])]
        return [pb_utils.Tensor(name, np.array(data, dtype=dtype)) for name, wanted, dtype, data in columns if wanted]


def _has_reasoning(reader: AnswerReader | None) -> bool:
    return reader is not None and reader.form is not ReasoningFormat.TAGS


def _logprob_entries(output: StepOutput, token_bytes: TokenBytes | None) -> list[dict[str, Any]]:
    """One a token; the likeliest tokens beside it where the request asks for them, and the bytes of each."""
    tops: Sequence[TopLogprobs | None] = output.top_logprobs or [None] * len(output.token_ids)
    entries: list[dict[str, Any]] = [
        {"token_id": token_id, "logprob": logprob} | ({} if top is None else {"top_logprobs": _top_entries(top)})
        for token_id, logprob, top in zip(output.token_ids, output.logprobs, tops, strict=False)
    ]
    if token_bytes is not None:
        for entry in entries:
            for each in (entry, *entry.get("top_logprobs", ())):
                each["bytes"] = list(token_bytes(each["token_id"]))
    return entries


def _prompt_entry(entry: PromptLogprob | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {"token_id": entry.token_id, "logprob": entry.logprob, "top_logprobs": _top_entries(entry.top)}


def _top_entries(top: TopLogprobs) -> list[dict[str, Any]]:
    return [{"token_id": token_id, "logprob": logprob} for token_id, logprob in top]


def _perf_columns(stats: RequestStats) -> list[tuple[str, bool, Any, list[Any]]]:
    rate = stats.num_accepted_tokens / stats.num_draft_tokens if stats.num_draft_tokens else 0.0
    return [
        ("acceptance_rate", True, np.float32, [rate]),
        ("total_accepted_draft_tokens", True, np.int32, [stats.num_accepted_tokens]),
        ("total_draft_tokens", True, np.int32, [stats.num_draft_tokens]),
        ("acceptance_length", True, np.float32, [stats.acceptance_len]),
        ("num_rounds", True, np.int32, [stats.num_rounds]),
        ("is_cached_response", True, np.bool_, [stats.is_cached_response]),
        ("num_cached_tokens", True, np.int32, [stats.num_cached_tokens]),
        ("drafter_statistics", True, object, [json.dumps(_by_drafter(stats))]),
        ("arrival_time_ns", True, np.int64, [stats.arrival_time_ns]),
        ("first_scheduled_time_ns", True, np.int64, [stats.first_scheduled_time_ns]),
        ("first_token_time_ns", True, np.int64, [stats.first_token_time_ns]),
        ("last_token_time_ns", True, np.int64, [stats.last_token_time_ns]),
    ]


def _by_drafter(stats: RequestStats) -> dict[str, dict[str, float]]:
    """`share` is a drafter's part of all accepted draft tokens, 0.0 where none was."""
    total = stats.num_accepted_tokens
    return {
        name: {"drafted": drafted, "accepted": accepted, "share": accepted / total if total else 0.0}
        for name, (drafted, accepted) in stats.drafter_tokens.items()
    }
