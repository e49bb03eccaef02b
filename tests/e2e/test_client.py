# SPDX-License-Identifier: Apache-2.0
"""tandem_client against a real Triton server."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tandem_client import (
    AsyncTandemClient,
    Completion,
    ConnectionFailedError,
    RequestTimeoutError,
    ServerError,
    TandemClient,
)
from tandem_client.payload import build_payload
from tandem_client.transport import GrpcTransport
from tandem_client.wire import InferRequest

PROMPT = "def read_lines(path):\n"
LONG: dict[str, Any] = {"max_tokens": 2000, "sampling": {"ignore_eos": True}}
# More than the engine runs at once, so that requests which are not freed keep a new one waiting.
NUM_LEFT = 40


@pytest.fixture
def client(server: Any) -> Iterator[TandemClient]:
    with TandemClient(server.grpc_url) as opened:
        yield opened


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chunks_stream_and_end_with_usage(client: TandemClient) -> None:
    chunks = list(client.generate(PROMPT, max_tokens=16, sampling={"ignore_eos": True}, logprobs=True))
    assert len(chunks) > 1
    assert all(chunk.finish_reason is None and chunk.usage is None for chunk in chunks[:-1])
    whole = Completion.from_chunks(chunks)
    assert whole.finish_reason == "length"
    assert whole.text
    assert len(whole.token_ids) == whole.usage.num_output_tokens == 16
    assert whole.usage.num_input_tokens > 0
    assert whole.logprobs is not None
    assert len(whole.logprobs) == 16
    assert all(value <= 0 for value in whole.logprobs)
    assert whole.usage.arrival_time_ns <= whole.usage.first_token_time_ns <= whole.usage.last_token_time_ns


def test_async_and_sync_answers_are_equal(client: TandemClient, server: Any) -> None:
    async def run() -> list[Completion]:
        async with AsyncTandemClient(server.grpc_url) as opened:
            return await asyncio.gather(*(opened.complete(PROMPT, max_tokens=12, logprobs=True) for _ in range(4)))

    alone = client.complete(PROMPT, max_tokens=12, logprobs=True)
    for completion in asyncio.run(run()):
        assert (completion.text, completion.token_ids) == (alone.text, alone.token_ids)
        assert completion.logprobs == alone.logprobs


def test_a_session_of_three_turns_remembers_and_is_freed(client: TandemClient, server: Any) -> None:
    texts = ("What does os.path.join do?", "And os.path.split?", "Which one is the inverse?")
    with client.session() as session:
        answers = [session.complete(messages=user(text), max_tokens=8, logprobs=True) for text in texts]
        assert session.is_open
    assert all(answer.finish_reason in ("stop", "length") for answer in answers)
    fresh = client.complete(messages=user(texts[2]), max_tokens=8, logprobs=True)
    assert answers[2].logprobs != fresh.logprobs

    transport = GrpcTransport(server.grpc_url)
    follow_up = InferRequest(
        model="tandem",
        request_id="follow-up",
        sequence_id=session.sequence_id,
        sequence_start=False,
        sequence_end=False,
        payload=build_payload("more", timeout_s=30),
    )
    with pytest.raises(ServerError, match="START"):
        list(transport.send(follow_up))
    transport.close()


def test_an_async_session(server: Any) -> None:
    async def run() -> list[Completion]:
        async with AsyncTandemClient(server.grpc_url) as opened, opened.session() as session:
            return [await session.complete(messages=user(text), max_tokens=4) for text in ("One?", "Two?", "Three?")]

    assert all(answer.finish_reason in ("stop", "length") for answer in asyncio.run(run()))


def test_answers_left_early_free_the_server(client: TandemClient) -> None:
    started_s = time.monotonic()
    for _ in range(NUM_LEFT):
        for _ in client.generate(PROMPT, **LONG):
            break
    assert client.complete(PROMPT, max_tokens=4).usage.num_output_tokens == 4
    assert time.monotonic() - started_s < 20


def test_leaving_one_answer_leaves_the_other(client: TandemClient) -> None:
    kept = client.generate(PROMPT, max_tokens=40, sampling={"ignore_eos": True})
    first = next(kept)
    for _ in client.generate(PROMPT, **LONG):
        break
    whole = Completion.from_chunks([first, *kept])
    assert whole.usage.num_output_tokens == 40


def test_a_session_goes_on_after_an_answer_left_early(client: TandemClient) -> None:
    with client.session() as session:
        for _ in session.generate(messages=user("Tell me all about sockets."), **LONG):
            break
        assert session.complete(messages=user("Stop."), max_tokens=4, timeout_s=30).finish_reason in ("stop", "length")


def test_server_errors_have_code_and_text(client: TandemClient, server: Any) -> None:
    with pytest.raises(ServerError, match="max_tokens") as caught:
        client.complete(PROMPT, sampling={"max_tokens": "many"})
    assert caught.value.code == "INVALID_ARG"
    with TandemClient(server.grpc_url, "no-such-model") as other, pytest.raises(ServerError, match="no-such-model"):
        other.complete(PROMPT)
    with pytest.raises(ConnectionFailedError, match=r"127\.0\.0\.1:1:"):
        TandemClient("127.0.0.1:1").complete(PROMPT)


def test_a_timeout_cancels(client: TandemClient) -> None:
    started_s = time.monotonic()
    with pytest.raises(RequestTimeoutError):
        client.complete(PROMPT, timeout_s=0.5, **LONG)
    assert time.monotonic() - started_s < 5


def heed_ctrl_c() -> None:
    """Tests that run in a shell's background inherit an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def tandem(server: Any, *args: str, **popen: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from tandem_client.cli import main; main()", *args, "--url", server.grpc_url]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_ctrl_c, **popen)


def test_generate_command(client: TandemClient, server: Any) -> None:
    process = tandem(server, "generate", PROMPT, "--max-tokens", "12", "--stats")
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, client.complete(PROMPT, max_tokens=12).text + "\n")
    assert " tokens in" in stderr


def test_ctrl_c_ends_the_generate_command(server: Any) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = tandem(server, "generate", PROMPT, "--max-tokens", "2000", "--sampling", '{"ignore_eos": true}', env=env)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_chat_command_over_a_pipe(server: Any) -> None:
    process = tandem(server, "chat", "--max-tokens", "6", stdin=subprocess.PIPE)
    stdout, stderr = process.communicate("What is a tuple?\nAnd a list?\n/quit\n", timeout=60)
    assert (process.returncode, stderr) == (0, "")
    assert stdout.count("\n") >= 2
