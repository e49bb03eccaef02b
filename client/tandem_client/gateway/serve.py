# SPDX-License-Identifier: Apache-2.0
"""Runs the gateway under uvicorn until a signal, and lets running answers end."""

import asyncio
import signal
import socket
import sys
from contextlib import suppress
from functools import partial

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE

from tandem_client.gateway.app import create_app
from tandem_client.gateway.connection import Connection
from tandem_client.gateway.settings import Settings
from tandem_client.gateway.stateful import StatefulHooks

# For answers that are told to end: to say so. uvicorn then cancels them, and they could not any more.
_LAST_WORDS_S = 5


def serve(settings: Settings, hooks: StatefulHooks) -> None:
    """Serve until SIGTERM or SIGINT, whose end counts as a success."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again once it has drained
    app = create_app(settings, hooks)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=partial(Connection, settings),  # type: ignore[arg-type]  # called like a class
        ws="none",
        timeout_graceful_shutdown=int(settings.drain_s) + _LAST_WORDS_S,
        access_log=False,
        server_header=False,
        date_header=False,
    )
    server = _Server(config, app, settings.drain_s)
    with suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit(STARTUP_FAILURE)


class _Server(uvicorn.Server):
    """Ends the answers that still run `drain_s` after the signal."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain_s: float) -> None:
        super().__init__(config)
        self._app, self._drain_s = app, drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._drain_s, self._app.state.gateway.calls.end)
        await super().shutdown(sockets)
