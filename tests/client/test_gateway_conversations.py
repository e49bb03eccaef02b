# SPDX-License-Identifier: Apache-2.0
"""Which sequence a conversation's request goes to, with a fake transport; and that a lost one is never noticed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from fake_transport import FINAL, AsyncFakeTransport, Script, answer, response
from tandem_client import AsyncTandemClient, ConnectionFailedError, ServerError
from tandem_client.gateway.conversations import Conversations
from tandem_client.gateway.digests import message_digests, named_digest
from tandem_client.gateway.errors import ApiError
from tandem_client.payload import GenerateOptions
from tandem_client.wire import metadata

LOST = ServerError("INVALID_ARG", "sequence_id: no open sequence 'x' (never started ...); send sequence_start with ...")
REFUSED = ServerError(
    "UNKNOWN", "inference request for sequence x to model 'tandem' must specify the START flag on ..."
)
DROPPED = ServerError("UNAVAILABLE", "sequence 'x' was dropped for memory while ...; send sequence_start with the ...")
TOO_MANY = ServerError("UNAVAILABLE", "max_sessions: all 2 open sequences are busy; retry after 1 s")
UNKNOWN_FIELD = ServerError("INVALID_ARG", "strict: unknown sampling parameters: whole_conversation")
WRONG = ServerError("INVALID_ARG", "messages: no such role")


class Chat:
    """Sends conversations through one gateway."""

    def __init__(self, *scripts: Script, max_sequences: int = 2, idle_s: float = 300.0) -> None:
        self.transport = AsyncFakeTransport(*scripts)
        self.now_s = 0.0
        client = AsyncTandemClient(transport=self.transport)
        self.conversations = Conversations(client, max_sequences=max_sequences, idle_s=idle_s, clock=lambda: self.now_s)

    def start(self, *texts: str, key: str = "", name: str | None = None, **options: Any) -> Any:
        messages = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]
        sent: GenerateOptions = {"messages": messages, **options}  # type: ignore[typeddict-item]
        digest = None if name is None else named_digest(key, name)
        return self.conversations.generate(message_digests(key, messages), sent, name=digest)

    async def say(self, *texts: str, **values: Any) -> str:
        async with self.start(*texts, **values) as chunks:
            return "".join([chunk.text async for chunk in chunks])

    @property
    def flags(self) -> list[str]:
        return self.transport.flags

    @property
    def sequences(self) -> list[int]:
        """The requests' sequences, numbered as they came."""
        ids = [request.sequence_id for request in self.transport.requests]
        return [list(dict.fromkeys(ids)).index(item) for item in ids]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def answers(number: int) -> list[Script]:
    return [answer("ok") for _ in range(number)]


def test_a_conversation_goes_on_in_its_sequence_once_it_has_an_answer() -> None:
    async def test() -> None:
        chat = Chat(*answers(4))
        for turn in (["a"], ["a", "b", "c"], ["a", "b", "c", "d", "e"], ["a", "b", "c", "d", "e", "f", "g"]):
            assert await chat.say(*turn) == "ok"
        assert chat.flags == ["SE", "S", "", ""]
        assert chat.sequences == [0, 1, 1, 1]
        (_, *turns) = [request.payload.inputs["sampling_parameters"][0] for request in chat.transport.requests[1:]]
        assert all(b'"whole_conversation": true' in turn for turn in turns)

    run(test)


def test_a_conversation_keeps_its_server_behind_a_proxy_from_the_first_turn() -> None:
    """Also when its sequence is begun anew, and when it ends."""

    async def test() -> None:
        chat = Chat(*answers(2), [LOST], *answers(3))
        for turn in (["a"], ["a", "b", "c"], ["a", "b", "c", "d", "e"], ["x"]):
            await chat.say(*turn)
        await chat.conversations.close()
        assert chat.flags == ["SE", "S", "", "S", "SE", "Ex"]
        (*routes, other, end) = [metadata(request) for request in chat.transport.requests]
        assert set(routes) == {end}
        assert other != end

    run(test)


def test_every_turn_brings_the_whole_conversation() -> None:
    async def test() -> None:
        chat = Chat(*answers(2))
        await chat.say("a", "b", "c")
        await chat.say("a", "b", "c", "d", "e", sampling={"cache_salt": "s"})
        sent = chat.transport.requests[-1].payload.inputs
        assert sent["messages"][0].count(b"content") == 5
        assert sent["sampling_parameters"][0] == b'{"cache_salt": "s", "whole_conversation": true, "strict": true}'

    run(test)


