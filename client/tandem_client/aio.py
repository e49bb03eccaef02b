# SPDX-License-Identifier: Apache-2.0
"""AsyncTandemClient: generation on asyncio over gRPC."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack

from tandem_client.answer import Answer
from tandem_client.errors import TandemClientError
from tandem_client.payload import GenerateOptions, Payload, build_payload
from tandem_client.sequence import SequenceState, one_shot
from tandem_client.transport import DEFAULT_MODEL, DEFAULT_URL, AioTransport, AsyncResponseStream, AsyncTransport
from tandem_client.types import Chunk, Completion
from tandem_client.wire import SequenceId

_LOGGER = logging.getLogger(__name__)


class AsyncGeneration(AsyncIterator[Chunk]):
    """The chunks of one request. Leaving it early (break, close(), a cancelled task) cancels the request on the server.

    Iterating raises TandemClientError; after that, and after close(), the iterator is exhausted.
    """

    def __init__(
        self,
        responses: AsyncResponseStream,
        on_accepted: Callable[[], None] | None = None,
        num_choices: int = 1,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        again: Callable[[TandemClientError], AsyncResponseStream | None] = lambda error: None,
    ) -> None:
        """again: gives the responses to take in place of an error, if any."""
        self._responses = responses
        self._again = again
        self._answer = Answer(on_accepted, num_choices, on_chunk)
        self._is_closed = False

    async def __anext__(self) -> Chunk:
        while not self._is_closed:
            try:
                response = await anext(self._responses, None)
            except (TandemClientError, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if self._is_closed and not (task and task.cancelling()):  # by close() in another task
                    break
                again = self._again(error) if isinstance(error, TandemClientError) else None
                if again is not None:
                    self._responses = again
                    continue
                self.close()
                raise
            if response is None:
                self._is_closed = True
                self._answer.finish()
            elif (chunk := self._answer.read(response)) is not None:
                return chunk
        raise StopAsyncIteration

    def close(self) -> None:
        """Cancel the request on the server unless it has ended."""
        if not self._is_closed:
            self._is_closed = True
            self._responses.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the event loop, and the connection with it, may be closed
            self.close()


class _AsyncGenerates(ABC):
    @abstractmethod
    def _start(self, payload: Payload) -> AsyncGeneration: ...

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """Send a request and iterate its answer with `async for`; give exactly one of prompt, messages and input_ids.

        With `n` above 1 the chunks of all answers come as they are made; `choice_index` says whose each is. Raises
        ValueError or TypeError naming a wrong argument; iterating raises TandemClientError.
        """
        return self._start(build_payload(prompt, **options))

    async def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer, or with `n` all of them in its `choices`; arguments and errors are those of `generate`."""
        async with self.generate(prompt, **options) as chunks:
            return Completion.from_chunks([chunk async for chunk in chunks])


class AsyncSession(_AsyncGenerates):
    """A conversation whose state stays on the server: every turn sends only what is new.

    Leaving the `async with` frees the state there and cancels a turn that still runs.
    """

    def __init__(
        self,
        transport: AsyncTransport,
        model: str,
        sequence_id: SequenceId | None = None,
        *,
        resume: bool = False,
        route: str | None = None,
    ) -> None:
        self._transport = transport
        self._sequence = SequenceState(model, sequence_id, resumes=resume, route=route)

    @property
    def sequence_id(self) -> SequenceId:
        return self._sequence.sequence_id

    @property
    def is_open(self) -> bool:
        """Whether the server keeps earlier turns; a turn that is not accepted opens no session."""
        return self._sequence.is_accepted

    def _start(self, payload: Payload) -> AsyncGeneration:
        turn = self._sequence.record(payload)

        def again(error: TandemClientError) -> AsyncResponseStream | None:
            request = self._sequence.again(turn, error)
            return None if request is None else self._transport.send(request)

        responses = self._transport.send(self._sequence.turn(payload))
        on_chunk = None if turn is None else turn.read
        return AsyncGeneration(responses, self._sequence.accept, on_chunk=on_chunk, again=again)

    async def close(self) -> None:
        """Free the state on the server; the next turn starts a new conversation.

        An error is only logged: a server that is gone, or has forgotten the sequence, has nothing to free.
        """
        request = self._sequence.end()
        if request is None:
            return
        try:
            async for _ in self._transport.send(request):
                pass
        except TandemClientError as error:
            _LOGGER.warning("session %s was not ended on the server: %s", self.sequence_id, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncTandemClient(_AsyncGenerates):
    """A client of the model `model` on the Triton server whose gRPC service is at `url` (host:port).

    Connects with the first request and belongs to the event loop of that request. `transport` replaces gRPC, in tests.
    """

    def __init__(
        self, url: str = DEFAULT_URL, model: str = DEFAULT_MODEL, *, transport: AsyncTransport | None = None
    ) -> None:
        self._transport = AioTransport(url) if transport is None else transport
        self._model = model

    def _start(self, payload: Payload) -> AsyncGeneration:
        return AsyncGeneration(self._transport.send(one_shot(self._model, payload)), num_choices=payload.num_choices)

    def session(
        self, sequence_id: SequenceId | None = None, *, resume: bool = False, route: str | None = None
    ) -> AsyncSession:
        """A conversation under `sequence_id`, or under a fresh one. Use it in an `async with`.

        resume: keep its messages here too. Where the server does not know the session any more (it was idle for too
        long, the server is another one now) the next turn sends them all, instead of raising ServerError.
        route: what a proxy chooses the server by, instead of the first sequence id.
        """
        return AsyncSession(self._transport, self._model, sequence_id, resume=resume, route=route)

    async def close(self) -> None:
        """Cancel what still runs and close the connection."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
