# SPDX-License-Identifier: Apache-2.0
"""Sessions that resume on a server that does not know them."""

import asyncio
import json
from typing import Any

import pytest
from fake_transport import AsyncFakeTransport, FakeTransport, answer, response
from tandem_client import AsyncTandemClient, ConnectionFailedError, ServerError, TandemClient
from tandem_client.wire import metadata

UNKNOWN = ServerError(
    "UNKNOWN",
    "inference request for sequence chat-1 to model 'tandem' must specify the START flag on the first request of the "
    "sequence",
)
DROPPED = ServerError("INVALID_ARG", "sequence_id: no open sequence 'chat-1' (idle for too long ...)")


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def sent(transport: FakeTransport) -> list[list[str]]:
    """The contents of the messages of every turn."""
    turns = [request.payload.inputs for request in transport.requests if "messages" in request.payload.inputs]
    return [[message["content"] for message in json.loads(inputs["messages"].item())] for inputs in turns]


@pytest.mark.parametrize("error", [UNKNOWN, DROPPED])
def test_a_turn_that_the_server_can_t_place_is_sent_with_all_before_it(error: ServerError) -> None:
    transport = FakeTransport(answer("a", "A"), answer("b"), [error], answer("c"), answer("d"))
    with TandemClient(transport=transport).session("chat-1", resume=True) as session:
        texts = [session.complete(messages=ask(text)).text for text in ("one", "two", "three", "four")]
    assert texts == ["aA", "b", "c", "d"]
    assert sent(transport) == [["one"], ["two"], ["three"], ["one", "aA", "two", "b", "three"], ["four"]]
    assert transport.flags == ["S", "", "", "S", "", "Ex"]
    ids = [request.sequence_id for request in transport.requests]
    assert ids[:3] == ["chat-1"] * 3
    assert ids[3:] == [session.sequence_id] * 3
    assert ids[3] != "chat-1"  # which another server may still have, without the third turn
    assert {metadata(request)[0][1] for request in transport.requests} == {"chat-1"}


def test_the_same_on_asyncio() -> None:
    async def run() -> list[list[str]]:
        transport = AsyncFakeTransport(answer("a"), [UNKNOWN], answer("b"))
        async with AsyncTandemClient(transport=transport).session(resume=True) as session:
            texts = [(await session.complete(messages=ask(text))).text for text in ("one", "two")]
        assert texts == ["a", "b"]
        assert transport.flags == ["S", "", "S", "Ex"]
        return sent(transport)

    assert asyncio.run(run()) == [["one"], ["two"], ["one", "a", "two"]]


def test_a_turn_that_broke_off_is_not_part_of_the_conversation() -> None:
    broken = [response("half"), ConnectionFailedError("gone")]
    transport = FakeTransport(answer("a"), broken, [UNKNOWN], answer("c"))
    with TandemClient(transport=transport).session(resume=True) as session:
        session.complete(messages=ask("one"))
        with pytest.raises(ConnectionFailedError):
            session.complete(messages=ask("two"))
        session.complete(messages=ask("again"))
    assert sent(transport)[-1] == ["one", "a", "again"]


def test_a_closed_session_begins_anew() -> None:
    transport = FakeTransport(answer("a"), [], answer("b"), [UNKNOWN], answer("c"))
    session = TandemClient(transport=transport).session(resume=True)
    session.complete(messages=ask("one"))
    session.close()
    session.complete(messages=ask("two"))
    session.complete(messages=ask("three"))
    assert sent(transport)[-1] == ["two", "b", "three"]


def test_what_resuming_can_t_cure_is_raised() -> None:
    refused = ServerError("UNAVAILABLE", "queue full")
    transport = FakeTransport(answer("a"), [refused], [UNKNOWN], [UNKNOWN])
    with TandemClient(transport=transport).session(resume=True) as session:
        session.complete(messages=ask("one"))
        with pytest.raises(ServerError, match="queue full"):
            session.complete(messages=ask("two"))
        with pytest.raises(ServerError, match="START"):  # the server does not even take a first turn
            session.complete(messages=ask("three"))
    assert transport.flags == ["S", "", "", "S", "Ex"]


def test_an_answer_with_tool_calls_can_t_be_said_again() -> None:
    call = json.dumps([{"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}])
    transport = FakeTransport([response("", [1], "tool_calls", tool_calls=call.encode()), *answer("")[1:]], [UNKNOWN])
    with TandemClient(transport=transport).session(resume=True) as session:
        list(session.generate(messages=ask("one")))
        with pytest.raises(ServerError, match="START"):
            session.complete(messages=ask("two"))


def test_only_messages_resume_and_only_where_asked_for() -> None:
    transport = FakeTransport(answer("a"), [UNKNOWN])
    client = TandemClient(transport=transport)
    with pytest.raises(ValueError, match="messages: a session that resumes"):
        client.session(resume=True).generate("text")
    assert transport.requests == []
    session = client.session()
    session.complete(messages=ask("one"))
    with pytest.raises(ServerError, match="START"):
        session.complete(messages=ask("two"))
