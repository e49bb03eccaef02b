# SPDX-License-Identifier: Apache-2.0
"""What a gateway stands: crowds, clients that don't read or send nonsense, a backend that goes away and comes back."""

import asyncio
import http.client
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import schemathesis
from deployments import unanswered
from gateway_process import GatewayProcess, running_gateway
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from small_server import small_repository
from tandem_backend.serving.launcher import TritonServer
from triton_calls import metrics, wait_until

CHAT = "/v1/chat/completions"
CHUNKED = f"POST {CHAT} HTTP/1.1\r\nHost: gateway\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
NUM_STREAMS = 200
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def gateway(server: Any) -> Iterator[GatewayProcess]:
    with running_gateway(
        server.grpc_url, "--body-timeout-s", "1", "--head-timeout-s", "1", "--no-regenerate"
    ) as process:
        yield process


def body(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "What does json.dumps do?"}]
    return json.dumps({"model": "tandem", "messages": messages, "max_tokens": 8, **fields}).encode()


def post(gateway: GatewayProcess, content: bytes, **headers: str) -> tuple[int, dict[str, str], Any]:
    connection = http.client.HTTPConnection(gateway.address, timeout=30)
    connection.request("POST", CHAT, content, headers)
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return reply.status, {name.lower(): value for name, value in reply.getheaders()}, json.loads(text)


def opened(gateway: GatewayProcess) -> socket.socket:
    host, port = gateway.address.split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def raw(gateway: GatewayProcess, head: str, content: bytes = b"") -> socket.socket:
    connection = opened(gateway)
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: gateway\r\n{head}\r\n\r\n".encode() + content)
    return connection


def test_a_crowd_of_streams_gets_the_answer_of_one(gateway: GatewayProcess) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str:
        options: Any = json.loads(body(stream=True))
        return "".join(
            [chunk.choices[0].delta.content or "" async for chunk in await client.chat.completions.create(**options)]
        )

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="-", timeout=60, max_retries=10) as client:
            return await asyncio.gather(*(ask(client) for _ in range(NUM_STREAMS)))

    _, _, alone = post(gateway, body())
    assert asyncio.run(ask_all()) == [alone["choices"][0]["message"]["content"]] * NUM_STREAMS


def test_a_client_that_does_not_read_holds_up_nobody(gateway: GatewayProcess, server: Any) -> None:
    content = body(stream=True, max_tokens=2000, ignore_eos=True)
    with raw(gateway, f"Content-Length: {len(content)}", content):
        wait_until(lambda: metrics(server)["tandem_num_active"] == 1)
        assert post(gateway, body())[0] == 200
    wait_until(lambda: metrics(server)["tandem_num_active"] == 0, timeout_s=3)


@pytest.mark.parametrize(
    ("head", "content", "status"),
    [
        ("Content-Length: 9", b"{", 408),
        ("Content-Length: 99999999", b"{", 413),
        ("Content-Length: 3", b"{}}", 400),
        ("Content-Length: many", b"", 400),
        ("Transfer-Encoding: chunked", b'5\r\n{"a":\r\n', 408),
    ],
)
def test_odd_bodies(gateway: GatewayProcess, head: str, content: bytes, status: int) -> None:
    with raw(gateway, head, content) as connection:
        assert connection.recv(4096).startswith(f"HTTP/1.1 {status} ".encode())
    assert post(gateway, body())[0] == 200


