# SPDX-License-Identifier: Apache-2.0
"""/v1/completions: one or several prompts without a chat template, and the answers to them."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from tandem_client.gateway.answers import finish_reason, joined_usage, legacy_logprobs, tandem_report
from tandem_client.gateway.calls import Call
from tandem_client.gateway.errors import ApiError, invalid
from tandem_client.gateway.fields import COMPLETIONS
from tandem_client.gateway.options import GRACE_S, Caller, base_sampling, read_stream_options
from tandem_client.gateway.streaming import DONE
from tandem_client.payload import GenerateOptions
from tandem_client.types import Chunk, Completion

MAX_PROMPTS = 16
_END = None


def read_prompts(values: Mapping[str, Any]) -> list[str] | list[list[int]]:
    """Every prompt of the request. Raises ApiError 400."""
    prompt = values["prompt"]
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "must not be empty")
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"may be up to {MAX_PROMPTS} prompts, got {len(prompt)}")
    return list(prompt)


def completion_options(
    values: Mapping[str, Any], prompt: str | list[int], caller: Caller
) -> tuple[str | None, GenerateOptions]:
    """The backend request of one prompt: its text, or None, and the options. Raises ApiError 400 naming the field."""
    if values.get("echo") and ("logprobs" in values or not isinstance(prompt, str)):
        raise invalid("echo", "only of text prompts and without logprobs")
    options = GenerateOptions(sampling=base_sampling(COMPLETIONS, values, caller))
    options["max_tokens"] = values.get("max_tokens")
    options["timeout_s"] = caller.timeout_s + GRACE_S
    if "logprobs" in values:
        options["logprobs"] = values["logprobs"]
    if isinstance(prompt, str):
        return prompt, options
    options["input_ids"] = prompt
    return None, options


class CompletionWriter:
    """Writes the answers of one request: choice k of prompt i has the index i * n + k."""

    def __init__(self, calls: Sequence[Call], values: Mapping[str, Any]) -> None:
        self._calls = calls
        first = calls[0]
        self._head = {
            "id": f"cmpl-{first.request_id}",
            "object": "text_completion",
            "created": first.started_ns // 10**9,
            "model": values["model"],
        }
        self._num_choices: int = values.get("n", 1)
        self._include_usage = read_stream_options(values)
        self._echo = bool(values.get("echo"))
        self._wants_logprobs = "logprobs" in values
        self._wants_token_ids = bool(values.get("return_token_ids"))
        self._before = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        self._offsets: dict[int, int] = {}  # characters written of each choice

    def begin(self) -> bytes:
        """The prompts, where they are asked for."""
        if not self._echo:
            return b""
        indices = range(len(self._calls) * self._num_choices)
        return b"".join(self._event({"index": index, "text": self._prefix(index)}) for index in indices)

    def chunk(self, chunk: Chunk) -> bytes:
        """The event of one chunk."""
        index = chunk.choice_index
        if chunk.finish_reason is None and not (self._wants_logprobs or self._wants_token_ids):
            text = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'
            return b"".join((self._before, text % (index, orjson.dumps(chunk.text)), self._after))
        choice: dict[str, Any] = {"index": index, "text": chunk.text, **self._details(index, chunk)}
        if chunk.finish_reason is not None:
            choice["finish_reason"] = finish_reason(chunk.finish_reason)
            choice["tandem"] = tandem_report(chunk.usage, chunk.finish_reason, self._call(index))
        return self._event(choice)

    def end(self) -> bytes:
        """What closes the stream."""
        if not self._include_usage:
            return DONE
        return self._before + b'],"usage":' + orjson.dumps(joined_usage(self._calls)) + b"}\n\n" + DONE

    def failed(self, error: ApiError) -> bytes:
        """What closes a stream that fails after its start."""
        return b"data: " + error.json() + b"\n\n" + DONE

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [
            {
                "index": index,
                "text": self._prefix(index) + answer.text,
                "logprobs": None,
                **self._details(index, answer),
                "finish_reason": finish_reason(answer.finish_reason),
                "tandem": tandem_report(answer.usage, answer.finish_reason, self._call(index)),
            }
            for index, answer in enumerate(completion.choices)
        ]
        return {**self._head, "choices": choices, "usage": joined_usage(self._calls)}

    def _call(self, index: int) -> Call:
        return self._calls[index // self._num_choices]

    def _prefix(self, index: int) -> str:
        return (self._call(index).prompt or "") if self._echo else ""

    def _details(self, index: int, part: Chunk | Completion) -> dict[str, Any]:
        details: dict[str, Any] = {}
        if self._wants_logprobs:
            offset = self._offsets.get(index, 0)
            details["logprobs"] = legacy_logprobs(part, offset)
            self._offsets[index] = offset + len(part.text)
        if self._wants_token_ids:
            details["token_ids"] = part.token_ids
        return details

    def _event(self, choice: dict[str, Any]) -> bytes:
        return self._before + orjson.dumps({"logprobs": None, "finish_reason": None, **choice}) + self._after


async def merged(sources: Sequence[AsyncGenerator[Chunk, None]], width: int) -> AsyncGenerator[Chunk, None]:
    """The chunks of several requests as they come; choice k of source i gets the index i * `width` + k.

    The first that fails ends them all with its error.
    """
    arrived: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue(maxsize=len(sources))

    async def pump(first: int, source: AsyncGenerator[Chunk, None]) -> None:
        try:
            async for chunk in source:
                await arrived.put(replace(chunk, choice_index=first + chunk.choice_index))
            await arrived.put(_END)
        except Exception as error:
            await arrived.put(error)
        finally:
            await source.aclose()

    pumps = [asyncio.create_task(pump(index * width, source)) for index, source in enumerate(sources)]
    num_open = len(pumps)
    try:
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is _END:
                num_open -= 1
            else:
                yield item
    finally:
        for each in pumps:
            each.cancel()
        await asyncio.wait(pumps)
