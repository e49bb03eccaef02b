# SPDX-License-Identifier: Apache-2.0
"""The gateway's state before a real Triton server: conversations in sequences, sampled answers again, the journal."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tandem_client import TandemClient
from tandem_client.gateway.app import create_app
from tandem_client.gateway.journal_file import read
from tandem_client.gateway.settings import Settings
from tandem_client.gateway.stateful import StatefulHooks
from triton_calls import GrpcStream, wait_until
from tritonclient.utils import InferenceServerException

QUESTIONS = ["What does zip() do?", "Show an example.", "And enumerate()?", "Write a function with both."]
SALTS = (f"gateway state {number}" for number in count())  # each test has prefixes of its own
MAX_TOKENS = 24


class Gateway:
    def __init__(self, http: TestClient, hooks: StatefulHooks) -> None:
        self.http, self.hooks = http, hooks
        self.salt = next(SALTS)

    def ask(self, messages: Any, headers: Mapping[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        body = {"model": "tandem", "messages": messages, "max_tokens": MAX_TOKENS, "cache_salt": self.salt, **fields}
        reply = self.http.post("/v1/chat/completions", json=body, headers=dict(headers or {}))
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    @property
    def sequence_ids(self) -> list[Any]:
        (conversations,) = self.hooks._conversations.values()
        return [kept.session.sequence_id for kept in conversations._kept.values()]


@contextmanager
def gateway(server: Any, **settings: Any) -> Iterator[Gateway]:
    configured = Settings(backend_url=server.grpc_url, **settings)
    hooks = StatefulHooks(configured)
    with TestClient(create_app(configured, hooks)) as client:
        yield Gateway(client, hooks)


def text(answer: Mapping[str, Any]) -> str:
    found: str = answer["choices"][0]["message"]["content"]
    return found


def num_cached(answer: Mapping[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def report(answer: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]["tandem"]
    return found


def is_open(server: Any, sequence_id: Any) -> bool:
    """Whether the server takes a turn of the sequence."""
    with GrpcStream(server.grpc_url) as stream:
        try:
            stream.answer(sequence=(sequence_id, ""), text_input=" ", max_tokens=1)
        except InferenceServerException as error:
            if "START" not in str(error):
                raise
            return False
        return True


def converse(opened: Gateway, **values: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages of four turns, the last answer included, and the answers."""
    messages: list[dict[str, Any]] = []
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answers.append(opened.ask(messages, **values))
        messages.append({"role": "assistant", "content": text(answers[-1])})
    return messages, answers


def test_turns_reuse_state_and_are_what_the_backend_answers_alone(server: Any) -> None:
    with gateway(server) as opened:
        messages, answers = converse(opened)
        (sequence_id,) = opened.sequence_ids
        prompts = [answer["usage"]["prompt_tokens"] for answer in answers]
        for turn, answer in enumerate(answers[1:], start=1):
            assert num_cached(answer) >= prompts[turn - 1] - 1  # all of the turn before but for, at worst, its answer
    assert not is_open(server, sequence_id)  # the gateway has closed it
    with TandemClient(server.grpc_url) as client:
        for turn, answer in enumerate(answers):
            alone = client.complete(
                messages=messages[: 2 * turn + 1], max_tokens=MAX_TOKENS, sampling={"cache_salt": f"alone {turn}"}
            )
            assert (alone.text, alone.usage.num_cached_tokens) == (text(answer), 0)
            assert alone.usage.num_input_tokens == prompts[turn]


def test_an_edited_conversation_is_answered_as_if_it_were_new(server: Any) -> None:
    with gateway(server) as opened, TandemClient(server.grpc_url) as client:
        messages, _ = converse(opened)
        edited = [*messages[:3], {"role": "assistant", "content": "It pairs things."}, *messages[4:7]]
        answer = opened.ask(edited)
        alone = client.complete(messages=edited, max_tokens=MAX_TOKENS, sampling={"cache_salt": "edited"})
        assert text(answer) == alone.text
        assert num_cached(answer) > 0


def test_a_sequence_that_the_server_lost_is_never_noticed(server: Any) -> None:
    with gateway(server) as opened:
        messages, _ = converse(opened)
        (sequence_id,) = opened.sequence_ids
        with GrpcStream(server.grpc_url) as stream:
            stream.send("stop", sequence=(sequence_id, "E"), stop=True)
            list(stream.responses("stop"))
        longer = [*messages, {"role": "user", "content": "Thank you."}]
        answer = opened.ask(longer)
        assert opened.sequence_ids == [sequence_id]
        opened.ask([*longer, {"role": "assistant", "content": text(answer)}, {"role": "user", "content": "Bye."}])
    with TandemClient(server.grpc_url) as client:
        alone = client.complete(messages=longer, max_tokens=MAX_TOKENS, sampling={"cache_salt": "lost"})
        assert text(answer) == alone.text


def test_more_conversations_than_sequences(server: Any) -> None:
    ids: list[Any] = []
    with gateway(server, max_sequences=2) as opened:
        for name in ("a", "b", "c"):
            talk = [{"role": "user", "content": name}, {"role": "assistant", "content": "Yes?"}]
            opened.ask([*talk, {"role": "user", "content": "What does zip() do?"}])
            ids.append(opened.sequence_ids[-1])
        assert opened.sequence_ids == ids[1:]
        wait_until(lambda: not is_open(server, ids[0]))
        assert is_open(server, ids[2])


LOOPING: list[dict[str, Any]] = [
    {"role": "user", "content": "What time is it?"},
    *[
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "unknown"},
    ]
    * 3,
]


@pytest.mark.parametrize(
    ("mode", "messages"),
    [("regenerate", [{"role": "user", "content": "What does zip() do?"}]), ("loop_escape", LOOPING)],
)
def test_a_sampled_answer_is_reported_and_journaled_so_that_it_can_be_had_again(
    server: Any, tmp_path: Path, mode: str, messages: Any
) -> None:
    journal, config = tmp_path / "journal.sqlite", tmp_path / "generation_config.json"
    hot = {"temperature": 5.0, "top_k": 0}  # at 1.5 every second answer is the greedy one
    config.write_text(json.dumps(hot))
    with gateway(server, regenerate_sampling=hot, generation_config=config, journal=journal) as opened:
        greedy = opened.ask(messages, headers={"X-Tandem-Regenerate": "0"}, temperature=0)
        sampled = opened.ask(messages)
        sampling = report(sampled)["sampling"]
        assert report(sampled)["sampling_mode"] == mode
        assert text(sampled) != text(greedy)
        assert text(opened.ask(messages, seed=sampling["seed"])) == text(sampled)
    with gateway(server) as elsewhere:
        assert text(elsewhere.ask(messages, **sampling)) == text(sampled)
        assert text(elsewhere.ask(messages, temperature=0)) == text(greedy)
    first, row, again = list(read(journal, {}, None))
    assert (first["sampling_mode"], first["seed"]) == ("as_sent", None)
    assert (row["sampling_mode"], again["sampling_mode"]) == (mode, mode)
    assert row["seed"] == again["seed"] == sampling["seed"] == report(sampled)["seed"]
    assert row["num_output_tokens"] == sampled["usage"]["completion_tokens"]
    assert row["num_prompt_tokens"] == sampled["usage"]["prompt_tokens"]
    assert row["finish_reason"] == sampled["choices"][0]["finish_reason"]
    assert row["queue_s"] is not None
