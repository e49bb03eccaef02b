# SPDX-License-Identifier: Apache-2.0
"""Doorway: the middleware that every request passes. It counts, and lets in who may."""

from contextlib import AbstractContextManager, nullcontext

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem_client.gateway.access import Access
from tandem_client.gateway.errors import ApiError
from tandem_client.gateway.metrics import Metrics

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class Doorway:
    """`scope["state"]["caller"]` is who sends a generating request; it counts as running until its last byte."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        access: Access = scope["app"].state.gateway.access
        metrics: Metrics = scope["app"].state.gateway.metrics
        status = 500

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        metrics.began()
        try:
            with _entry(access, scope):
                await self._app(scope, receive, sent)
        except ApiError as error:
            await error.response()(scope, receive, sent)
        finally:
            route = scope.get("route")
            metrics.responded(getattr(route, "path", "other"), status)


def _entry(access: Access, scope: Scope) -> AbstractContextManager[None]:
    headers, path = Headers(scope=scope), scope["path"]
    if path in GENERATING and scope["method"] == "POST":
        key = access.identify(headers)
        scope.setdefault("state", {})["caller"] = access.caller(key)  # known also where a limit refuses it
        return access.admitted(key)
    if path.startswith("/v1/"):
        access.identify(headers)
    return nullcontext()
