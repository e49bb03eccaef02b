# SPDX-License-Identifier: Apache-2.0
"""Over a real gRPC channel: a stream is cancelled on the server as long as its request runs, and not after that."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tandem_client import AsyncTandemClient, ServerError, TandemClient
from tritonclient.grpc import service_pb2, service_pb2_grpc


def message(*, is_final: bool = False, error: str = "") -> Any:
    found = service_pb2.ModelStreamInferResponse(error_message=error)
    if not error:
        found.infer_response.parameters["triton_final_response"].bool_param = is_final
        found.infer_response.outputs.add(name="token_ids", datatype="INT32", shape=[1])
        found.infer_response.raw_output_contents.append((7).to_bytes(4, "little"))
    return found


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers as `messages` says, closes the stream after `closing_s`, and notes whether it was cancelled."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.closing_s = 0.5
        self.was_cancelled = False
        self.ended = threading.Event()

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.was_cancelled = True  # a stream that is cancelled at a message does not come back here
        context.add_callback(self.ended.set)
        next(requests)
        yield from self.messages
        self.was_cancelled = self.ended.wait(self.closing_s)


@pytest.fixture
def served() -> Iterator[tuple[Servicer, str]]:
    servicer = Servicer()
    server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def leave_after_one(url: str) -> None:
    with TandemClient(url) as client, client.generate("hi") as chunks:
        next(chunks)


async def leave_after_one_async(url: str) -> None:
    async with AsyncTandemClient(url) as client, client.generate("hi") as chunks:
        await anext(chunks)


def leave(url: str, kind: str) -> None:
    if kind == "sync":
        leave_after_one(url)
    else:
        asyncio.run(leave_after_one_async(url))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_who_leaves_after_the_last_response_cancels_nothing(served: tuple[Servicer, str], kind: str) -> None:
    servicer, url = served
    servicer.messages = [message(is_final=True)]
    leave(url, kind)
    assert servicer.ended.wait(10)
    assert not servicer.was_cancelled


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_nor_does_who_got_an_error(served: tuple[Servicer, str], kind: str) -> None:
    servicer, url = served
    servicer.messages = [message(error="[UNAVAILABLE] queue full")]
    with pytest.raises(ServerError, match="queue full"):
        leave(url, kind)
    assert servicer.ended.wait(10)
    assert not servicer.was_cancelled


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_who_leaves_before_it_cancels(served: tuple[Servicer, str], kind: str) -> None:
    servicer, url = served
    servicer.messages, servicer.closing_s = [message()], 10
    leave(url, kind)
    assert servicer.ended.wait(10)
    assert servicer.was_cancelled


def test_the_last_response_counts_though_the_stream_then_fails(served: tuple[Servicer, str]) -> None:
    servicer, url = served
    servicer.messages, servicer.closing_s = [message(is_final=True)], 10
    with TandemClient(url) as client, client.generate("hi", timeout_s=2) as chunks:
        assert next(chunks).token_ids == (7,)
