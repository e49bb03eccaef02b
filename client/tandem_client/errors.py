# SPDX-License-Identifier: Apache-2.0
"""The exception tree of the client. Wrong arguments are ValueError or TypeError; everything else is here."""

import re

_RETRY_AFTER = re.compile(r"; retry after (\d+) s$")
# A message of the backend is "[CODE] text"; Triton server's own messages have no code.
_CODED_MESSAGE = re.compile(r"\[([A-Z][A-Z_]*)\] ?(.*)", re.DOTALL)


class TandemClientError(Exception):
    """Base of what goes wrong between the client and the server."""


class ServerError(TandemClientError):
    """The server refused the request or failed in it.

    `code` is a Triton status name such as INVALID_ARG or UNAVAILABLE, UNKNOWN where the server names none.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"[{code}] {message}")
        self.code = code
        self.message = message

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which the request may be sent again, where the server says so: its queue was full, say."""
        match = _RETRY_AFTER.search(self.message)
        return int(match[1]) if match else None

    @classmethod
    def parse(cls, text: str, default_code: str = "UNKNOWN") -> "ServerError":
        """Build from a message on the wire, `[CODE] text` or plain text."""
        match = _CODED_MESSAGE.fullmatch(text)
        return cls(match[1], match[2]) if match else cls(default_code, text)


class ConnectionFailedError(TandemClientError):
    """The server can't be reached, or the connection broke during the answer."""


class RequestTimeoutError(TandemClientError, TimeoutError):
    """The answer was not complete after `timeout_s`; the request is cancelled on the server."""


class IncompleteStreamError(TandemClientError):
    """The server closed the stream without the last response of the answer."""
