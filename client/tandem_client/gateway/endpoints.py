# SPDX-License-Identifier: Apache-2.0
"""The endpoints of the API: each reads its fields, makes calls of them, and lets an Exchange answer."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem_client.gateway.body import read_body, request_body
from tandem_client.gateway.calls import Call
from tandem_client.gateway.chat import ChatWriter, chat_options
from tandem_client.gateway.completions import CompletionWriter, completion_options, merged, read_prompts
from tandem_client.gateway.exchange import Exchange
from tandem_client.gateway.fields import CHAT, COMPLETIONS, RESPONSES, read_fields
from tandem_client.gateway.options import Caller
from tandem_client.gateway.response_input import response_options
from tandem_client.gateway.responses import ResponseWriter
from tandem_client.payload import GenerateOptions

router = APIRouter()
# For OpenAPI: with `stream` a 200 is a stream of events.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@router.post("/v1/chat/completions", responses=STREAMED, openapi_extra=request_body(CHAT))
async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    values = await _fields(request, CHAT)
    call = _call(request, CHAT, values, chat_options(values, _caller(request)))
    return await _exchange(request, values, [call], ChatWriter(call, values))


@router.post("/v1/completions", responses=STREAMED, openapi_extra=request_body(COMPLETIONS))
async def completions(request: Request) -> Response:
    """Continue one or several prompts."""
    values = await _fields(request, COMPLETIONS)
    asked = [completion_options(values, prompt, _caller(request)) for prompt in read_prompts(values)]
    calls = [_call(request, COMPLETIONS, values, options, text) for text, options in asked]
    return await _exchange(request, values, calls, CompletionWriter(calls, values))


@router.post("/v1/responses", responses=STREAMED, openapi_extra=request_body(RESPONSES))
async def responses(request: Request) -> Response:
    """Answer a conversation; nothing is stored."""
    values = await _fields(request, RESPONSES)
    call = _call(request, RESPONSES, values, response_options(values, _caller(request)))
    return await _exchange(request, values, [call], ResponseWriter(call, values))


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The backend's models that can answer now, and their aliases."""
    names = await request.app.state.gateway.backend.names()
    return {"object": "list", "data": [_model(name) for name in names]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One model."""
    request.app.state.gateway.backend.resolve(name)
    return _model(name)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tandem"}


async def _fields(request: Request, endpoint: str) -> dict[str, Any]:
    settings = request.app.state.gateway.settings
    return read_fields(endpoint, await read_body(request, settings.max_body_bytes, settings.body_timeout_s))


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def _call(
    request: Request, endpoint: str, values: dict[str, Any], options: GenerateOptions, prompt: str | None = None
) -> Call:
    return Call(
        endpoint=endpoint,
        model=request.app.state.gateway.backend.resolve(values["model"]),
        options=options,
        prompt=prompt,
        key_name=_caller(request).key_name,
        sent=frozenset(values),
        headers=dict(request.headers),
        is_streaming=bool(values.get("stream")),
    )


async def _exchange(request: Request, values: dict[str, Any], calls: list[Call], writer: Any) -> Response:
    gateway = request.app.state.gateway
    sources = [gateway.calls.chunks(call) for call in calls]
    chunks = sources[0] if len(sources) == 1 else merged(sources, values.get("n", 1))
    exchange = Exchange(request, gateway.settings, values.keys())
    return await exchange.respond(chunks, writer, stream=bool(values.get("stream")))
