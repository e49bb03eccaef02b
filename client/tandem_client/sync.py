# SPDX-License-Identifier: Apache-2.0
"""TandemClient: blocking generation over gRPC."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, Unpack

from tandem_client.answer import Answer
from tandem_client.errors import TandemClientError
from tandem_client.payload import GenerateOptions, Payload, build_payload
from tandem_client.sequence import SequenceState, one_shot
from tandem_client.transport import DEFAULT_MODEL, DEFAULT_URL, GrpcTransport, ResponseStream, Transport
from tandem_client.types import Chunk, Completion
from tandem_client.wire import SequenceId

_LOGGER = logging.getLogger(__name__)


class Generation(Iterator[Chunk]):
    """The chunks of one request. Leaving it early (break, close(), leaving a `with`) cancels the request on the server.

    Iterating raises TandemClientError; after that, and after close(), the iterator is exhausted.
    """

    def __init__(
        self,
        responses: ResponseStream,
        on_accepted: Callable[[], None] | None = None,
        num_choices: int = 1,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        again: Callable[[TandemClientError], ResponseStream | None] = lambda error: None,
    ) -> None:
        """again: gives the responses to take in place of an error, if any."""
        self._responses = responses
        self._again = again
        self._answer = Answer(on_accepted, num_choices, on_chunk)
        self._is_closed = False

    def __next__(self) -> Chunk:
        while not self._is_closed:
            try:
                response = next(self._responses, None)
            except TandemClientError as error:
                if self._is_closed:  # by close() in another thread
                    break
                again = self._again(error)
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
        raise StopIteration

    def close(self) -> None:
        """Cancel the request on the server unless it has ended; may be called from another thread."""
        if not self._is_closed:
            self._is_closed = True
            self._responses.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Generates(ABC):
    @abstractmethod
    def _start(self, payload: Payload) -> Generation: ...

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Send a request and iterate its answer; give exactly one of prompt, messages and input_ids.

        With `n` above 1 the chunks of all answers come as they are made; `choice_index` says whose each is. Raises
        ValueError or TypeError naming a wrong argument; iterating raises TandemClientError.
        """
        return self._start(build_payload(prompt, **options))

    def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer, or with `n` all of them in its `choices`; arguments and errors are those of `generate`."""
        with self.generate(prompt, **options) as chunks:
            return Completion.from_chunks(chunks)


class Session(_Generates):
    """A conversation whose state stays on the server: every turn sends only what is new.

    Leaving the `with` frees the state there and cancels a turn that still runs.
    """

    def __init__(
        self,
        transport: Transport,
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

    def _start(self, payload: Payload) -> Generation:
        turn = self._sequence.record(payload)

        def again(error: TandemClientError) -> ResponseStream | None:
            request = self._sequence.again(turn, error)
            return None if request is None else self._transport.send(request)

        responses = self._transport.send(self._sequence.turn(payload))
        on_chunk = None if turn is None else turn.read
        return Generation(responses, self._sequence.accept, on_chunk=on_chunk, again=again)

    def close(self) -> None:
        """Free the state on the server; the next turn starts a new conversation.

        An error is only logged: a server that is gone, or has forgotten the sequence, has nothing to free.
        """
        request = self._sequence.end()
        if request is None:
            return
        try:
            for _ in self._transport.send(request):
                pass
        except TandemClientError as error:
            _LOGGER.warning("session %s was not ended on the server: %s", self.sequence_id, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TandemClient(_Generates):
    """A client of the model `model` on the Triton server whose gRPC service is at `url` (host:port).

    Connects with the first request. Several threads may share it. `transport` replaces gRPC, in tests.
    """

    def __init__(
        self, url: str = DEFAULT_URL, model: str = DEFAULT_MODEL, *, transport: Transport | None = None
    ) -> None:
        self._transport = GrpcTransport(url) if transport is None else transport
        self._model = model

    def _start(self, payload: Payload) -> Generation:
        return Generation(self._transport.send(one_shot(self._model, payload)), num_choices=payload.num_choices)

    def session(
        self, sequence_id: SequenceId | None = None, *, resume: bool = False, route: str | None = None
    ) -> Session:
        """A conversation under `sequence_id`, or under a fresh one. Use it in a `with`.

        resume: keep its messages here too. Where the server does not know the session any more (it was idle for too
        long, the server is another one now) the next turn sends them all, instead of raising ServerError.
        route: what a proxy chooses the server by, instead of the first sequence id.
        """
        return Session(self._transport, self._model, sequence_id, resume=resume, route=route)

    def close(self) -> None:
        """Cancel what still runs and close the connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
