# SPDX-License-Identifier: Apache-2.0
"""Clients of a real Triton server that cancel, hang up or die: their memory returns, and others do not notice."""

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from triton_calls import EXACTLY, FULL_ANSWER, MODEL_REPOSITORY, PROMPT, Answer, GrpcStream, ask, metrics, wait_until
from triton_calls import wait_until_free as wait_until_all_is_free

# Would run for many seconds.
LONG = {"text_input": PROMPT, "max_tokens": 4000, "sampling_parameters": '{"ignore_eos": true, "drafter": "none"}'}
OTHER = {"text_input": PROMPT, "max_tokens": 300, "sampling_parameters": EXACTLY}
NUM_STREAMS = 32


def cancel_grpc(server: Any, model: str = "tandem") -> None:
    with GrpcStream(server.grpc_url) as leaving:
        leaving.send(model=model, stream=True, **LONG)
        next(leaving.responses())


def cancel_through_the_front(server: Any) -> None:
    cancel_grpc(server, "tandem_generate")


def hang_up_on_a_stream(server: Any) -> None:
    connection = http.client.HTTPConnection(server.http_url, timeout=30)
    body = {"text_input": PROMPT, "max_tokens": 4000, "ignore_eos": True, "drafter": "none", "stream": True}
    connection.request("POST", "/v2/models/tandem_generate/generate_stream", json.dumps(body))
    reply = connection.getresponse()
    assert reply.readline().startswith(b"data: ")
    reply.close()
    connection.close()


def kill_a_client(server: Any, model: str = "tandem") -> None:
    command = [sys.executable, "-c", KILLED_CLIENT, server.grpc_url, model, json.dumps(LONG)]
    folder = str(MODEL_REPOSITORY.parent / "tests" / "e2e")
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "token\n"
        client.kill()


KILLED_CLIENT = """
import json
import sys
from triton_calls import GrpcStream
stream = GrpcStream(sys.argv[1])
stream.send(model=sys.argv[2], stream=True, **json.loads(sys.argv[3]))
for response in stream.responses():
    print("token", flush=True)
"""


def kill_a_client_of_the_front(server: Any) -> None:
    kill_a_client(server, "tandem_generate")


def stop_the_sequence(server: Any) -> None:
    with GrpcStream(server.grpc_url) as stream:
        stream.send("long", sequence=("stopped", "S"), stream=True, **LONG, **FULL_ANSWER)
        running = stream.responses("long")
        next(running)
        stream.send("stop", sequence=("stopped", "E"), stop=True)
        (closed,) = stream.responses("stop")
        assert closed.text_output == ""
        assert list(running)[-1].finish_reason == "cancelled"


WAYS = [
    cancel_grpc,
    cancel_through_the_front,
    hang_up_on_a_stream,
    kill_a_client,
    kill_a_client_of_the_front,
    stop_the_sequence,
]


@pytest.mark.parametrize("leave", WAYS)
def test_who_leaves_frees_all_and_spares_others(small_server: Any, leave: Callable[[Any], None]) -> None:
    expected = ask(small_server, **OTHER)
    cancelled = metrics(small_server)['tandem_requests_total{outcome="cancelled"}']
    with GrpcStream(small_server.grpc_url) as other:
        other.send(stream=True, **OTHER, **FULL_ANSWER)
        others = other.responses()
        first = next(others)
        leave(small_server)
        # Far sooner than its 4,000 tokens: the other one's 300 are not over yet, or just.
        assert Answer([first, *others]) == expected
    wait_until_all_is_free(small_server)
    wait_until(lambda: metrics(small_server)['tandem_requests_total{outcome="cancelled"}'] == cancelled + 1)


def test_who_leaves_a_queue_frees_its_place(small_server: Any) -> None:
    streams = [GrpcStream(small_server.grpc_url) for _ in range(4)]
    for opened in streams:
        opened.send(stream=True, **LONG)
    wait_until(lambda: metrics(small_server)["tandem_num_queued"] == 2)
    for opened in reversed(streams):
        opened.cancel()
    wait_until_all_is_free(small_server)


def test_a_client_that_leaves_plain_generate_costs_no_more_than_its_deadline(small_server: Any) -> None:
    """Triton server 2.51 does not read from that connection until the answer is there, so nobody learns of it."""
    timeouts = metrics(small_server)['tandem_requests_total{outcome="timeout"}']
    connection = http.client.HTTPConnection(small_server.http_url, timeout=30)
    body = {"text_input": PROMPT, "max_tokens": 4000, "ignore_eos": True, "drafter": "none", "timeout_ms": 1000}
    connection.request("POST", "/v2/models/tandem_generate/generate", json.dumps(body))
    wait_until(lambda: metrics(small_server)["tandem_num_active"] == 1)
    connection.close()
    wait_until(lambda: metrics(small_server)['tandem_requests_total{outcome="timeout"}'] == timeouts + 1)
    wait_until_all_is_free(small_server)
    assert ask(small_server, text_input=PROMPT, max_tokens=2).num_output_tokens == 2


def test_a_cancelled_turn_leaves_its_session_to_go_on(server: Any) -> None:
    with GrpcStream(server.grpc_url) as leaving:
        leaving.send(sequence=("leaving", "S"), stream=True, **LONG)
        next(leaving.responses())
    assert ask(server, text_input="x", max_tokens=2, sequence=("leaving", "E")).num_output_tokens == 2


def test_a_client_that_does_not_read_holds_up_nobody(server: Any) -> None:
    """Not the engine, not the front, not another stream: what it does not read waits outside of them."""
    expected = ask(server, **OTHER)
    host, port = server.http_url.split(":")
    body = {"text_input": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True, "return_logprobs": True}
    content = json.dumps(body)
    readers = []
    for _ in range(4):
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((host, int(port)))
        path = "/v2/models/tandem_generate/generate_stream"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        reader.sendall((head + content).encode())
        readers.append(reader)
    wait_until(lambda: metrics(server)["tandem_num_active"] == 4)
    assert ask(server, **OTHER) == expected
    wait_until(lambda: metrics(server)["tandem_num_active"] == 0)  # generated to the end, into buffers
    for reader in readers:
        reader.close()
    assert ask(server, **OTHER) == expected


def test_http_clients_that_hang_up_free_their_places(server: Any) -> None:
    connections = []
    for _ in range(NUM_STREAMS):
        connection = http.client.HTTPConnection(server.http_url, timeout=30)
        body = {"text_input": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v2/models/tandem_generate/generate_stream", json.dumps(body))
        connections.append(connection)
    assert connections[0].getresponse().readline().startswith(b"data: ")
    for connection in connections:
        connection.close()
    wait_until(lambda: metrics(server)["tandem_num_active"] == 0)
    assert ask(server, text_input=PROMPT, max_tokens=2).num_output_tokens == 2
