# SPDX-License-Identifier: Apache-2.0
"""Connection: uvicorn's HTTP protocol with limits for clients that send headers slowly or without end, or take nothing.

Without them such connections stay for good, and one client could hold all that the process may have.
"""

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem_client.gateway.errors import ApiError
from tandem_client.gateway.settings import Settings

MAX_HEAD_BYTES = 64 << 10  # of all in a request but its body: line, headers, chunks' sizes, trailers


class Connection(HttpToolsProtocol):
    """Closes itself where no request's head is whole within `head_timeout_s`, and where the client takes nothing of
    what it was sent for `send_timeout_s`."""

    def __init__(self, settings: Settings, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._settings = settings
        self._is_in_head = self._is_refused = False
        self._num_head_bytes = 0
        self._num_unsent_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting_for_head()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_head_bytes += len(data)  # the callbacks take out what belongs to none
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()  # the next request's, or what is left of a body that nobody reads any more
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"a request's headers may have at most {MAX_HEAD_BYTES} bytes", "headers_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_waiting_for_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = max(self._num_head_bytes - len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_sending()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_sending()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():  # which waits for the client to take the rest
            self._stop_watching()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an error object too."""
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        content = ApiError(status, message, code=code).json()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:  # nothing can be said within another answer
                self.transport.close()
                return
        self.transport.write(head.encode() + content)
        # Closed at once, with data unread, the connection is reset, and its client may never see the answer.
        self.transport.write_eof()
        self._is_refused = True
        self._stop_waiting_for_head()
        self._head_timer = self.loop.call_later(self._settings.head_timeout_s, self._close)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.head_timeout_s, self._on_slow_head)

    def _stop_waiting_for_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        if self._is_in_head:
            self._refuse(408, f"the headers did not come within {self._settings.head_timeout_s:g} s", "head_timeout")
        else:  # nothing is asked, so nothing is answered
            self._close()

    def _close(self) -> None:
        self.transport.close()
        self._watch_sending()

    def _watch_sending(self) -> None:
        self._stop_watching()
        self._num_unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self._settings.send_timeout_s, self._drop_unless_taking)

    def _stop_watching(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _drop_unless_taking(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_unsent_bytes:
            self._watch_sending()
        else:
            self.transport.abort()
