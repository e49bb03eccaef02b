# SPDX-License-Identifier: Apache-2.0
"""Conversations reuse state: a request goes to the Triton sequence that keeps the beginning of its conversation.

Every turn brings the whole conversation (`whole_conversation` of the model), so an answer depends on its request alone,
whichever gateway or sequence serves it; what a sequence keeps only makes it cheaper. So nothing here has to be right
for an answer to be: a conversation that is not found, or whose sequence was lost, starts anew.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tandem_client.aio import AsyncGeneration, AsyncSession, AsyncTandemClient
from tandem_client.errors import ConnectionFailedError, ServerError
from tandem_client.gateway.errors import invalid_argument
from tandem_client.payload import GenerateOptions
from tandem_client.types import Chunk
from tandem_client.wire import conversation_key

# Triton server and the engine count idle time from different moments; a sequence that may be gone is begun anew.
_IDLE_MARGIN = 0.8


@dataclass(slots=True)
class _Kept:
    """A sequence of the model, and the digest under which its conversation is found.

    route: that of the conversation's first turn, which was no sequence: behind a proxy its prefix is there.
    """

    session: AsyncSession
    route: str
    digest: bytes
    last_sent_s: float
    is_busy: bool = False


class Conversations:
    """Which conversation has which sequence: at most `max_sequences`, the least recently used go first.

    Digests are kept, no text. Whose conversation it is belongs into the digests' scope. idle_s: how long the model
    keeps a sequence that is not used. Belongs to one event loop.
    """

    def __init__(
        self,
        client: AsyncTandemClient,
        *,
        max_sequences: int,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._max_sequences = max_sequences
        self._idle_s = idle_s * _IDLE_MARGIN
        self._clock = clock
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # the least recently used first
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def generate(
        self, digests: Sequence[bytes], options: GenerateOptions, *, name: bytes | None = None
    ) -> "ConversationAnswer":
        """Send a request whose messages, all of the conversation, have these digests.

        It goes on in the sequence of the longest conversation that it begins with; name: in the one that this digest
        names. One that is busy is left alone: the request is then sent by itself, as are such that a sequence can't
        answer (several choices, log-probabilities of the prompt), and conversations without an answer yet: most end
        with their first, and the prefix cache has its state for those that go on.
        """
        kept = None
        if self._max_sequences and _may_continue(options) and (name or _holds_an_answer(options)):
            kept = self._take(digests, name, options)
        return ConversationAnswer(self, kept, options)

    async def close(self) -> None:
        """End all sequences on the server."""
        while self._kept:
            self._end(self._kept.popitem()[1])
        await asyncio.gather(*self._ending)

    def _take(self, digests: Sequence[bytes], name: bytes | None, options: GenerateOptions) -> _Kept | None:
        """The sequence for a request, marked as busy; None where it is to be sent by itself."""
        candidates = reversed(digests) if name is None else (name,)
        found = next((digest for digest in candidates if digest in self._kept), None)
        digest = digests[-1] if name is None else name
        if found is not None:
            kept = self._kept[found]
            if kept.is_busy:
                return None
            del self._kept[found]
            kept.digest = digest
        elif self._make_room():
            route = conversation_key(options.get("messages") or ())
            kept = _Kept(self._client.session(route=route), route, digest, self._clock())
        else:
            return None
        if self._clock() - kept.last_sent_s > self._idle_s:
            self.forget(kept)
        kept.is_busy, kept.last_sent_s = True, self._clock()
        self._kept[digest] = kept
        return kept

    def _make_room(self) -> bool:
        """End the least recently used sequence where there are too many; False where all are busy."""
        if len(self._kept) < self._max_sequences:
            return True
        oldest = next((kept for kept in self._kept.values() if not kept.is_busy), None)
        if oldest is not None:
            self._end(self._kept.pop(oldest.digest))
        return oldest is not None

    def _end(self, kept: _Kept) -> None:
        if self._clock() - kept.last_sent_s <= self._idle_s:  # else the server has dropped it
            task = asyncio.get_running_loop().create_task(kept.session.close())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def forget(self, kept: _Kept) -> None:
        """The next turn begins the sequence anew, under its old id: whatever the server still has of it is replaced."""
        kept.session = self._client.session(kept.session.sequence_id, route=kept.route)

    def forget_all(self) -> None:
        """The server may have been restarted, and then it knows no sequence.

        A turn of one that Triton server itself does not know is not risked: where it has refused a request of a stream,
        2.51 can't unload the model any more.
        """
        for kept in self._kept.values():
            self.forget(kept)

    def ways(self, kept: _Kept | None, options: GenerateOptions) -> list[Callable[[], AsyncGeneration]]:
        """Ways to send a request, each for when the server can't serve the one before: on, anew, by itself."""

        def single() -> AsyncGeneration:
            return self._client.generate(**options)

        def turn() -> AsyncGeneration:
            assert kept is not None
            return kept.session.generate(**_as_whole_conversation(options))

        if kept is None:
            return [single]
        return [turn, turn, single] if kept.session.is_open else [turn, single]


