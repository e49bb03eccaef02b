# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions: from its fields to a backend request, and from chunks to its answers."""

from collections.abc import Mapping
from typing import Any

import orjson

from tandem_client.gateway.answers import (
    finish_reason,
    logprob_entries,
    openai_usage,
    tandem_report,
)
from tandem_client.gateway.calls import Call
from tandem_client.gateway.errors import ApiError, invalid
from tandem_client.gateway.fields import CHAT
from tandem_client.gateway.messages import read_messages, read_tools
from tandem_client.gateway.options import GRACE_S, Caller, base_sampling, one_limit, read_stream_options
from tandem_client.gateway.streaming import DONE
from tandem_client.payload import GenerateOptions
from tandem_client.types import Chunk, Completion, ToolCallDelta


def chat_options(values: Mapping[str, Any], caller: Caller) -> GenerateOptions:
    """The backend request of a chat. Raises ApiError 400 naming the field."""
    sampling = base_sampling(CHAT, values, caller)
    sampling.setdefault("reasoning_format", "field")
    options = GenerateOptions(messages=read_messages(values["messages"]), sampling=sampling)
    if values.get("tools"):
        options["tools"] = read_tools(values["tools"])
    if "tool_choice" in values:
        options["tool_choice"] = values["tool_choice"]
    if "chat_template_kwargs" in values:
        options["chat_template_kwargs"] = values["chat_template_kwargs"]
    options["max_tokens"] = one_limit(values, "max_completion_tokens", "max_tokens")
    options["timeout_s"] = caller.timeout_s + GRACE_S
    if "top_logprobs" in values and not values.get("logprobs"):
        raise invalid("top_logprobs", "only with logprobs")
    if values.get("logprobs"):
        options["logprobs"] = values.get("top_logprobs", True)
    if values.get("return_draft_trees"):
        options["return_draft_trees"] = True
    return options


class ChatWriter:
    """Writes the answers of one chat request, streamed or whole.

    Text alone, which is nearly every chunk, is put between two halves that are written once.
    """

    def __init__(self, call: Call, values: Mapping[str, Any]) -> None:
        self._call = call
        self._head = {
            "id": f"chatcmpl-{call.request_id}",
            "created": call.started_ns // 10**9,
            "model": values["model"],
        }
        self._num_choices: int = values.get("n", 1)
        self._include_usage = read_stream_options(values)
        self._wants_logprobs = bool(values.get("logprobs"))
        self._wants_token_ids = bool(values.get("return_token_ids"))
        self._wants_trees = bool(values.get("return_draft_trees"))
        head = {"object": "chat.completion.chunk", **self._head}
        self._before = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    def begin(self) -> bytes:
        """What opens the stream."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._event(index, delta, None, {}) for index in range(self._num_choices))

    def chunk(self, chunk: Chunk) -> bytes:
        """The events of one chunk."""
        if chunk.finish_reason is None and not (chunk.tool_calls or chunk.reasoning or self._is_detailed):
            if not chunk.text:
                return b""
            choice = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
            return b"".join((self._before, choice % (chunk.choice_index, orjson.dumps(chunk.text)), self._after))
        delta: dict[str, Any] = {}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.text:
            delta["content"] = chunk.text
        if chunk.tool_calls:
            delta["tool_calls"] = [_call_delta(piece) for piece in chunk.tool_calls]
        event = b""
        if delta or chunk.token_ids:
            event = self._event(chunk.choice_index, delta, None, self._details(chunk))
        if chunk.finish_reason is not None:
            report = {"tandem": tandem_report(chunk.usage, chunk.finish_reason, self._call)}
            event += self._event(chunk.choice_index, {}, finish_reason(chunk.finish_reason), report)
        return event

    def end(self) -> bytes:
        """What closes the stream."""
        if not self._include_usage:
            return DONE
        usage = openai_usage(self._call.usages.values(), self._call.num_reasoning_tokens)
        return self._before + b'],"usage":' + orjson.dumps(usage) + b"}\n\n" + DONE

    def failed(self, error: ApiError) -> bytes:
        """What closes a stream that fails after its start."""
        return b"data: " + error.json() + b"\n\n" + DONE

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The answer that is not streamed."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, choice) for index, choice in enumerate(completion.choices)],
            "usage": openai_usage([choice.usage for choice in completion.choices], self._call.num_reasoning_tokens),
        }

    @property
    def _is_detailed(self) -> bool:
        return self._wants_logprobs or self._wants_token_ids or self._wants_trees

    def _choice(self, index: int, answer: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.tool_calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.tool_calls
            ]
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(answer) if self._wants_logprobs else None,
            "finish_reason": finish_reason(answer.finish_reason),
            "tandem": tandem_report(answer.usage, answer.finish_reason, self._call) | self._trees(answer),
            **({"token_ids": answer.token_ids} if self._wants_token_ids else {}),
        }

    def _details(self, chunk: Chunk) -> dict[str, Any]:
        details: dict[str, Any] = {}
        if self._wants_logprobs:
            details["logprobs"] = _logprobs(chunk)
        if self._wants_token_ids:
            details["token_ids"] = chunk.token_ids
        if self._wants_trees:
            details["tandem"] = self._trees(chunk)
        return details

    def _trees(self, part: Chunk | Completion) -> dict[str, Any]:
        return {"draft_trees": part.draft_trees} if self._wants_trees else {}

    def _event(self, index: int, delta: dict[str, Any], reason: str | None, more: dict[str, Any]) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return self._before + orjson.dumps(choice) + self._after


def _logprobs(part: Chunk | Completion) -> dict[str, Any]:
    return {"content": logprob_entries(part), "refusal": None}


def _call_delta(piece: ToolCallDelta) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}
