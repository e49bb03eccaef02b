# SPDX-License-Identifier: Apache-2.0
"""From requests to rows of the journal: middleware around everything, so that refused requests have a row too."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem_client.gateway.calls import Call
from tandem_client.gateway.errors import CLIENT_CLOSED
from tandem_client.gateway.fields import CHAT, COMPLETIONS, RESPONSES
from tandem_client.gateway.journal_file import JournalRow
from tandem_client.types import Chunk, Usage

_ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS, "/v1/responses": RESPONSES}
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_COUNTS = ("num_draft_tokens", "num_accepted_tokens", "num_rounds")


@dataclass(slots=True)
class Exchanged:
    """What is noted of a request while it runs. It may be of several calls, one a prompt."""

    calls: list[Call] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)  # of the first choice of the first call, where texts are kept


_CURRENT: ContextVar[Exchanged | None] = ContextVar("exchanged", default=None)


def note_call(call: Call) -> None:
    """A call belongs to the request whose task this is."""
    exchanged = _CURRENT.get()
    if exchanged is not None:
        exchanged.calls.append(call)


def note_chunk(call: Call, chunk: Chunk) -> None:
    """A chunk whose text the journal shall have."""
    exchanged = _CURRENT.get()
    if exchanged is not None and call is exchanged.calls[0] and chunk.choice_index == 0:
        exchanged.chunks.append(chunk)


class JournalMiddleware:
    """Hands a row to `write` for each generating request, when its last byte is sent."""

    def __init__(self, app: ASGIApp, write: Callable[[JournalRow], None], keep_text: bool) -> None:
        self._app, self._write, self._keep_text = app, write, keep_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _ENDPOINTS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        status, started_s, arrived = 500, time.monotonic(), time.time()

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        exchanged = Exchanged()
        token = _CURRENT.set(exchanged)
        try:
            await self._app(scope, receive, sent)
        finally:
            _CURRENT.reset(token)
            caller = scope.get("state", {}).get("caller")
            texts = _texts(exchanged) if self._keep_text else {}
            row = JournalRow(
                time=arrived,
                key=getattr(caller, "key_name", ""),
                endpoint=_ENDPOINTS[scope["path"]],
                status=CLIENT_CLOSED if any(call.error == "cancelled" for call in exchanged.calls) else status,
                request_s=time.monotonic() - started_s,
                **_of_calls(exchanged.calls),
                **texts,
            )
            self._write(row)


def _of_calls(calls: Sequence[Call]) -> dict[str, Any]:
    """Columns that tell of the calls; there is none where the request was refused."""
    if not calls:
        return {}
    first = calls[0]
    usages = [usage for call in calls for usage in call.usages.values()]
    sampling = {name: value for name, value in _sampling(first).items() if name in _SAMPLING}
    usage = first.usages.get(0, Usage())
    return {
        "request_id": first.request_id,
        "model": first.model,
        "is_streaming": first.is_streaming,
        "error": next((call.error for call in calls if call.error), None),
        "finish_reason": first.finish_reasons.get(0),
        "sampling_mode": first.sampling_mode,
        "seed": usage.seed,
        "sampling": json.dumps(sampling) if sampling else None,
        "num_choices": max(len(usages), 1),
        "num_prompt_tokens": sum(_prompt_tokens(calls, "num_input_tokens")),
        "num_cached_tokens": sum(_prompt_tokens(calls, "num_cached_tokens")),
        "num_output_tokens": sum(item.num_output_tokens for item in usages) + sum(_unended_tokens(calls)),
        **{name: sum(getattr(item, name) for item in usages) for name in _COUNTS},
        "queue_s": _seconds(usage.first_scheduled_time_ns, usage.arrival_time_ns),
        "first_token_s": _seconds(first.first_token_ns, first.started_ns),
    }


def _sampling(call: Call) -> Mapping[str, Any]:
    return call.options.get("sampling") or {}


def _prompt_tokens(calls: Sequence[Call], name: str) -> Iterator[int]:
    """A prompt counts once, however many choices it has."""
    return (max((getattr(usage, name) for usage in call.usages.values()), default=0) for call in calls)


def _unended_tokens(calls: Sequence[Call]) -> Iterator[int]:
    """What was written before the client left, or an error came: the backend reports no counts then."""
    return (count for call in calls for count in call.unended.values())


def _seconds(end_ns: int, start_ns: int) -> float | None:
    return (end_ns - start_ns) / 1e9 if end_ns and start_ns else None


def _texts(exchanged: Exchanged) -> dict[str, Any]:
    """Prompt and answer as JSON."""
    if not exchanged.calls:
        return {}
    call = exchanged.calls[0]
    prompt = call.options.get("messages") or call.prompt or call.options.get("input_ids")
    return {"prompt_text": json.dumps(prompt), "answer_text": json.dumps(_answer(exchanged.chunks))}


def _answer(chunks: Sequence[Chunk]) -> dict[str, Any]:
    calls: dict[int, dict[str, str]] = {}
    for delta in (delta for chunk in chunks for delta in chunk.tool_calls):
        call = calls.setdefault(delta.index, {"name": delta.name or "", "arguments": ""})
        call["arguments"] += delta.arguments
    answer = {
        "content": "".join(chunk.text for chunk in chunks),
        "reasoning_content": "".join(chunk.reasoning for chunk in chunks),
        "tool_calls": list(calls.values()),
    }
    return {name: value for name, value in answer.items() if value}
