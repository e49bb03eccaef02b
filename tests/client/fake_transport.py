# SPDX-License-Identifier: Apache-2.0
"""Transports that answer from a script and remember what they were asked."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from tandem_client.wire import InferRequest, InferResponse

Script = Sequence[InferResponse | BaseException]

FINAL = InferResponse(is_final=True)


def response(text: str = "", ids: Sequence[int] = (), reason: str = "None", **outputs: Any) -> InferResponse:
    """A data response as the backend sends it; "None" is its reason for a response that is not the last."""
    tensors = {
        "text_output": np.array([text.encode()], dtype=np.object_),
        "finish_reason": np.array([reason.encode()], dtype=np.object_),
        "token_ids": np.array(ids, dtype=np.int32),
        "num_input_tokens": np.array([7], dtype=np.uint32),
    }
    tensors |= {name: np.array([value]) for name, value in outputs.items()}
    return InferResponse(tensors)


def answer(*words: str) -> Script:
    """A whole answer, one word a response."""
    last = len(words) - 1
    return [*(response(word, [i], "stop" if i == last else "None") for i, word in enumerate(words)), FINAL]


class FakeStream:
    """A sync and async stream over a script; a cancelled one ends."""

    def __init__(self, script: Script) -> None:
        self._items = iter(script)
        self.is_cancelled = False

    def __iter__(self) -> Iterator[InferResponse]:
        return self

    def __next__(self) -> InferResponse:
        item = next(self._items)
        if isinstance(item, BaseException):
            raise item
        return item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferResponse:
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeTransport:
    """Gives the n-th request the n-th script; requests beyond the scripts get an empty final response."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.requests: list[InferRequest] = []
        self.streams: list[FakeStream] = []
        self.is_closed = False

    def send(self, request: InferRequest) -> FakeStream:
        self.requests.append(request)
        self.streams.append(FakeStream(self.scripts.pop(0) if self.scripts else [FINAL]))
        return self.streams[-1]

    def close(self) -> None:
        self.is_closed = True

    @property
    def flags(self) -> list[str]:
        """START, END and stop of every request, in short: "S", "E" and "x"."""
        return [
            "S" * request.sequence_start + "E" * request.sequence_end + "x" * ("stop" in request.payload.inputs)
            for request in self.requests
        ]


class AsyncFakeTransport(FakeTransport):
    async def close(self) -> None:  # type: ignore[override]
        self.is_closed = True
