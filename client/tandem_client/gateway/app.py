# SPDX-License-Identifier: Apache-2.0
"""create_app: the gateway as an ASGI application. One Gateway, with one connection to the backend, for its lifetime."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tandem_client.gateway import errors
from tandem_client.gateway.backend import CHANNEL_OPTIONS, Backend
from tandem_client.gateway.body import read_body, request_body
from tandem_client.gateway.calls import Call, Calls, Hooks
from tandem_client.gateway.chat import ChatWriter, chat_options
from tandem_client.gateway.exchange import Exchange
from tandem_client.gateway.fields import CHAT, read_fields
from tandem_client.gateway.options import Caller
from tandem_client.gateway.settings import Settings
from tandem_client.transport import AioTransport

router = APIRouter()


class Gateway:
    """What the endpoints share."""

    def __init__(self, settings: Settings, hooks: Hooks, transport: AioTransport) -> None:
        self.settings, self.hooks = settings, hooks
        self.backend = Backend(transport, settings.models, settings.model_aliases, settings.retry_after_s)
        self.calls = Calls(self.backend, hooks)


def create_app(settings: Settings, hooks: Hooks | None = None, transport: AioTransport | None = None) -> FastAPI:
    """The gateway. It connects to the backend with the first request, and again whenever the backend comes back.

    `transport` replaces gRPC, in tests.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connection = transport or AioTransport(settings.backend_url, CHANNEL_OPTIONS)
        gateway = app.state.gateway = Gateway(settings, hooks or Hooks(), connection)
        yield
        await gateway.backend.close()

    app = FastAPI(title="Tandem gateway", lifespan=lifespan, docs_url=None, redoc_url=None)
    errors.install(app)
    app.include_router(router)
    return app


@router.post("/v1/chat/completions", openapi_extra=request_body(CHAT))
async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    gateway: Gateway = request.app.state.gateway
    values = read_fields(CHAT, await read_body(request, gateway.settings.max_body_bytes))
    caller = Caller(timeout_s=gateway.settings.request_timeout_s)
    call = Call(
        endpoint=CHAT,
        model=gateway.backend.resolve(values["model"]),
        options=chat_options(values, caller),
        sent=frozenset(values),
        headers=dict(request.headers),
        is_streaming=bool(values.get("stream")),
    )
    writer = ChatWriter(call, values)
    exchange = Exchange(request, gateway.settings)
    return await exchange.respond(gateway.calls.chunks(call), writer, stream=call.is_streaming)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The backend's models that can answer now, and their aliases."""
    names = await request.app.state.gateway.backend.names()
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": 0, "owned_by": "tandem"} for name in names],
    }


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """200 where the gateway and a model behind it can answer; 503 else."""
    await request.app.state.gateway.backend.names()
    return {"status": "ok"}
