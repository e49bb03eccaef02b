# SPDX-License-Identifier: Apache-2.0
"""/v1/responses: from chunks to a response and its typed events."""

from collections.abc import Mapping
from typing import Any

import orjson

from tandem_client.gateway.answers import logprob_entries, openai_usage, tandem_report
from tandem_client.gateway.calls import Call
from tandem_client.gateway.errors import ApiError
from tandem_client.gateway.options import read_stream_options
from tandem_client.gateway.response_input import wants_logprobs
from tandem_client.types import Chunk, Completion, ToolCallDelta, Usage

_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "reasoning", "text", "user")


class ResponseWriter:
    """Writes one response, streamed or whole. Its items come one after the other: reasoning, text, calls."""

    def __init__(self, call: Call, values: Mapping[str, Any]) -> None:
        self._call, self._values = call, values
        self._wants_logprobs = wants_logprobs(values)
        read_stream_options(values)
        self._items: list[dict[str, Any]] = []  # those that are complete
        self._item: dict[str, Any] | None = None  # the one that is being written
        self._num_events = 0
        self._usage, self._reason = Usage(), ""

    def begin(self) -> bytes:
        """What opens the stream."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunk(self, chunk: Chunk) -> bytes:
        """The events of one chunk."""
        events = []
        if chunk.reasoning:
            events.append(self._switched("reasoning"))
            events.append(self._delta("response.reasoning_text.delta", "text", chunk.reasoning))
        if chunk.text:
            events.append(self._switched("message"))
            logprobs = logprob_entries(chunk) if self._wants_logprobs else []
            self._part()["logprobs"] += logprobs
            events.append(self._delta("response.output_text.delta", "text", chunk.text, logprobs=logprobs))
        events += [self._call_piece(piece) for piece in chunk.tool_calls]
        if chunk.finish_reason is not None:
            self._reason, self._usage = chunk.finish_reason, chunk.usage or Usage()
            events.append(self._closed())
        return b"".join(events)

    def end(self) -> bytes:
        """What closes the stream."""
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status))

    def failed(self, error: ApiError) -> bytes:
        """What closes a stream that fails after its start."""
        response = self._response("failed")
        response["error"] = {"code": error.code or "server_error", "message": str(error)}
        return self._event("response.failed", response=response)

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The response that is not streamed."""
        self._reason, self._usage = completion.finish_reason, completion.usage
        if completion.reasoning:
            self._items.append(self._new_item("reasoning", completion.reasoning))
        if completion.text or not completion.tool_calls:
            item = self._new_item("message", completion.text)
            item["content"][0]["logprobs"] = logprob_entries(completion) if self._wants_logprobs else []
            self._items.append(item)
        for call in completion.tool_calls:
            self._items.append(self._new_call(call.id, call.name, call.arguments))
        for item in self._items:
            item["status"] = "completed"
        return self._response(self._status())

    def _status(self) -> str:
        return "incomplete" if self._reason in ("length", "timeout", "cancelled") else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        values = self._values
        has_ended = status not in ("in_progress", "failed")
        reason = "max_output_tokens" if self._reason == "length" else self._reason
        return {
            "id": f"resp_{self._call.request_id}",
            "object": "response",
            "created_at": self._call.started_ns // 10**9,
            "status": status,
            "model": values["model"],
            "output": self._items,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "metadata": values.get("metadata", {}),
            "parallel_tool_calls": values.get("parallel_tool_calls", True),
            "tool_choice": values.get("tool_choice", "auto"),
            "tools": values.get("tools", []),
            "store": False,
            "previous_response_id": None,
            **{name: values.get(name) for name in _ECHOED},
            "usage": self._openai_usage() if has_ended else None,
            "tandem": tandem_report(self._usage, self._reason, self._call) if has_ended else None,
        }

    def _openai_usage(self) -> dict[str, Any]:
        usage = openai_usage([self._usage], self._call.num_reasoning_tokens)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _call_piece(self, piece: ToolCallDelta) -> bytes:
        events = b""
        if piece.id is not None:
            events = self._closed() + self._opened(self._new_call(piece.id, piece.name or "", ""))
        if not piece.arguments:
            return events
        assert self._item is not None
        self._item["arguments"] += piece.arguments
        return events + self._about_item("response.function_call_arguments.delta", delta=piece.arguments)

    def _switched(self, kind: str) -> bytes:
        """Events until an item of `kind` is being written."""
        if self._item is not None and self._item["type"] == kind:
            return b""
        return self._closed() + self._opened(self._new_item(kind, ""))

    def _opened(self, item: dict[str, Any]) -> bytes:
        self._item = item
        empty = {**item, "content": []} if "content" in item else item
        events = self._event("response.output_item.added", output_index=len(self._items), item=empty)
        if "content" in item:
            events += self._about_part("response.content_part.added", part=self._part())
        return events

    def _closed(self) -> bytes:
        """Events that end the item that is being written."""
        item = self._item
        if item is None:
            return b""
        item["status"] = "completed"
        if item["type"] == "function_call":
            events = self._about_item("response.function_call_arguments.done", arguments=item["arguments"])
        else:
            part = self._part()
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            events = self._about_part(f"response.{name}.done", text=part["text"], **more)
            events += self._about_part("response.content_part.done", part=part)
        events += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._item = None
        return events

    def _delta(self, name: str, field: str, text: str, **more: Any) -> bytes:
        self._part()[field] += text
        return self._about_part(name, delta=text, **more)

    def _part(self) -> dict[str, Any]:
        assert self._item is not None
        part: dict[str, Any] = self._item["content"][0]
        return part

    def _new_item(self, kind: str, text: str) -> dict[str, Any]:
        identity = f"{self._call.request_id}{len(self._items)}"
        if kind == "reasoning":
            content = [{"type": "reasoning_text", "text": text}]
            return {"id": f"rs_{identity}", "type": kind, "status": "in_progress", "summary": [], "content": content}
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {
            "id": f"msg_{identity}",
            "type": kind,
            "status": "in_progress",
            "role": "assistant",
            "content": [part],
        }

    def _new_call(self, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {
            "id": f"fc_{self._call.request_id}{len(self._items)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id,
            "name": name,
            "arguments": arguments,
        }

    def _about_part(self, kind: str, **values: Any) -> bytes:
        return self._about_item(kind, content_index=0, **values)

    def _about_item(self, kind: str, **values: Any) -> bytes:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self._items), **values)

    def _event(self, kind: str, **values: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **values}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
