# SPDX-License-Identifier: Apache-2.0
"""A request's body: read up to a limit, parsed, and described for OpenAPI."""

import json
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from tandem_client.gateway.errors import ApiError
from tandem_client.gateway.fields import MODELS


async def read_body(request: Request, max_bytes: int) -> Any:
    """The JSON value of the body. Raises ApiError: 413 beyond `max_bytes`, 400 for what is no JSON."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect as error:
        raise ApiError(400, "the body did not come whole") from error
    try:
        return orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError:
        return _parsed_slowly(b"".join(parts))


def _parsed_slowly(body: bytes) -> Any:
    """Python's parser takes some that orjson refuses, lone surrogates say; what it refuses too gets its message."""
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body may have at most {max_bytes} bytes", code="request_too_large")


def request_body(endpoint: str) -> dict[str, Any]:
    """The body of `endpoint` for OpenAPI."""
    schema = MODELS[endpoint].model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
