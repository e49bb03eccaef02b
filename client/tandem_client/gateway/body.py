# SPDX-License-Identifier: Apache-2.0
"""A request's body: read up to a limit, parsed, and described for OpenAPI."""

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from tandem_client.gateway.errors import CLIENT_CLOSED, ApiError
from tandem_client.gateway.fields import MODELS
from tandem_client.gateway.json_text import read_json


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> Any:
    """The JSON value of the body. Raises ApiError: 413 beyond `max_bytes`, 408 after `timeout_s`, 400 for no JSON."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _joined(request, max_bytes)
    except ClientDisconnect as error:
        raise ApiError(CLIENT_CLOSED, "the body did not come whole") from error
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {timeout_s:g} s", code="body_timeout") from error
    try:
        return read_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


async def _joined(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body may have at most {max_bytes} bytes", code="request_too_large")


def request_body(endpoint: str) -> dict[str, Any]:
    """The body of `endpoint` for OpenAPI."""
    schema = MODELS[endpoint].model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