@pytest.mark.parametrize(
    ("second", "sequence"),
    [
        (["a", "b", "c"], 0),  # asked again
        (["a", "b", "c", "d", "e"], 0),
        (["a", "b", "x"], 1),  # edited
        (["a", "x", "c", "d", "e"], 1),
        (["x", "b", "c", "d", "e"], 1),
    ],
)
def test_the_sequence_is_that_of_a_conversation_it_begins_with(second: Sequence[str], sequence: int) -> None:
    async def test() -> None:
        chat = Chat(*answers(2))
        await chat.say("a", "b", "c")
        await chat.say(*second)
        assert chat.sequences == [0, sequence]

    run(test)


def test_the_longest_conversation_that_it_begins_with_counts() -> None:
    async def test() -> None:
        chat = Chat(*answers(3))
        await chat.say("a", "b", "c", "d", "e")
        await chat.say("a", "b", "c")  # the end edited away
        await chat.say("a", "b", "c", "d", "e", "f", "g")
        assert chat.sequences == [0, 1, 0]

    run(test)


def test_keys_share_no_sequence() -> None:
    async def test() -> None:
        chat = Chat(*answers(3))
        for key in ("alice", "bob", "alice"):
            await chat.say("a", "b", "c", key=key)
        assert chat.sequences == [0, 1, 0]

    run(test)


def test_a_named_conversation_keeps_its_sequence_from_the_first_turn_whatever_it_says() -> None:
    async def test() -> None:
        chat = Chat(*answers(4), max_sequences=4)
        await chat.say("a", name="n")
        await chat.say("other", "b", "c", name="n")
        await chat.say("other", "b", "c", "d", "e")  # without the name
        await chat.say("a", name="n", key="bob")
        assert chat.sequences == [0, 0, 1, 2]
        assert chat.flags == ["S", "", "S", "S"]

    run(test)


def test_a_busy_sequence_is_left_alone() -> None:
    async def test() -> None:
        chat = Chat([response("one"), response("two", reason="stop"), FINAL], *answers(3))
        first = chat.start("a", "b", "c")
        await anext(first)
        await chat.say("a", "b", "c")
        await chat.say("a", "b", "c", "d", "e")
        assert [chunk.text async for chunk in first] == ["two"]
        await chat.say("a", "b", "c", "d", "e")
        assert chat.flags == ["S", "SE", "SE", ""]

    run(test)


@pytest.mark.parametrize(("error", "other"), [(LOST, ""), (DROPPED, ""), (REFUSED, "S")])
def test_a_lost_sequence_begins_anew_under_its_id(error: ServerError, other: str) -> None:
    """What the engine dropped says nothing of others; what Triton server doesn't know was lost in a restart, as all."""

    async def test() -> None:
        chat = Chat(*answers(2), [error], *answers(2))
        await chat.say("other", "b", "c")
        await chat.say("a", "b", "c")
        assert await chat.say("a", "b", "c", "d", "e") == "ok"
        assert await chat.say("other", "b", "c", "d", "e") == "ok"
        assert chat.sequences == [0, 1, 1, 1, 0]
        assert chat.flags == ["S", "S", "", "S", other]

    run(test)


def test_a_broken_connection_may_be_a_restart() -> None:
    async def test() -> None:
        chat = Chat(*answers(1), [response("one"), ConnectionFailedError("gone")], *answers(1))
        await chat.say("a", "b", "c")
        with pytest.raises(ConnectionFailedError):
            await chat.say("a", "b", "c")
        await chat.say("a", "b", "c")
        assert chat.flags == ["S", "", "S"]

    run(test)


@pytest.mark.parametrize("error", [TOO_MANY, UNKNOWN_FIELD])
def test_what_no_sequence_can_take_is_sent_by_itself(error: ServerError) -> None:
    async def test() -> None:
        chat = Chat([error], *answers(2))
        assert await chat.say("a", "b", "c") == "ok"
        assert chat.flags == ["S", "SE"]
        assert b"whole_conversation" not in b"".join(
            chat.transport.requests[1].payload.inputs.get("sampling_parameters", [b""])
        )

    run(test)


def test_other_errors_are_the_clients_and_leave_the_sequence_free() -> None:
    async def test() -> None:
        chat = Chat([WRONG], [TOO_MANY], [TOO_MANY], *answers(1))
        for error in (WRONG, TOO_MANY):
            with pytest.raises(ServerError) as caught:
                await chat.say("a", "b", "c")
            assert caught.value is error
        await chat.say("a", "b", "c")
        assert chat.flags == ["S", "S", "SE", "S"]

    run(test)


