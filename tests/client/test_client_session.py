# SPDX-License-Identifier: Apache-2.0
"""The flags of a session's requests."""

import asyncio
import json

import pytest
from fake_transport import AsyncFakeTransport, FakeTransport, answer, response
from tandem_client import AsyncTandemClient, ConnectionFailedError, ServerError, TandemClient
from tandem_client.sequence import END_TIMEOUT_S


def test_three_turns() -> None:
    transport = FakeTransport(answer("a"), answer("b"), answer("c"))
    with TandemClient(transport=transport).session() as session:
        for text in ("one", "two", "three"):
            session.complete(messages=[{"role": "user", "content": text}])
    assert transport.flags == ["S", "", "", "Ex"]
    assert {request.sequence_id for request in transport.requests} == {session.sequence_id}
    sent = [json.loads(request.payload.inputs["messages"].item()) for request in transport.requests[:3]]
    assert [[message["content"] for message in messages] for messages in sent] == [["one"], ["two"], ["three"]]
    assert transport.requests[3].payload.timeout_s == END_TIMEOUT_S


def test_async_turns() -> None:
    async def run() -> list[str]:
        transport = AsyncFakeTransport(answer("a"), answer("b"))
        async with AsyncTandemClient(transport=transport).session("chat-1") as session:
            await session.complete("one")
            assert session.is_open
            assert [chunk.text async for chunk in session.generate("two")] == ["b"]
        assert not session.is_open
        assert {request.sequence_id for request in transport.requests} == {"chat-1"}
        return transport.flags

    assert asyncio.run(run()) == ["S", "", "Ex"]


def test_a_session_without_turns_sends_nothing() -> None:
    transport = FakeTransport()
    with TandemClient(transport=transport).session():
        pass
    assert transport.requests == []


def test_a_refused_first_turn_does_not_open_the_session() -> None:
    transport = FakeTransport([ServerError("INVALID_ARG", "bad")], answer("a"))
    with TandemClient(transport=transport).session() as session:
        with pytest.raises(ServerError):
            session.complete("bad")
        assert not session.is_open
        session.complete("good")
    assert transport.flags == ["S", "S", "Ex"]


def test_a_later_error_keeps_the_session_open() -> None:
    transport = FakeTransport(answer("a"), [ServerError("INVALID_ARG", "bad")], answer("c"))
    with TandemClient(transport=transport).session() as session:
        session.complete("one")
        with pytest.raises(ServerError):
            session.complete("bad")
        session.complete("three")
    assert transport.flags == ["S", "", "", "Ex"]


def test_an_exception_in_the_block_ends_the_sequence_and_is_kept() -> None:
    transport = FakeTransport(answer("a", "b"), [ConnectionFailedError("gone")])

    def interrupted() -> None:
        with TandemClient(transport=transport).session() as session:
            for _ in session.generate("one"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert transport.flags == ["S", "Ex"]


def test_an_error_at_the_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    transport = FakeTransport(answer("a"), [ServerError("UNKNOWN", "must specify the START flag")])
    with TandemClient(transport=transport).session(5) as session:
        session.complete("one")
    assert "session 5 was not ended" in caplog.text


def test_leaving_a_turn_early_keeps_the_session() -> None:
    transport = FakeTransport([response("a", [1]), response("b", [2])], answer("c"))
    with TandemClient(transport=transport).session() as session:
        for _ in session.generate("one"):
            break
        assert transport.streams[0].is_cancelled
        session.complete("two")
    assert transport.flags == ["S", "", "Ex"]


def test_close_starts_anew() -> None:
    transport = FakeTransport(answer("a"), answer(""), answer("b"))
    session = TandemClient(transport=transport).session()
    session.complete("one")
    session.close()
    session.complete("two")
    session.close()
    session.close()
    assert transport.flags == ["S", "Ex", "S", "Ex"]


@pytest.mark.parametrize("sequence_id", [0, -1, 2**63, ""])
def test_a_bad_sequence_id_is_refused(sequence_id: int | str) -> None:
    with pytest.raises(ValueError, match="sequence_id"):
        TandemClient(transport=FakeTransport()).session(sequence_id)
