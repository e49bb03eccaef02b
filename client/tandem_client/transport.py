# SPDX-License-Identifier: Apache-2.0
"""One gRPC stream a request, so that cancelling one request can't touch another. The seam that tests replace.

Triton server 2.51 never frees a request whose stream is cancelled while the last response is being written, and never
unloads its model then. So a stream is read to its end together with the last response: nothing is left to cancel.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2_grpc

from tandem_client.wire import InferRequest, InferResponse, decode, encode, is_last, metadata, translate_status

DEFAULT_URL = "127.0.0.1:8001"
DEFAULT_MODEL = "tandem"


class ResponseStream(Protocol):
    """Iterates the responses of one request until the server closes its stream; raises TandemClientError."""

    def __iter__(self) -> Iterator[InferResponse]: ...
    def __next__(self) -> InferResponse: ...
    def cancel(self) -> None:
        """Cancel the request on the server; nothing happens where it has ended."""


class Transport(Protocol):
    """Sends requests to one server."""

    def send(self, request: InferRequest) -> ResponseStream: ...
    def close(self) -> None: ...


class AsyncResponseStream(Protocol):
    """The asyncio twin of ResponseStream."""

    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> InferResponse: ...
    def cancel(self) -> None: ...


class AsyncTransport(Protocol):
    """The asyncio twin of Transport."""

    def send(self, request: InferRequest) -> AsyncResponseStream: ...
    async def close(self) -> None: ...


class GrpcTransport:
    """Transport over one gRPC channel to `url` (host:port); safe to use from several threads."""

    def __init__(self, url: str) -> None:
        self._url = check_url(url)
        self._channel = grpc.insecure_channel(self._url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def send(self, request: InferRequest) -> ResponseStream:
        call = self._stub.ModelStreamInfer(
            iter([encode(request)]), timeout=request.payload.timeout_s, metadata=metadata(request)
        )
        return _GrpcStream(call, self._url)

    def close(self) -> None:
        self._channel.close()


class _GrpcStream:
    def __init__(self, call: Any, url: str) -> None:
        self._call = call
        self._url = url

    def __iter__(self) -> Iterator[InferResponse]:
        return self

    def __next__(self) -> InferResponse:
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            raise translate_status(error.code().name, error.details() or "", self._url) from error
        if is_last(message):
            with suppress(grpc.RpcError):
                next(self._call, None)
        return decode(message)

    def cancel(self) -> None:
        self._call.cancel()


class AioTransport:
    """AsyncTransport over one gRPC channel to `url`, opened by the first request on the running event loop.

    `options` are gRPC's channel arguments.
    """

    def __init__(self, url: str, options: Sequence[tuple[str, int]] = ()) -> None:
        self._url, self._options = check_url(url), options
        self._channel: Any = None
        self._stub: Any = None

    @property
    def stub(self) -> Any:
        """Triton server's GRPCInferenceServiceStub, for what is no generation."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._url, options=self._options)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub

    def send(self, request: InferRequest) -> AsyncResponseStream:
        call = self.stub.ModelStreamInfer(
            iter([encode(request)]), timeout=request.payload.timeout_s, metadata=metadata(request)
        )
        return _AioStream(call, self._url)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = self._stub = None


class _AioStream:
    def __init__(self, call: Any, url: str) -> None:
        self._call = call
        self._url = url

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferResponse:
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise translate_status(error.code().name, error.details() or "", self._url) from error
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        if is_last(message):
            with suppress(grpc.RpcError):
                await self._call.read()
        return decode(message)

    def cancel(self) -> None:
        self._call.cancel()


def check_url(url: str) -> str:
    """Return `url` if it is host:port. Raises ValueError."""
    host, separator, port = url.rpartition(":")
    if not separator or not host or "/" in url or not port.isdecimal():
        raise ValueError(f"url: must be host:port of the gRPC service, such as 127.0.0.1:8001, got {url!r}")
    return url