def test_values_that_make_no_request_are_the_clients_mistake() -> None:
    async def test() -> None:
        chat = Chat(*answers(1))
        with pytest.raises(ApiError, match="stop_token_ids: must be 0 to"):
            await chat.say("a", "b", "c", stop_token_ids=[-1])
        await chat.say("a", "b", "c")
        assert chat.flags == ["S"]

    run(test)


def test_an_error_after_text_is_no_reason_to_begin_anew() -> None:
    async def test() -> None:
        chat = Chat([response("one"), DROPPED])
        chunks = chat.start("a", "b", "c")
        assert (await anext(chunks)).text == "one"
        with pytest.raises(ServerError):
            await anext(chunks)
        assert chat.flags == ["S"]

    run(test)


def test_the_least_recently_used_sequence_is_ended_for_another() -> None:
    async def test() -> None:
        chat = Chat(*answers(9))
        for first in ("a", "b", "a", "c", "b"):
            await chat.say(first, "x", "y")
            await asyncio.sleep(0)
        assert len(chat.conversations) == 2
        assert chat.flags == ["S", "S", "", "S", "Ex", "S", "Ex"]
        assert chat.sequences == [0, 1, 0, 2, 1, 3, 0]

    run(test)


def test_where_all_are_busy_the_next_is_sent_by_itself() -> None:
    async def test() -> None:
        chat = Chat(*([response("one"), response("two", reason="stop"), FINAL] for _ in range(3)))
        started = [chat.start(first, "x", "y") for first in "abc"]
        for chunks in started:
            await anext(chunks)
        assert chat.flags == ["S", "S", "SE"]

    run(test)


def test_a_sequence_that_was_idle_for_long_is_begun_anew_without_asking() -> None:
    async def test() -> None:
        chat = Chat(*answers(3), idle_s=100)
        await chat.say("a", "b", "c")
        chat.now_s = 79
        await chat.say("a", "b", "c")
        chat.now_s += 81
        await chat.say("a", "b", "c")
        assert chat.flags == ["S", "", "S"]
        assert chat.sequences == [0, 0, 0]

    run(test)


@pytest.mark.parametrize("options", [{"n": 2}, {"sampling": {"n": 2}}, {"prompt_logprobs": 0}])
def test_what_a_sequence_cannot_answer_is_sent_by_itself(options: dict[str, Any]) -> None:
    async def test() -> None:
        chat = Chat()
        chunks = chat.start("a", "b", "c", **options)
        with pytest.raises(Exception, match="without"):  # the script's answer is empty
            await anext(chunks)
        assert chat.flags == ["SE"]

    run(test)


def test_turned_off_all_are_sent_by_themselves() -> None:
    async def test() -> None:
        chat = Chat(*answers(2), max_sequences=0)
        await chat.say("a", "b", "c")
        await chat.say("a", name="n")
        assert chat.flags == ["SE", "SE"]

    run(test)


def test_leaving_cancels_the_request_and_frees_the_sequence() -> None:
    async def test() -> None:
        chat = Chat([response("one"), response("two")], *answers(1))
        async with chat.start("a", "b", "c") as chunks:
            await anext(chunks)
        assert chat.transport.streams[0].is_cancelled
        assert [chunk async for chunk in chunks] == []
        await chat.say("a", "b", "c")
        assert chat.flags == ["S", ""]

    run(test)


def test_closing_ends_the_sequences_that_the_server_may_have() -> None:
    async def test() -> None:
        chat = Chat(*answers(4), idle_s=100)
        await chat.say("a", "b", "c")
        chat.now_s = 90
        await chat.say("b", "b", "c")
        await chat.conversations.close()
        assert chat.flags == ["S", "S", "Ex"]
        assert chat.sequences == [0, 1, 1]
        assert len(chat.conversations) == 0

    run(test)


def test_digests_hold_no_text_and_tell_conversations_apart() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    digests = message_digests("key", messages)
    assert [len(digest) for digest in digests] == [16, 16]
    assert message_digests("key", messages[:1]) == digests[:1]
    assert message_digests("other", messages)[0] != digests[0]
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {**messages[1], "tool_calls": None}]
    assert message_digests("key", in_parts) == digests
    assert named_digest("key", "a") not in message_digests("key", [{"role": "user", "content": "a"}])
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert message_digests("key", [messages[0], {**messages[1], "tool_calls": calls}])[1] != digests[1]
