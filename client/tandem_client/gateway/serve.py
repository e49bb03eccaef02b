# SPDX-License-Identifier: Apache-2.0
"""Runs the gateway under uvicorn until a signal, and lets running answers end."""

import signal
import sys
from functools import partial

import uvicorn

from tandem_client.gateway.app import create_app
from tandem_client.gateway.connection import Connection
from tandem_client.gateway.settings import Settings
from tandem_client.gateway.stateful import StatefulHooks


def serve(settings: Settings, hooks: StatefulHooks) -> None:
    """Serve until SIGTERM or SIGINT, whose end counts as a success."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again once it has drained
    uvicorn.run(
        create_app(settings, hooks),
        host=settings.host,
        port=settings.port,
        http=partial(Connection, settings),  # type: ignore[arg-type]  # called like a class
        ws="none",
        timeout_graceful_shutdown=max(int(settings.drain_s), 1),
        access_log=False,
        server_header=False,
        date_header=False,
    )
