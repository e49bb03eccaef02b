# SPDX-License-Identifier: Apache-2.0
"""One exchange over HTTP: chunks of the backend to a response, streamed or whole, whatever the endpoint."""

import logging
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tandem_client.errors import TandemClientError
from tandem_client.gateway.errors import CLIENT_CLOSED, ApiError, from_client_error
from tandem_client.gateway.settings import Settings
from tandem_client.gateway.streaming import ClientLeftError, EventStream, begin, unless_left
from tandem_client.types import Chunk, Completion

logger = logging.getLogger(__name__)

Chunks = AsyncGenerator[Chunk, None]


class Writer(Protocol):
    """Writes the answers of one request in the form of its endpoint."""

    def begin(self) -> bytes: ...
    def chunk(self, chunk: Chunk) -> bytes: ...
    def end(self) -> bytes: ...
    def failed(self, error: ApiError) -> bytes: ...
    def whole(self, completion: Completion) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """Answers `request` with what `chunks` brings; `chunks` is closed whatever happens."""

    request: Request
    settings: Settings
    sent: Collection[str]  # names of the request's fields

    async def respond(self, chunks: Chunks, writer: Writer, *, stream: bool) -> Response:
        """Raises ApiError where it fails before the response has begun."""
        try:
            return await (self._stream(chunks, writer) if stream else self._whole(chunks, writer))
        except ClientLeftError:
            return Response(status_code=CLIENT_CLOSED)
        except (TandemClientError, ApiError) as error:
            raise self._explained(error) from None

    async def _whole(self, chunks: Chunks, writer: Writer) -> Response:
        completion = await unless_left(self.request, _joined(chunks))
        assert completion is not None
        return Response(orjson.dumps(writer.whole(completion)), media_type="application/json")

    async def _stream(self, chunks: Chunks, writer: Writer) -> Response:
        started = await begin(self.request, chunks, self.settings.heartbeat_s)
        events = self._events(started, writer)
        return EventStream(events, self.settings.heartbeat_s, self.settings.send_timeout_s)

    async def _events(self, chunks: Chunks, writer: Writer) -> AsyncGenerator[bytes, None]:
        try:
            if opening := writer.begin():
                yield opening
            async for chunk in chunks:
                if event := writer.chunk(chunk):
                    yield event
            yield writer.end()
        except Exception as error:  # the status is out; whatever it is, the stream must say so
            if not isinstance(error, TandemClientError | ApiError):
                logger.exception("a stream failed")
            yield writer.failed(self._explained(error))
        finally:
            await chunks.aclose()

    def _explained(self, error: Exception) -> ApiError:
        return from_client_error(error, self.settings.retry_after_s).as_sent(self.sent)


async def _joined(chunks: Chunks) -> Completion:
    try:
        return Completion.from_chunks([chunk async for chunk in chunks])
    finally:
        await chunks.aclose()
