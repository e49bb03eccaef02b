# SPDX-License-Identifier: Apache-2.0
"""Backend: the Triton server behind the gateway, over one gRPC channel, and the models that it serves."""

from collections.abc import Mapping, Sequence

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from tandem_client.aio import AsyncTandemClient
from tandem_client.gateway.errors import ApiError, unavailable
from tandem_client.transport import AioTransport

ASK_TIMEOUT_S = 5.0
# After a restart of the backend the next request must not wait for gRPC's own back-off of up to two minutes.
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
)


class Backend:
    """The models in `models` and what `aliases` calls them.

    It asks the server for no list of its models: `tandem serve` lets only itself see that.
    """

    def __init__(
        self, transport: AioTransport, models: Sequence[str], aliases: Mapping[str, str], retry_after_s: int
    ) -> None:
        self.transport = transport
        self._clients = {name: AsyncTandemClient(model=name, transport=self.transport) for name in models}
        self._aliases, self._retry_after_s = aliases, retry_after_s

    async def close(self) -> None:
        await self.transport.close()

    def client(self, model: str) -> AsyncTandemClient:
        """A client of `model`, one that `resolve` returned; all share one connection."""
        return self._clients[model]

    def resolve(self, name: str) -> str:
        """The backend's model that `name` means. Raises ApiError 404 where it means none."""
        model = self._aliases.get(name, name)
        if model not in self._clients:
            raise ApiError(404, f"model: {name[:100]!r} is not served here", param="model", code="model_not_found")
        return model

    async def names(self) -> list[str]:
        """The models that can answer now, then their aliases. Raises ApiError 503 where there is none."""
        try:
            ready = [name for name in self._clients if await self._is_ready(name)]
        except grpc.RpcError as error:
            raise unavailable("the backend can't be reached", self._retry_after_s) from error
        if not ready:
            raise unavailable("the backend has no model that is ready", self._retry_after_s)
        return [*ready, *(alias for alias, model in self._aliases.items() if model in ready)]

    async def _is_ready(self, name: str) -> bool:
        request = service_pb2.ModelReadyRequest(name=name)
        return bool((await self.transport.stub.ModelReady(request, timeout=ASK_TIMEOUT_S)).ready)