class ConversationAnswer(AsyncIterator[Chunk]):
    """The chunks of one request, as AsyncGeneration gives them; to be left by close() or the end of an `async with`."""

    def __init__(self, conversations: Conversations, kept: _Kept | None, options: GenerateOptions) -> None:
        self._conversations = conversations
        self._kept = kept
        self._ways = conversations.ways(kept, options)
        self._generation: AsyncGeneration | None = None
        self._is_closed = False

    async def __anext__(self) -> Chunk:
        if self._is_closed:
            raise StopAsyncIteration
        try:
            return await (self._begin() if self._generation is None else anext(self._generation))
        except BaseException as error:
            if isinstance(error, ConnectionFailedError):
                self._conversations.forget_all()
            self.close()
            raise

    async def _begin(self) -> Chunk:
        """The first chunk. A sequence that the server doesn't have shows before it, and costs nothing but this."""
        while True:
            try:
                self._generation = self._ways.pop(0)()
                return await anext(self._generation)
            except ServerError as error:
                if self._kept is None or not self._ways or not _is_about_the_sequence(error):
                    raise
                self._conversations.forget(self._kept)
                if _is_of_triton_server(error):
                    self._conversations.forget_all()
            except (ValueError, TypeError) as error:  # values that make no request
                raise invalid_argument(str(error)) from error

    def close(self) -> None:
        """Cancel the request unless it has ended; the sequence may take another one."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._generation is not None:
            self._generation.close()
        if self._kept is not None:
            self._kept.is_busy = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _holds_an_answer(options: GenerateOptions) -> bool:
    return any(message.get("role") == "assistant" for message in options.get("messages") or ())


def _may_continue(options: GenerateOptions) -> bool:
    sampling = options.get("sampling") or {}
    num_choices = options.get("n") or sampling.get("n") or 1
    asks_prompt = "prompt_logprobs" in sampling or options.get("prompt_logprobs") is not None
    return num_choices == 1 and not asks_prompt


def _as_whole_conversation(options: GenerateOptions) -> GenerateOptions:
    """`strict`: a model that doesn't know the field would take the conversation for a part of itself."""
    sampling = {**(options.get("sampling") or {}), "whole_conversation": True, "strict": True}
    return {**options, "sampling": sampling}


def _is_about_the_sequence(error: ServerError) -> bool:
    """Whether the request may be fine: its sequence is lost, there are too many, or the model has no such turns."""
    return (
        error.message.startswith(("sequence_id:", "max_sessions:", "strict:"))
        or _is_of_triton_server(error)
        or "send sequence_start" in error.message
    )


def _is_of_triton_server(error: ServerError) -> bool:
    """Whether Triton server itself doesn't know the sequence; the engine has words of its own."""
    return "START flag" in error.message
