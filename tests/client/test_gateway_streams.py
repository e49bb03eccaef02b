# SPDX-License-Identifier: Apache-2.0
"""Streams of the gateway: heartbeats, clients that leave or don't read, and the events of completions and responses."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from fake_transport import FINAL, AsyncFakeTransport, FakeStream, Script, answer, response
from fastapi.testclient import TestClient
from tandem_client import ServerError
from tandem_client.gateway.app import create_app
from tandem_client.gateway.calls import Call
from tandem_client.gateway.completions import merged
from tandem_client.gateway.connection import Connection
from tandem_client.gateway.settings import Settings
from tandem_client.gateway.streaming import HEARTBEAT
from tandem_client.types import Chunk
from tandem_client.wire import InferResponse
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tandem", "messages": [{"role": "user", "content": "Hello?"}], "stream": True}

INPUT: dict[str, Any] = {"model": "tandem", "input": "Hello?"}


class SlowStream(FakeStream):
    """Takes its time before each response, and ends when it is cancelled."""

    def __init__(self, script: Script, pause_s: float) -> None:
        super().__init__(script)
        self._pause_s = pause_s

    async def __anext__(self) -> InferResponse:
        await asyncio.sleep(self._pause_s)
        return await super().__anext__()


class SlowTransport(AsyncFakeTransport):
    """Every stream pauses."""

    def __init__(self, *scripts: Script, pause_s: float) -> None:
        super().__init__(*scripts)
        self._pause_s = pause_s

    def send(self, request: Any) -> SlowStream:
        slow = SlowStream(self.scripts.pop(0), self._pause_s)
        self.requests.append(request)
        self.streams.append(slow)
        return slow


def post(path: str, body: dict[str, Any], transport: AsyncFakeTransport, **settings: Any) -> Any:
    with TestClient(create_app(Settings(**settings), transport=transport)) as client:  # type: ignore[arg-type]
        return client.post(path, json=body)


def test_a_silent_stream_beats() -> None:
    reply = post(CHAT, BODY, SlowTransport(answer("Hi"), pause_s=0.12), heartbeat_s=0.05)
    assert reply.status_code == 200
    assert reply.content.count(HEARTBEAT) >= 1
    assert '"content":"Hi"' not in reply.text.split(": still here")[0]
    assert reply.text.endswith("data: [DONE]\n\n")


def test_an_error_before_the_first_beat_is_a_status_and_after_it_an_event() -> None:
    script = [ServerError("UNAVAILABLE", "the queue is full; retry after 3 s")]
    early = post(CHAT, BODY, SlowTransport(script, pause_s=0.01), heartbeat_s=5)
    assert (early.status_code, early.headers["retry-after"]) == (503, "3")
    late = post(CHAT, BODY, SlowTransport(script, pause_s=0.2), heartbeat_s=0.05)
    assert late.status_code == 200
    assert '"code": "backend_unavailable"' in late.text


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        (CHAT, {**BODY, "max_completion_tokens": 0}, "max_tokens: must be 1", "max_completion_tokens"),
        (CHAT, {**BODY, "max_tokens": 0}, "max_tokens: must be 1", "max_tokens"),
        (CHAT, {**BODY, "logprobs": True, "top_logprobs": 99}, "logprobs: must be 1", "top_logprobs"),
        ("/v1/responses", {**INPUT, "max_output_tokens": 0}, "max_tokens: must be 1", "max_output_tokens"),
        ("/v1/responses", INPUT, "messages[0]: must be 1", "input"),
        ("/v1/responses", {**INPUT, "text": {"format": {"type": "x"}}}, "response_format: must be 1", "text"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_of_the_backend_name_the_field_that_was_sent(
    path: str, body: dict[str, Any], message: str, param: str, stream: bool
) -> None:
    reply = post(path, {**body, "stream": stream}, AsyncFakeTransport([ServerError("INVALID_ARG", message)]))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["message"]) == (400, param, f"{param}: must be 1")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leaves_after_s", [0.05, 0.25])  # while the prompt is read, and in the answer
def test_a_client_that_leaves_cancels_its_request(stream: bool, leaves_after_s: float) -> None:
    transport = SlowTransport([response("x", [1])] * 100, pause_s=0.1)

    async def ask() -> None:
        app = create_app(Settings(), transport=transport)  # type: ignore[arg-type]
        body = [{"type": "http.request", "body": json.dumps({**BODY, "stream": stream}).encode(), "more_body": False}]

        async def receive() -> Any:
            if body:
                return body.pop()
            await asyncio.sleep(leaves_after_s)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        async with app.router.lifespan_context(app):
            scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"", "app": app}
            async with asyncio.timeout(5):
                await app(scope, receive, send)
            assert 'calls_total{endpoint="chat",outcome="cancelled"} 1.0' in app.state.gateway.metrics.text().decode()

    asyncio.run(ask())
    assert [each.is_cancelled for each in transport.streams] == [True]


def test_a_client_that_takes_nothing_is_dropped() -> None:
    transport = AsyncFakeTransport([response("x", [1])] * 100)

    async def ask() -> None:
        app = create_app(Settings(send_timeout_s=0.05), transport=transport)  # type: ignore[arg-type]
        body = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]

        async def receive() -> Any:
            return body.pop() if body else await asyncio.sleep(30)

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(30)

        async with app.router.lifespan_context(app):
            scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"", "app": app}
            async with asyncio.timeout(5):
                await app(scope, receive, send)

    asyncio.run(ask())
    assert [each.is_cancelled for each in transport.streams] == [True]


async def large_answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (32 << 20))]})
    await send({"type": "http.response.body", "body": bytes(32 << 20)})


@pytest.mark.parametrize("kept", ["close", "keep-alive"])
def test_a_connection_whose_client_takes_nothing_of_a_whole_answer_is_dropped(kept: str) -> None:
    async def ask() -> None:
        config = Config(large_answer, lifespan="off", log_config=None, timeout_keep_alive=1)
        settings, state = Settings(send_timeout_s=0.1), ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(settings, config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        host, port = server.sockets[0].getsockname()
        _, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET / HTTP/1.1\r\nHost: x\r\nConnection: {kept}\r\n\r\n".encode())
        async with asyncio.timeout(20):
            while not state.total_requests or state.connections:
                await asyncio.sleep(0.01)
        writer.transport.abort()
        server.close()

    asyncio.run(ask())


class SlowlyTaken:
    """A transport that closes, and tells these sizes of what is unsent."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.is_aborted = list(sizes), asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]

    def is_closing(self) -> bool:
        return True

    def abort(self) -> None:
        self.is_aborted.set()


