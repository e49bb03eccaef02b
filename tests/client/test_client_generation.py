# SPDX-License-Identifier: Apache-2.0
"""Answers from responses, for the sync and the asyncio client alike."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_transport import FINAL, AsyncFakeTransport, FakeTransport, Script, answer, response
from tandem_client import (
    AsyncTandemClient,
    Chunk,
    Completion,
    DrafterUsage,
    IncompleteStreamError,
    RequestTimeoutError,
    ServerError,
    TandemClient,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from tandem_client.wire import InferResponse

Collect = Callable[..., tuple[list[Chunk], Exception | None]]


def collect_sync(script: Script, **options: Any) -> tuple[list[Chunk], Exception | None]:
    chunks: list[Chunk] = []
    try:
        for chunk in TandemClient(transport=FakeTransport(script)).generate("x", **options):
            chunks.append(chunk)
    except Exception as error:
        return chunks, error
    return chunks, None


def collect_async(script: Script, **options: Any) -> tuple[list[Chunk], Exception | None]:
    async def run() -> tuple[list[Chunk], Exception | None]:
        chunks: list[Chunk] = []
        try:
            async for chunk in AsyncTandemClient(transport=AsyncFakeTransport(script)).generate("x", **options):
                chunks.append(chunk)
        except Exception as error:
            return chunks, error
        return chunks, None

    return asyncio.run(run())


@pytest.fixture(params=[collect_sync, collect_async], ids=["sync", "async"])
def collect(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_chunks_follow_the_responses(collect: Collect) -> None:
    perf = {"total_draft_tokens": 4, "total_accepted_draft_tokens": 3, "acceptance_rate": 0.75, "arrival_time_ns": 9}
    perf |= {"acceptance_length": 1.5, "num_rounds": 3, "num_cached_tokens": 2}
    perf["drafter_statistics"] = b'{"mtp": {"drafted": 3, "accepted": 3, "share": 1.0}}'
    chunks, error = collect([response("Hé", [1, 2]), response("", [3]), response("!", [4], "length", **perf), FINAL])
    assert error is None
    assert [(chunk.text, chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
        ("Hé", (1, 2), None),
        ("", (3,), None),
        ("!", (4,), "length"),
    ]
    assert [chunk.usage for chunk in chunks[:2]] == [None, None]
    assert chunks[2].usage == Usage(
        num_input_tokens=7,
        num_output_tokens=4,
        num_draft_tokens=4,
        num_accepted_tokens=3,
        acceptance_rate=0.75,
        acceptance_len=1.5,
        num_rounds=3,
        num_cached_tokens=2,
        drafters={"mtp": DrafterUsage(drafted=3, accepted=3, share=1.0)},
        arrival_time_ns=9,
    )


def test_the_last_data_response_may_be_the_final_one(collect: Collect) -> None:
    last = InferResponse(response("a", [1], "stop").outputs, is_final=True)
    chunks, error = collect([last])
    assert error is None
    assert [chunk.finish_reason for chunk in chunks] == ["stop"]


def test_logprobs_are_read(collect: Collect) -> None:
    entries = json.dumps([{"token_id": 1, "logprob": -0.5}, {"token_id": 2, "logprob": -1.25}]).encode()
    chunks, _ = collect([response("ab", [1, 2], "stop", logprobs=entries), FINAL], logprobs=True)
    assert chunks[0].logprobs == (-0.5, -1.25)
    assert collect(answer("a"))[0][0].logprobs is None


def test_an_error_after_the_first_chunk_is_raised_after_it(collect: Collect) -> None:
    chunks, error = collect([response("a", [1]), ServerError("INTERNAL", "round failed"), FINAL])
    assert [chunk.text for chunk in chunks] == ["a"]
    assert isinstance(error, ServerError)
    assert error.code == "INTERNAL"


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ([], "final response"),
        ([response("a", [1])], "final response"),
        ([response("a", [1], "stop")], "final response"),
        ([response("a", [1]), FINAL], "finish reason"),
    ],
)
def test_a_stream_that_ends_too_early_raises(collect: Collect, script: Script, missing: str) -> None:
    chunks, error = collect(script)
    assert len(chunks) == sum(bool(item.outputs) for item in script if isinstance(item, InferResponse))
    assert isinstance(error, IncompleteStreamError)
    assert missing in str(error)


def test_a_timeout_is_raised_as_such(collect: Collect) -> None:
    _, error = collect([response("a", [1]), RequestTimeoutError("late")], timeout_s=1.0)
    assert isinstance(error, TimeoutError)


def test_timeout_and_model_reach_the_transport() -> None:
    transport = FakeTransport(answer("a"))
    TandemClient(model="other", transport=transport).complete("x", timeout_s=1.5)
    assert transport.requests[0].payload.timeout_s == 1.5
    assert transport.requests[0].model == "other"


def test_requests_outside_a_session_are_sequences_of_their_own() -> None:
    transport = FakeTransport(answer("a"), answer("b"))
    client = TandemClient(transport=transport)
    client.complete("x")
    client.complete("y")
    assert transport.flags == ["SE", "SE"]
    assert len({request.sequence_id for request in transport.requests}) == 2


def test_complete_joins_the_chunks() -> None:
    completion = TandemClient(transport=FakeTransport(answer("a", "b", "c"))).complete("x")
    assert (completion.text, completion.token_ids, completion.logprobs) == ("abc", (0, 1, 2), None)
    assert (completion.finish_reason, completion.usage.num_output_tokens) == ("stop", 3)


def test_break_cancels_on_the_server() -> None:
    transport = FakeTransport(answer("a", "b"), answer("c", "d"))
    client = TandemClient(transport=transport)
    other = client.generate("y")
    for _ in client.generate("x"):
        break
    assert [stream.is_cancelled for stream in transport.streams] == [False, True]
    assert [chunk.text for chunk in other] == ["a", "b"]
    assert not transport.streams[0].is_cancelled


def test_close_cancels_and_exhausts() -> None:
    transport = FakeTransport(answer("a", "b"))
    with TandemClient(transport=transport).generate("x") as chunks:
        next(chunks)
    assert transport.streams[0].is_cancelled
    assert list(chunks) == []


def test_close_in_another_thread_ends_the_iteration() -> None:
    waiting, closed = threading.Event(), threading.Event()

    class Blocking(FakeTransport):
        def send(self, request: Any) -> Any:
            stream = super().send(request)

            def wait() -> Any:
                waiting.set()
                closed.wait(10)
                yield ServerError("CANCELLED", "by the client")

            stream._items = wait()
            return stream

    chunks = TandemClient(transport=Blocking()).generate("x")

    def leave() -> None:
        waiting.wait(10)
        chunks.close()
        closed.set()

    thread = threading.Thread(target=leave)
    thread.start()
    assert list(chunks) == []
    thread.join()


def test_the_iterator_is_exhausted_after_an_error() -> None:
    chunks = TandemClient(transport=FakeTransport([ServerError("INTERNAL", "x"), response("late")])).generate("x")
    with pytest.raises(ServerError):
        next(chunks)
    assert list(chunks) == []


def test_async_break_cancels_on_the_server() -> None:
    async def run() -> AsyncFakeTransport:
        transport = AsyncFakeTransport(answer("a", "b"))
        async with AsyncTandemClient(transport=transport) as client:
            async for _ in client.generate("x"):
                break
            assert transport.streams[0].is_cancelled
        return transport

    assert asyncio.run(run()).is_closed


def test_a_cancelled_task_cancels_on_the_server() -> None:
    async def run() -> bool:
        transport = AsyncFakeTransport([response("a", [1]), asyncio.CancelledError()])
        with pytest.raises(asyncio.CancelledError):
            await AsyncTandemClient(transport=transport).complete("x")
        return transport.streams[0].is_cancelled

    assert asyncio.run(run())


def test_usage_rates() -> None:
    ms = 1_000_000
    usage = Usage(num_output_tokens=11, arrival_time_ns=ms, first_token_time_ns=51 * ms, last_token_time_ns=551 * ms)
    assert usage.time_to_first_token_s == pytest.approx(0.05)
    assert usage.decode_tokens_per_s == pytest.approx(20.0)
    assert Usage().time_to_first_token_s is None
    assert Usage(num_output_tokens=1, first_token_time_ns=ms, last_token_time_ns=ms).decode_tokens_per_s is None


def test_the_client_closes_its_transport() -> None:
    transport = FakeTransport()
    with TandemClient(transport=transport):
        assert not transport.is_closed
    assert transport.is_closed


def test_calls_and_reasoning_are_joined(collect: Collect) -> None:
    first = b'[{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}]'
    rest = b'[{"index": 0, "function": {"arguments": "{}"}}, {"index": 1, "id": "call_2", "type": "function", '
    rest += b'"function": {"name": "g", "arguments": "[1]"}}]'
    script = [
        response(reasoning_content=b"hm", tool_calls=first),
        response("x", [1], "tool_calls", reasoning_content=b"!", tool_calls=rest),
        FINAL,
    ]
    chunks, error = collect(script)
    assert error is None
    assert chunks[0].tool_calls == (ToolCallDelta(index=0, id="call_1", name="f"),)
    whole = Completion.from_chunks(chunks)
    assert (whole.text, whole.reasoning, whole.finish_reason) == ("x", "hm!", "tool_calls")
    assert whole.tool_calls == (
        ToolCall(id="call_1", name="f", arguments="{}"),
        ToolCall(id="call_2", name="g", arguments="[1]"),
    )


def choice(index: int, *args: Any, **outputs: Any) -> InferResponse:
    return response(*args, choice_index=index, **outputs)


CHOICES = [
    choice(1, "b", [2]),
    choice(0, "a", [1, 5]),
    choice(1, "!", [3], "length", seed=8),
    choice(0, "", [], "stop", seed=7),
]


def test_chunks_tell_whose_they_are(collect: Collect) -> None:
    chunks, error = collect([*CHOICES, FINAL], n=2)
    assert error is None
    assert [(chunk.choice_index, chunk.text, chunk.finish_reason) for chunk in chunks] == [
        (1, "b", None),
        (0, "a", None),
        (1, "!", "length"),
        (0, "", "stop"),
    ]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [(usage.num_output_tokens, usage.num_input_tokens, usage.seed) for usage in usages] == [(2, 7, 8), (2, 7, 7)]


def test_a_completion_has_all_choices() -> None:
    answer = TandemClient(transport=FakeTransport([*CHOICES, FINAL])).complete("x", n=2)
    assert (answer.text, answer.finish_reason) == ("a", "stop")
    assert [(item.text, item.token_ids, item.usage.seed) for item in answer.choices] == [
        ("a", (1, 5), 7),
        ("b!", (2, 3), 8),
    ]


def test_a_single_answer_is_its_only_choice() -> None:
    single = TandemClient(transport=FakeTransport(answer("a"))).complete("x")
    assert single.choices == (single,)


@pytest.mark.parametrize("asked", [{"n": 2}, {"sampling": {"n": "2"}}])
def test_a_stream_that_lacks_a_choices_end_raises(collect: Collect, asked: dict[str, Any]) -> None:
    _, error = collect([*CHOICES[:3], FINAL], **asked)
    assert isinstance(error, IncompleteStreamError)
    assert "finish reason" in str(error)
