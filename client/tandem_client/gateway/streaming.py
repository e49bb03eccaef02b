# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, and clients that leave: whoever reads no more makes the generation stop."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": still here\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold events back


class ClientLeftError(Exception):
    """The client has closed its connection; nobody reads a response any more."""


async def unless_left(request: Request, work: Awaitable[T], timeout_s: float | None = None) -> T | None:
    """The result of `work`; None after `timeout_s`, while `work`, a future then, runs on.

    The request's body must have been read. Where the client leaves `work` is cancelled and ClientLeftError raised.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(request))
    try:
        done, _ = await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
    if task in done:
        return task.result()
    if gone in done:
        task.cancel()
        await asyncio.wait({task})
        raise ClientLeftError
    return None


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends the events of `events`; a comment where there was none for `heartbeat_s`.

    Ends, and closes `events`, when the client leaves or takes nothing for `send_timeout_s`.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], heartbeat_s: float, send_timeout_s: float) -> None:
        super().__init__(events, headers=HEADERS)
        self._events, self._heartbeat_s, self._send_timeout_s = events, heartbeat_s, send_timeout_s
        self._is_quiet = True

    async def stream_response(self, send: Send) -> None:
        """Called by Starlette, which cancels it when the client leaves."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        heart = asyncio.create_task(self._beat(send))
        try:
            async for event in self._events:
                self._is_quiet = False
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            heart.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:  # the server closes a connection whose response stays incomplete
            logger.warning("a client took nothing for %g s and is dropped", self._send_timeout_s)
        finally:
            heart.cancel()
            await self._events.aclose()

    async def _beat(self, send: Send) -> None:
        while True:
            self._is_quiet = True
            await asyncio.sleep(self._heartbeat_s)
            if self._is_quiet:
                await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})


async def begin(request: Request, items: AsyncGenerator[T, None], wait_s: float) -> AsyncGenerator[T, None]:
    """`items`, once the first is there or `wait_s` have passed, so that an error that comes at once can be a status.

    Raises what the first item raises, and ClientLeftError; `items` is closed then.
    """
    first = asyncio.ensure_future(anext(items))
    try:
        await unless_left(request, first, wait_s)
    except BaseException:
        await _closed(first, items)
        raise
    return _continued(first, items)


async def _continued(first: "asyncio.Future[T]", items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    try:
        yield await first
        async for item in items:
            yield item
    finally:
        await _closed(first, items)


async def _closed(first: "asyncio.Future[T]", items: AsyncGenerator[T, None]) -> None:
    if not first.done():
        first.cancel()
        await asyncio.wait({first})
    await items.aclose()