def answered(connection: socket.socket) -> bytes:
    """All that the gateway sends until it closes."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", None),
        (b"GET /health HTTP/1.1\r\nHost: gate", "head_timeout"),
        (b"GET /health HTTP/1.1\r\nHost: gateway\r\nX-Long: " + b"x" * (600 << 10), "headers_too_large"),
        (CHUNKED + b"0\r\nX-Long: " + b"x" * (600 << 10), "headers_too_large"),
        (CHUNKED + b"1;long=" + b"x" * (600 << 10), "headers_too_large"),
        (b"GET / HTTP/9.9\r\n\r\n", "invalid_http"),
    ],
)
def test_odd_heads(gateway: GatewayProcess, content: bytes, code: str | None) -> None:
    with opened(gateway) as connection:
        connection.sendall(content)
        reply = answered(connection)
    assert reply == b"" if code is None else json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == code
    assert post(gateway, body())[0] == 200


def trickle(connection: socket.socket) -> None:
    for _ in range(200):
        time.sleep(0.1)
        connection.sendall(b"x")


@pytest.mark.parametrize(
    "head",
    [
        f"GET /health HTTP/1.1\r\nHost: gateway\r\nX: {'x' * 100}",
        f"POST {CHAT} HTTP/1.1\r\nHost: gateway\r\nContent-Length: 99999999\r\n\r\n{'x' * 100}",  # already refused
    ],
)
def test_who_sends_a_byte_at_a_time_is_cut_off(gateway: GatewayProcess, head: str) -> None:
    with opened(gateway) as connection:
        connection.sendall(head.encode())
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            trickle(connection)


def test_a_model_that_is_loaded_anew_is_used_again(reloaded_server: TritonServer) -> None:
    with running_gateway(reloaded_server.grpc_url, "--no-regenerate") as gateway:
        before = post(gateway, body())
        assert before[0] == 200
        reloaded_server.api.unload("tandem")
        status, headers, error = post(gateway, body())
        assert (status, error["error"]["code"]) == (503, "backend_unavailable")
        assert int(headers["retry-after"]) > 0
        reloaded_server.api.load("tandem", 120)
        after = post(gateway, body())
        assert after[0] == 200
        assert after[2]["choices"][0]["message"] == before[2]["choices"][0]["message"]
        # Answers and an error: now each metric is there that the dashboard and the alerts ask of a gateway.
        page = urllib.request.urlopen(f"{gateway.url}/metrics", timeout=30).read().decode()
        assert unanswered(page, by_gateway=True) == set()
        assert unanswered(page.replace('status="503"', 'status="200"'), by_gateway=True) == {
            """tandem_gateway_requests_total[('path', '!~', '/health|/metrics'), ('status', '=~', '5..')]"""
        }


@pytest.mark.slow
def test_a_backend_that_restarts_is_found_again(tmp_path: Path) -> None:
    repository = small_repository(tmp_path / "repository")
    with (
        TritonServer(repository, log_path=tmp_path / "first.log") as server,
        running_gateway(server.grpc_url) as gateway,
    ):
        port = int(server.grpc_url.rpartition(":")[2])
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0)
        options: Any = json.loads(body(stream=True, max_tokens=2000))
        stream = iter(client.chat.completions.create(**options, extra_body={"ignore_eos": True}))
        next(stream)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(openai.APIError):  # a stream that fails says so
            list(stream)
        status, headers, error = post(gateway, body())
        assert (status, error["error"]["code"]) == (503, "backend_unavailable")
        assert int(headers["retry-after"]) > 0
        with TritonServer(repository, log_path=tmp_path / "second.log", grpc_port=port):
            deadline = time.monotonic() + 5
            while post(gateway, body())[0] != 200:
                assert time.monotonic() < deadline, "the gateway did not find the backend again"
                time.sleep(0.2)


def check_operations(gateway: GatewayProcess, num_requests: int) -> None:
    """Random requests, right and wrong, to every operation of the description: no 5xx, and answers as described."""
    schema = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    with_bodies = [operation for operation in operations if operation.body]
    assert {operation.path for operation in with_bodies} == {CHAT, "/v1/completions", "/v1/responses"}
    num_sent = 0
    for operation in operations:

        @settings(
            max_examples=num_requests // len(with_bodies) + 1 if operation in with_bodies else 5,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            nonlocal num_sent
            num_sent += 1
            case.call_and_validate(checks=CHECKS, timeout=60)

        check()
    assert num_sent >= num_requests


def test_generated_requests(gateway: GatewayProcess) -> None:
    check_operations(gateway, 60)


@pytest.mark.slow
def test_many_generated_requests(gateway: GatewayProcess) -> None:
    check_operations(gateway, 2000)
