# SPDX-License-Identifier: Apache-2.0
"""Calls: where a request of the API becomes a request of the backend, and where that ends. Nothing else sends one."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tandem_client.aio import AsyncGeneration
from tandem_client.gateway.backend import Backend
from tandem_client.gateway.conversations import ConversationAnswer
from tandem_client.gateway.errors import invalid_argument, unavailable
from tandem_client.payload import GenerateOptions
from tandem_client.types import Chunk, Usage

Generation = AsyncGeneration | ConversationAnswer

RETRY_S = 1
_NUM_LOOKS = 4  # that find nothing new in `stall_s`


@dataclass(slots=True, kw_only=True)
class Call:
    """One backend request: what it asks, who asks it, and, as it runs, what came of it."""

    endpoint: str  # "chat", "completions" or "responses"
    model: str  # the backend's name
    options: GenerateOptions
    prompt: str | None = None  # where options have neither messages nor input_ids
    key_name: str = ""  # of the caller's API key; "" without keys
    sent: frozenset[str] = frozenset()  # names of the fields that the client sent
    headers: Mapping[str, str] = field(default_factory=dict)  # lower-case names
    is_streaming: bool = False
    request_id: str = field(default_factory=lambda: uuid4().hex)
    started_ns: int = field(default_factory=time.time_ns)

    sampling_mode: str = "as_sent"  # or "greedy", or why the gateway samples: "regenerate", "loop_escape"
    sampling_values: Mapping[str, Any] = field(default_factory=dict)  # what the gateway samples with, its seed included
    digests: tuple[bytes, ...] = ()  # of the conversation, one a message; () where there is none
    usages: dict[int, Usage] = field(default_factory=dict)  # by choice, of those that ended
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by choice
    unended: dict[int, int] = field(default_factory=dict)  # output tokens by choice, of those that have not ended
    num_reasoning_tokens: int = 0  # of rounds that gave reasoning alone
    error: str | None = None  # how it failed: the exception's name; "cancelled": the client has left
    first_token_ns: int = 0
    ended_ns: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether each of its answers has ended."""
        return len(self.finish_reasons) >= ((self.options.get("sampling") or {}).get("n") or 1)

    def note(self, chunk: Chunk) -> None:
        """Take note of a chunk on its way to the client."""
        if not self.first_token_ns:
            self.first_token_ns = time.time_ns()
        if chunk.reasoning and not chunk.text:
            self.num_reasoning_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None and chunk.usage is not None:
            self.usages[chunk.choice_index] = chunk.usage
            self.finish_reasons[chunk.choice_index] = chunk.finish_reason
            self.unended.pop(chunk.choice_index, None)
        else:
            self.unended[chunk.choice_index] = self.unended.get(chunk.choice_index, 0) + len(chunk.token_ids)


class Hooks:
    """What others do at a call's three points. The defaults: as sent, a sequence of its own, nothing kept."""

    async def prepare(self, call: Call) -> None:
        """Before it is sent: the sampling decision may change `call.options` and `call.sampling_mode`."""

    def generation(self, call: Call, backend: Backend) -> Generation | None:
        """The backend request in a sequence that is chosen here; None: in one of its own."""
        return None

    def chunk(self, call: Call, chunk: Chunk) -> None:
        """Each chunk on its way to the client; it is on the per-token path, so do little."""

    def ended(self, call: Call) -> None:
        """Exactly once for each call that was prepared, however it ended."""

    async def close(self) -> None:
        """The gateway stops; the backend can still be asked."""


class Watch:
    """Closes a generation that had begun and then was silent for `stall_s`. Costs a chunk no more than additions.

    A chunk that comes is a step, and so is the client's taking it, for which nobody is to blame here.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._timer: asyncio.TimerHandle | None = None
        self.num_steps = self._num_seen = self._num_looks = 0
        self.has_stalled = False

    def begin(self, generation: Generation) -> None:
        self._num_seen = self.num_steps
        self._num_looks = 0
        self._look_later(generation)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self, generation: Generation) -> None:
        pause_s = self._stall_s / _NUM_LOOKS
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look, generation)

    def _look(self, generation: Generation) -> None:
        is_waiting_for_more = self.num_steps > 0 and self.num_steps % 2 == 0
        if not is_waiting_for_more or self.num_steps != self._num_seen:
            self.begin(generation)
            return
        self._num_looks += 1
        if self._num_looks < _NUM_LOOKS:
            self._look_later(generation)
        else:
            self.has_stalled = True
            generation.close()


class Calls:
    """Runs calls against a backend. `on_end` is told of each once, after the hooks.

    An answer that had begun and then is silent for `stall_s` ends with an error: of a stub that was killed, Triton
    server ends no stream.
    """

    def __init__(self, backend: Backend, hooks: Hooks, on_end: Callable[[Call], None], stall_s: float) -> None:
        self._backend, self._hooks, self._on_end, self._stall_s = backend, hooks, on_end, stall_s
        self._running: set[Generation] = set()
        self._has_ended = False

    def end(self) -> None:
        """End what runs, and what would begin from now on, with an error: the gateway shuts down."""
        self._has_ended = True
        for generation in self._running:
            generation.close()

    async def chunks(self, call: Call) -> AsyncGenerator[Chunk, None]:
        """The chunks of `call`. Closing it cancels the backend request. Raises TandemClientError and ApiError."""
        generation: Generation | None = None
        watch = Watch(self._stall_s)
        try:
            await self._hooks.prepare(call)
            generation = self._hooks.generation(call, self._backend)
            if generation is None:
                generation = self._alone(call)
            self._running.add(generation)
            if self._has_ended:
                generation.close()
            watch.begin(generation)
            async for chunk in generation:
                watch.num_steps += 1
                call.note(chunk)
                self._hooks.chunk(call, chunk)
                yield chunk
                watch.num_steps += 1
            if not call.is_complete:  # only the watch and `end` make it stop short without an error
                why = f"nothing came for {self._stall_s:g} s" if watch.has_stalled else "the gateway shuts down"
                raise unavailable(why, RETRY_S)
        except BaseException as error:
            call.error = "cancelled" if _is_leaving(error) else type(error).__name__
            raise
        finally:
            watch.end()
            if generation is not None:
                self._running.discard(generation)
                generation.close()
            call.ended_ns = time.time_ns()
            self._hooks.ended(call)
            self._on_end(call)

    def _alone(self, call: Call) -> AsyncGeneration:
        try:
            return self._backend.client(call.model).generate(call.prompt, **call.options)
        except (ValueError, TypeError) as error:  # values that make no request
            raise invalid_argument(str(error)) from error


def _is_leaving(error: BaseException) -> bool:
    """Whether nobody reads the answer any more: its task was cancelled or its iterator closed."""
    return not isinstance(error, Exception)