def test_a_connection_whose_client_takes_little_is_kept_until_it_takes_nothing() -> None:
    async def take() -> list[int]:
        config = Config(large_answer, lifespan="off", log_config=None)
        connection = Connection(Settings(send_timeout_s=0.01), config=config, server_state=ServerState(), app_state={})
        transport: Any = SlowlyTaken(500, 400, 400, 300, 300, 200, 200, 200)
        connection.transport, connection.flow = transport, FlowControl(transport)
        connection.pause_writing()
        connection.resume_writing()  # little is left, and may stay for ever
        async with asyncio.timeout(20):
            await transport.is_aborted.wait()
        sizes: list[int] = transport.sizes
        return sizes

    assert asyncio.run(take()) == [200]


class FallingSilent(FakeStream):
    """Waits for ever at the end of its script, until it is cancelled, as gRPC's streams do."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self._cancelled = asyncio.Event()

    async def __anext__(self) -> InferResponse:
        try:
            return await super().__anext__()
        except StopAsyncIteration:
            await self._cancelled.wait()
            raise asyncio.CancelledError from None

    def cancel(self) -> None:
        super().cancel()
        self._cancelled.set()


class FallingSilentTransport(AsyncFakeTransport):
    """Falls silent in each request that there is a script for."""

    def send(self, request: Any) -> FakeStream:
        if not self.scripts:
            return super().send(request)
        self.streams.append(FallingSilent(self.scripts.pop(0)))
        return self.streams[-1]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", [None, "a conversation"])
def test_an_answer_that_falls_silent_ends_with_an_error(stream: bool, name: str | None) -> None:
    transport = FallingSilentTransport([response("x", [1])])
    headers = {} if name is None else {"X-Tandem-Session": name}
    with TestClient(create_app(Settings(stall_s=0.05), transport=transport)) as client:  # type: ignore[arg-type]
        reply = client.post(CHAT, json={**BODY, "stream": stream}, headers=headers)
    assert reply.status_code == (200 if stream else 503)
    assert '"message": "nothing came for 0.05 s"' in reply.text
    assert reply.text.endswith("data: [DONE]\n\n") == stream
    assert transport.streams[0].is_cancelled


def test_a_client_that_takes_its_time_is_no_silence_of_the_backend() -> None:
    async def take() -> list[str]:
        app = create_app(Settings(stall_s=0.02), transport=AsyncFakeTransport(answer("Hi", " there")))  # type: ignore[arg-type]
        async with app.router.lifespan_context(app):
            options: Any = {"messages": BODY["messages"]}
            texts = []
            async for chunk in app.state.gateway.calls.chunks(Call(endpoint="chat", model="tandem", options=options)):
                texts.append(chunk.text)
                await asyncio.sleep(0.1)
            return texts

    assert asyncio.run(take()) == ["Hi", " there"]


def test_several_prompts_are_several_choices() -> None:
    body = {"model": "tandem", "prompt": ["a", "b"], "n": 2, "echo": True}
    script = [
        response("x", [1], choice_index=1),
        response("y", [2], "stop", choice_index=0),
        response("z", [3], "stop", choice_index=1),
        FINAL,
    ]
    reply = post("/v1/completions", body, AsyncFakeTransport(script, script)).json()
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "ay"),
        (1, "axz"),
        (2, "by"),
        (3, "bxz"),
    ]
    assert reply["usage"]["prompt_tokens"] == 14
    assert reply["usage"]["completion_tokens"] == 6


def test_one_prompt_that_fails_ends_the_others() -> None:
    async def long() -> AsyncGenerator[Chunk, None]:
        try:
            while True:
                yield Chunk(text="x")
                await asyncio.sleep(0)
        finally:
            closed.append(True)

    async def failing() -> AsyncGenerator[Chunk, None]:
        yield Chunk(text="y")
        raise ServerError("INTERNAL", "a round failed")

    async def read(source: AsyncIterator[Chunk]) -> None:
        async for _ in source:
            pass

    closed: list[bool] = []
    with pytest.raises(ServerError, match="a round failed"):
        asyncio.run(read(merged([long(), failing()], 1)))
    assert closed == [True]


def test_logprobs_are_spelt() -> None:
    entries = [{"token_id": 1, "logprob": -0.5, "bytes": [0xC3], "top_logprobs": []}]
    rest = [{"token_id": 2, "logprob": -0.25, "bytes": [0xA9], "top_logprobs": []}]
    script = [
        response("", [1], logprobs=json.dumps(entries).encode()),
        response("é", [2], "stop", logprobs=json.dumps(rest).encode()),
        FINAL,
    ]
    body = {**BODY, "stream": False, "logprobs": True}
    content = post(CHAT, body, AsyncFakeTransport(script)).json()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [("\\xc3", [0xC3]), ("\\xa9", [0xA9])]


def test_the_events_of_a_response() -> None:
    call = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{"}}]
    rest = [{"index": 0, "function": {"arguments": "}"}}]
    script = [
        response("", [1], reasoning_content=b"Hm."),
        response("Yes", [2]),
        response("", [3], tool_calls=json.dumps(call).encode()),
        response("", [4], "tool_calls", tool_calls=json.dumps(rest).encode()),
        FINAL,
    ]
    body = {"model": "tandem", "input": "Hello?", "stream": True}
    streamed = post("/v1/responses", body, AsyncFakeTransport(script)).text
    events = [json.loads(block.split("\ndata: ")[1]) for block in streamed.strip().split("\n\n")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    assert final["output"][2]["arguments"] == "{}"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    whole = post("/v1/responses", {**body, "stream": False}, AsyncFakeTransport(script)).json()
    for mine, other in zip(whole["output"], final["output"], strict=True):
        assert {**mine, "id": ""} == {**other, "id": ""}
    assert whole["usage"] == final["usage"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 1
