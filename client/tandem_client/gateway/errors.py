# SPDX-License-Identifier: Apache-2.0
"""Errors as the OpenAI API words them: a status, and {"error": {"message", "type", "param", "code"}}."""

import json
import re
from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tandem_client.errors import ConnectionFailedError, RequestTimeoutError, ServerError, TandemClientError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout_error",
}
CLIENT_CLOSED = 499  # nobody reads it; nginx's number, for logs and metrics
MAX_MESSAGE_LEN = 2000
# Backend messages begin with the field: "max_tokens: must be ...", "logit_bias[7]: ...".
_FIELD = re.compile(r"([a-z_]+)((?:\[[^\]]*\])*): ")
# The backend's name of a field -> the OpenAI API's.
_RENAMED = {"text_input": "prompt", "input_ids": "prompt", "sampling": None, "guided_decoding_guide": None}
# The backend's name of a field -> what the client may have sent it as.
_SENT_AS = {
    "max_tokens": ("max_completion_tokens", "max_output_tokens"),
    "logprobs": ("top_logprobs",),
    "messages": ("input",),
    "response_format": ("text",),
    "reasoning_effort": ("reasoning",),
}
_TOO_LONG = re.compile(r"context|max_position|prompt tokens", re.IGNORECASE)
_GONE = re.compile(r"unknown model|not ready|not healthy|no available versions|is not found", re.IGNORECASE)


_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
# For OpenAPI: the same for every endpoint.
DESCRIPTIONS: dict[int | str, dict[str, Any]] = {
    status: {"description": kind, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
    for status, kind in {**TYPES, 500: "server_error"}.items()
}


class ApiError(Exception):
    """What the client of the gateway is told. `param` names the field, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    def as_sent(self, sent: Collection[str]) -> "ApiError":
        """The same in the words of a request that has the fields `sent`."""
        name = (self.param or "").partition("[")[0]
        own = next((own for own in _SENT_AS.get(name, ()) if own in sent), None)
        if own is None:
            return self
        message = f"{own}: {str(self).removeprefix(f'{self.param}: ')}"
        return ApiError(self.status, message, param=own, code=self.code, headers=self.headers)

    def body(self) -> dict[str, Any]:
        """The error object. Text of the client's may be in the message: megabytes of it are cut."""
        text = str(self)
        message = text if len(text) <= MAX_MESSAGE_LEN else text[:MAX_MESSAGE_LEN] + " ..."
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        """ASCII, so that a lone surrogate in what a client sent can be shown to it."""
        return json.dumps(self.body()).encode()

    def response(self) -> Response:
        return Response(self.json(), self.status, headers=self.headers, media_type="application/json")


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def from_client_error(error: Exception, retry_after_s: int) -> ApiError:
    """What an error between gateway and backend means to the gateway's client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServerError):
        return _from_server_error(error, retry_after_s)
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, "the answer was not complete in time", code="timeout")
    if isinstance(error, ConnectionFailedError):
        return unavailable("the backend can't be reached", retry_after_s)
    if isinstance(error, TandemClientError):
        return unavailable(f"the backend ended the answer early: {error}", retry_after_s)
    return ApiError(500, "the gateway failed", code="internal_error")


def unavailable(message: str, retry_after_s: int) -> ApiError:
    return ApiError(503, message, code="backend_unavailable", retry_after_s=retry_after_s)


def _from_server_error(error: ServerError, retry_after_s: int) -> ApiError:
    if error.code == "INVALID_ARG":
        return invalid_argument(error.message)
    if error.code == "UNAVAILABLE" or _GONE.search(error.message):
        return unavailable(error.message, error.retry_after_s or retry_after_s)
    if error.code == "DEADLINE_EXCEEDED":
        return ApiError(504, error.message, code="timeout")
    if error.code == "UNSUPPORTED":
        return ApiError(400, error.message, code="unsupported")
    return ApiError(500, error.message, code=error.code.lower())


def invalid_argument(message: str) -> ApiError:
    """A 400 of a message that begins with the field, as the backend's and the client library's do."""
    match = _FIELD.match(message)
    name = match[1] if match else None
    param = _RENAMED.get(name, name + (match[2] if match else "")) if name else None
    is_too_long = param in ("messages", "prompt", "max_tokens") and _TOO_LONG.search(message)
    return ApiError(400, message, param=param, code="context_length_exceeded" if is_too_long else None)


def install(app: FastAPI) -> None:
    """Answer every error of `app` with an error object."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response()

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        return ApiError(400, f"{param}: {first['msg']}", param=param).response()

    async def on_failure(request: Request, error: Exception) -> Response:
        return ApiError(500, "the gateway failed", code="internal_error").response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_failure)
