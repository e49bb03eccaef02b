# SPDX-License-Identifier: Apache-2.0
"""Answers the requests of a record, in this process or on a server, all of them at once."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tandem_client import Completion, TandemClient, TandemClientError
from tandem_client.transport import GrpcTransport, ResponseStream
from tandem_client.wire import InferRequest

from tandem_backend.config import EngineConfig
from tandem_backend.engine import Engine, PreparedRequest
from tandem_backend.engine.tools import make_parser, read_tools
from tandem_backend.errors import TandemError
from tandem_backend.types import FinishReason, Prompt, Request, SamplingParams, StepOutput, ToolChoice
from tandem_backend.verification.comparison import float_bits
from tandem_backend.verification.records import Answer, RecordedRequest


def answer_in_process(checkpoint: Path, requests: Sequence[RecordedRequest]) -> list[Answer]:
    """With the engine as it is configured by default; there is no streaming to tell apart. Raises TandemError."""
    engine = Engine(EngineConfig(checkpoint=checkpoint))
    prepared = [engine.prepare(_engine_request(request)) for request in requests]
    for item in prepared:
        engine.add(item)
    outputs: dict[str, list[StepOutput]] = {request.name: [] for request in requests}
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise TandemError(f"request {output.request_id!r}: {output.error}")
            outputs[output.request_id].append(output)
    return [_join(item, outputs[item.request.request_id]) for item in prepared]


def answer_by_server(url: str, requests: Sequence[RecordedRequest]) -> list[Answer]:
    """Through gRPC, a thread a request. Raises TandemError naming the request that failed."""
    transport = GrpcTransport(url)
    with (
        TandemClient(transport=transport) as streaming,
        TandemClient(transport=_WholeAnswers(url)) as whole,
        ThreadPoolExecutor(len(requests)) as threads,
    ):
        clients = [streaming if request.stream else whole for request in requests]
        return list(threads.map(_ask, clients, requests))


class _WholeAnswers(GrpcTransport):
    """Sends what the client means to stream as requests for one response."""

    def send(self, request: InferRequest) -> ResponseStream:
        inputs = {**request.payload.inputs, "stream": np.array([False]), "exclude_input_in_output": np.array([True])}
        return super().send(replace(request, payload=replace(request.payload, inputs=inputs)))


def _ask(client: TandemClient, request: RecordedRequest) -> Answer:
    try:
        completion: Completion = client.complete(
            request.prompt,
            messages=request.messages,
            tools=request.tools,
            enable_thinking=request.enable_thinking,
            max_tokens=request.max_tokens,
            stop=request.stop or None,
            logprobs=True,
            sampling={"min_tokens": request.min_tokens, "ignore_eos": request.ignore_eos},
        )
    except TandemClientError as error:
        raise TandemError(f"request {request.name!r}: {error}") from error
    return Answer(
        finish_reason=completion.finish_reason,
        text=completion.text,
        token_ids=list(completion.token_ids),
        logprobs=[float_bits(value).hex() for value in completion.logprobs or ()],
        tool_calls=[(call.name, call.arguments) for call in completion.tool_calls],
    )


def _engine_request(request: RecordedRequest) -> Request:
    thinking: Mapping[str, Any] = {}
    if request.enable_thinking is not None:
        thinking = {"enable_thinking": request.enable_thinking}
    prompt = Prompt(
        text=request.prompt,
        messages=None if request.messages is None else tuple(request.messages),
        tools=None if request.tools is None else tuple(request.tools),
        template_kwargs=thinking,
    )
    params = SamplingParams(
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        stop=tuple(request.stop),
        ignore_eos=request.ignore_eos,
        tool_choice=ToolChoice() if request.tools else None,
    )
    return Request(request_id=request.name, prompt=prompt, params=params)


def _join(prepared: PreparedRequest, outputs: Sequence[StepOutput]) -> Answer:
    text, reason = "".join(output.text for output in outputs), str(outputs[-1].finish_reason)
    calls: dict[int, tuple[str, str]] = {}
    if prepared.form.tool_format is not None and prepared.request.prompt.tools:
        parser = make_parser(prepared.form.tool_format, read_tools(prepared.request.prompt.tools))
        parts = [parser.push(text), parser.finish()]
        text = "".join(part.content for part in parts)
        for delta in (delta for part in parts for delta in part.calls):
            name, arguments = calls.get(delta.index, (delta.name or "", ""))
            calls[delta.index] = (name, arguments + delta.arguments)
        if calls and reason == FinishReason.STOP:
            reason = "tool_calls"  # as the server says it
    return Answer(
        finish_reason=reason,
        text=text,
        tool_calls=list(calls.values()),
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=[float_bits(value).hex() for output in outputs for value in output.logprobs],
    )
