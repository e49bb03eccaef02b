# SPDX-License-Identifier: Apache-2.0
"""The exception tree. `code` is the Triton status name that serving reports for the error."""

from typing import ClassVar

# What a client sent may be in an error's text, and that may be megabytes.
MAX_TEXT_LEN = 4000


class TandemError(Exception):
    """Base of all errors that Tandem raises on purpose."""

    code: ClassVar[str] = "INTERNAL"

    def wire(self) -> str:
        """The message as clients see it: `[CODE] text`; HTTP generate answers 400 to all, so the code is in it."""
        text = str(self)
        return f"[{self.code}] {text if len(text) <= MAX_TEXT_LEN else text[:MAX_TEXT_LEN] + ' ...'}"


class ConfigError(TandemError):
    """The engine configuration is wrong; the message names the key and what is allowed."""

    code = "INVALID_ARG"


class CheckpointError(TandemError):
    """The checkpoint can't be served; the message names the file, tensor or config key."""

    code = "INVALID_ARG"


class InvalidRequestError(TandemError):
    """The request can't be accepted as it is; the message names the field and what is allowed."""

    code = "INVALID_ARG"


class UnavailableError(TandemError):
    """The request is fine, but the engine can't take it now (queue full, shutting down).

    With `retry_after_s` the message ends in "retry after N s": the wire has no other place for it.
    """

    code = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message if retry_after_s is None else f"{message}; retry after {retry_after_s} s")
        self.retry_after_s = retry_after_s


class SelfTestError(TandemError):
    """The exactness self-test found a row that is not bit-equal to one-token decoding; the model must not serve."""

    code = "INTERNAL"


class InternalError(TandemError):
    """A round failed; the requests in it lost their state."""

    code = "INTERNAL"
