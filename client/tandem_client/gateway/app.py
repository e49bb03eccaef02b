# SPDX-License-Identifier: Apache-2.0
"""create_app: the gateway as an ASGI application. One Gateway, with one connection to the backend, for its lifetime."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from tandem_client.gateway import endpoints, errors, live_page, operations
from tandem_client.gateway.access import Access
from tandem_client.gateway.backend import CHANNEL_OPTIONS, Backend
from tandem_client.gateway.calls import Calls, Hooks
from tandem_client.gateway.doorway import Doorway
from tandem_client.gateway.journaling import JournalMiddleware
from tandem_client.gateway.metrics import Metrics
from tandem_client.gateway.settings import Settings
from tandem_client.gateway.stateful import StatefulHooks
from tandem_client.transport import AioTransport


class Gateway:
    """What the endpoints share."""

    def __init__(self, settings: Settings, hooks: Hooks, transport: AioTransport) -> None:
        self.settings, self.hooks = settings, hooks
        self.access, self.metrics = Access(settings), Metrics()
        self.backend = Backend(transport, settings.models, settings.model_aliases, settings.retry_after_s)
        self.calls = Calls(self.backend, hooks, self.metrics.ended, settings.stall_s)


def create_app(
    settings: Settings, hooks: StatefulHooks | None = None, transport: AioTransport | None = None
) -> FastAPI:
    """The gateway. It connects to the backend with the first request, and again whenever the backend comes back.

    `transport` replaces gRPC, in tests. Raises ValueError, and starting it OSError too, where a file that
    settings name can't be used.
    """
    hooks = hooks or StatefulHooks(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connection = transport or AioTransport(settings.backend_url, CHANNEL_OPTIONS)
        app.state.gateway = Gateway(settings, hooks, connection)
        hooks.watch(app.state.gateway.metrics)
        yield
        await hooks.close()
        await app.state.gateway.backend.close()

    # A redirect would lead to whatever the Host header says, and behind a proxy with TLS to plain HTTP.
    app = FastAPI(title="Tandem gateway", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    errors.install(app)
    app.include_router(endpoints.router, responses=errors.DESCRIPTIONS)
    app.include_router(operations.router, responses=errors.DESCRIPTIONS)
    if settings.page:
        app.include_router(live_page.router)
    app.add_middleware(Doorway)
    if hooks.journal is not None:  # around the doorway: those that it refuses have a row too
        app.add_middleware(JournalMiddleware, write=hooks.journal.write, keep_text=settings.journal_text)
    if settings.cors_origins:  # outermost: a browser asks beforehand, and without the key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app
