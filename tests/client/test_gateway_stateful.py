# SPDX-License-Identifier: Apache-2.0
"""Through the gateway's API over a scripted backend: sequences, regeneration, loop escape, and the journal's rows."""

import asyncio
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_transport import FINAL, AsyncFakeTransport, Script, answer, response
from fastapi.testclient import TestClient
from tandem_client import ConnectionFailedError
from tandem_client.cli import main
from tandem_client.gateway.access import add_key
from tandem_client.gateway.app import create_app
from tandem_client.gateway.journal_file import read
from tandem_client.gateway.settings import Settings

CHAT = "/v1/chat/completions"
CONVERSATION = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye."},
]


class Gateway:
    def __init__(self, http: TestClient, transport: AsyncFakeTransport) -> None:
        self.http, self.transport = http, transport

    def chat(self, messages: Any = CONVERSATION, headers: Mapping[str, str] | None = None, **fields: Any) -> Any:
        body = {"model": "tandem", "messages": messages, **fields}
        return self.http.post(CHAT, json=body, headers=dict(headers or {}))

    def report(self, *args: Any, **fields: Any) -> dict[str, Any]:
        reply = self.chat(*args, **fields)
        assert reply.status_code == 200, reply.text
        report: dict[str, Any] = reply.json()["choices"][0]["tandem"]
        return report

    def sampling(self, index: int = -1) -> dict[str, Any]:
        sent: dict[str, Any] = json.loads(self.transport.requests[index].payload.inputs["sampling_parameters"].item())
        own = ("timeout_ms", "whole_conversation", "strict", "reasoning_format")
        return {name: value for name, value in sent.items() if name not in own}


@contextmanager
def gateway(*scripts: Script, **settings: Any) -> Iterator[Gateway]:
    transport = AsyncFakeTransport(*scripts, *(answer("ok") for _ in range(20)))
    with TestClient(create_app(Settings(**settings), transport=transport)) as client:  # type: ignore[arg-type]
        yield Gateway(client, transport)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def rows(path: Path) -> list[dict[str, Any]]:
    return list(read(path, {}, None))


def test_a_conversation_goes_on_in_its_sequence_and_ends_with_the_gateway() -> None:
    with gateway() as opened:
        opened.chat()
        opened.chat([*CONVERSATION, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "More."}])
    assert opened.transport.flags == ["S", "", "Ex"]
    assert len({request.sequence_id for request in opened.transport.requests}) == 1


def test_a_session_header_names_the_sequence() -> None:
    with gateway() as opened:
        for _ in range(2):
            opened.chat([{"role": "user", "content": "Hello?"}], headers={"X-Tandem-Session": "mine"})
        reply = opened.chat(headers={"X-Tandem-Session": "x" * 257})
    assert opened.transport.flags == ["S", "", "Ex"]
    assert reply.status_code == 400
    assert "X-Tandem-Session: must have 1 to 256 characters, got 257" in reply.json()["error"]["message"]


def test_keys_share_neither_sequences_nor_what_was_answered(tmp_path: Path, journal: Path) -> None:
    keys_file = tmp_path / "keys.json"
    keys = {name: add_key(keys_file, name) for name in ("alice", "bob")}
    with gateway(keys_file=keys_file, journal=journal) as opened:
        headers = [{"Authorization": f"Bearer {keys[name]}"} for name in ("alice", "bob", "alice")]
        modes = [opened.report(headers=each)["sampling_mode"] for each in headers]
        assert opened.chat().status_code == 401
        assert "tandem_gateway_sequences 2.0" in opened.http.get("/metrics").text
    assert modes == ["greedy", "greedy", "regenerate"]
    first, second, third, *_ = (request.sequence_id for request in opened.transport.requests)
    assert first == third != second
    assert [(row["key"], row["status"]) for row in rows(journal)] == [
        *((n, 200) for n in ("alice", "bob", "alice")),
        ("", 401),
    ]


def test_max_sequences_zero_keeps_none() -> None:
    with gateway(max_sequences=0) as opened:
        opened.chat()
        opened.chat()
    assert opened.transport.flags == ["SE", "SE"]


def test_a_conversation_sent_again_is_sampled_with_a_reported_seed_that_gives_it_again() -> None:
    with gateway(regenerate_sampling={"temperature": 0.9, "top_k": 40}) as opened:
        reports = [opened.report() for _ in range(3)]
        assert [report["sampling_mode"] for report in reports] == ["greedy", "regenerate", "regenerate"]
        assert [opened.sampling(index) for index in range(3)] == [report["sampling"] for report in reports]
        assert reports[0]["sampling"] == {}
        seeds = [report["sampling"].pop("seed") for report in reports[1:]]
        assert reports[1]["sampling"] == reports[2]["sampling"] == {"temperature": 0.9, "top_k": 40}
        assert seeds[0] != seeds[1]
        assert opened.report(seed=seeds[0])["sampling_mode"] == "regenerate"
        assert opened.sampling() == opened.sampling(1)
        assert opened.report(seed=seeds[0], temperature=0.9, top_k=40)["sampling_mode"] == "as_sent"
        assert opened.sampling() == opened.sampling(1)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 1}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_fields_of_the_client_are_left_as_they_are(fields: dict[str, Any]) -> None:
    with gateway() as opened:
        for _ in range(2):
            assert opened.report(**fields)["sampling_mode"] == "as_sent"
            assert opened.sampling() == fields


def test_the_regenerate_header() -> None:
    with gateway() as opened:
        modes = [opened.report(headers={"X-Tandem-Regenerate": value})["sampling_mode"] for value in "0010"]
        assert modes == ["greedy", "greedy", "regenerate", "greedy"]
        wrong = opened.chat(headers={"X-Tandem-Regenerate": "yes"})
    assert wrong.status_code == 400
    assert "X-Tandem-Regenerate: must be 0 or 1, got 'yes'" in wrong.json()["error"]["message"]


def test_regeneration_can_be_turned_off() -> None:
    with gateway(regenerate=False) as opened:
        assert [opened.report()["sampling_mode"] for _ in range(2)] == ["greedy", "greedy"]
        assert opened.chat(headers={"X-Tandem-Regenerate": "1"}).status_code == 400


def test_an_answer_that_failed_or_that_nobody_got_is_not_regenerated() -> None:
    with gateway([ConnectionFailedError("gone")], [response("half"), ConnectionFailedError("gone")]) as opened:
        assert opened.chat().status_code == 503
        assert "error" in opened.chat(stream=True).text
        assert opened.report()["sampling_mode"] == "greedy"


def test_other_tools_are_another_conversation() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with gateway() as opened:
        modes = [opened.report(**fields)["sampling_mode"] for fields in ({}, {"tools": [tool]}, {"tools": [tool]})]
    assert modes == ["greedy", "greedy", "regenerate"]


def loop(times: int) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
    turn = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "-"},
    ]
    return [{"role": "user", "content": "List."}, *turn * times]


def test_a_loop_is_left_by_sampling_with_the_generation_config(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    with gateway(generation_config=file, loop_turns=2) as opened:
        modes = [opened.report(loop(times))["sampling_mode"] for times in (1, 2, 3)]
        assert modes == ["greedy", "loop_escape", "loop_escape"]
        sampling = opened.sampling()
        seed = sampling.pop("seed")
        assert sampling == {"temperature": 0.6, "top_k": 20, "top_p": 1.0}
        opened.report(loop(3), seed=seed)
        assert opened.sampling() == {**sampling, "seed": seed}
    with gateway(loop_escape=False) as opened:
        assert opened.report(loop(5))["sampling_mode"] == "greedy"


# The journal.


def test_every_request_has_one_row(journal: Path) -> None:
    last = response("!", [2], "length", num_cached_tokens=5, seed=2**64 - 1, num_rounds=2, total_draft_tokens=3)
    scripts: list[Script] = [[response("Hi", [1]), last, FINAL], [ConnectionFailedError("gone")]]
    with gateway(*scripts, journal=journal) as opened:
        opened.chat(temperature=0.5, presence_penalty=1, stream=True)
        opened.chat()
        opened.chat(no_such_field=1)
        opened.http.post(CHAT, content=b"{")
        opened.http.get(CHAT)
        for _ in range(2):
            opened.chat(CONVERSATION[:1])
    sampled, failed, refused, garbled, greedy, again = rows(journal)
    assert [row["status"] for row in rows(journal)] == [200, 503, 400, 400, 200, 200]
    expected = {
        "endpoint": "chat",
        "model": "tandem",
        "key": "",
        "is_streaming": True,
        "finish_reason": "length",
        "sampling_mode": "as_sent",
        "seed": 2**64 - 1,
        "sampling": '{"temperature": 0.5, "presence_penalty": 1.0}',
        "num_prompt_tokens": 7,
        "num_cached_tokens": 5,
        "num_output_tokens": 2,
        "num_draft_tokens": 3,
        "num_rounds": 2,
        "error": None,
        "prompt_text": None,
        "answer_text": None,
    }
    assert {name: sampled[name] for name in expected} == expected
    assert 0 < sampled["first_token_s"] <= sampled["request_s"]
    assert (failed["error"], failed["first_token_s"]) == ("ConnectionFailedError", None)
    assert (refused["endpoint"], refused["model"], refused["sampling_mode"]) == ("chat", "", None)
    assert garbled["endpoint"] == "chat"
    assert [row["sampling_mode"] for row in (greedy, again)] == ["greedy", "regenerate"]
    assert set(json.loads(again["sampling"])) == {"temperature", "top_p"}
    assert len({row["request_id"] for row in (sampled, failed, greedy, again)}) == 4


def test_an_answer_that_breaks_off_counts_what_was_written(journal: Path) -> None:
    script: Script = [response("Hi", [1]), response(" there", [2, 3]), ConnectionFailedError("gone")]
    with gateway(script, journal=journal) as opened:
        opened.chat(stream=True)
    (row,) = rows(journal)
    assert (row["error"], row["num_output_tokens"]) == ("ConnectionFailedError", 3)


def test_who_is_over_a_limit_is_named(tmp_path: Path, journal: Path) -> None:
    keys_file = tmp_path / "keys.json"
    key = add_key(keys_file, "alice", requests_per_minute=1)
    with gateway(keys_file=keys_file, journal=journal) as opened:
        for _ in range(2):
            opened.chat(headers={"Authorization": f"Bearer {key}"})
    assert [(row["key"], row["status"]) for row in rows(journal)] == [("alice", 200), ("alice", 429)]


def test_a_client_that_leaves_before_its_body_is_whole_has_left(journal: Path) -> None:
    async def leave() -> None:
        app = create_app(Settings(journal=journal), transport=AsyncFakeTransport())  # type: ignore[arg-type]
        messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            pass

        async with app.router.lifespan_context(app):
            scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"", "app": app}
            await app(scope, receive, send)

    asyncio.run(leave())
    assert [row["status"] for row in rows(journal)] == [499]


def test_the_prompts_of_one_request_share_a_row(journal: Path) -> None:
    with gateway(journal=journal) as opened:
        reply = opened.http.post("/v1/completions", json={"model": "tandem", "prompt": ["a", "b"]})
    assert reply.status_code == 200
    (row,) = rows(journal)
    assert (row["num_choices"], row["num_prompt_tokens"], row["num_output_tokens"]) == (2, 14, 2)


def test_text_is_kept_only_where_it_is_asked_for(journal: Path) -> None:
    secret = [{"role": "user", "content": "my secret Ünicode"}]
    with gateway(journal=journal) as opened:
        opened.chat(secret)
    assert b"secret" not in journal.read_bytes()
    with gateway(answer("Hi", " you"), journal=journal, journal_text=True) as opened:
        opened.chat(secret)
    row = rows(journal)[-1]
    assert json.loads(row["prompt_text"]) == secret
    assert json.loads(row["answer_text"]) == {"content": "Hi you"}


def test_a_journal_that_cannot_be_used_ends_the_command(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    for option, file, message in (
        ("--journal", other, "is no journal"),
        ("--generation-config", tmp_path / "none", "No such file"),
    ):
        result = CliRunner().invoke(main, ["gateway", option, str(file)])
        assert result.exit_code == 1
        assert message in result.output


def test_sampling_is_given_as_json_on_the_command_line_and_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = '{"temperature": 0.9, "top_k": 40}'
    assert str(Settings(regenerate_sampling=given).regenerate_sampling) == given  # type: ignore[arg-type]
    monkeypatch.setenv("TANDEM_GATEWAY_REGENERATE_SAMPLING", given)
    assert Settings().regenerate_sampling.values() == {"temperature": 0.9, "top_k": 40}
    monkeypatch.delenv("TANDEM_GATEWAY_REGENERATE_SAMPLING")
    for wrong in ("{", '{"temperature": 0}', '{"top_x": 1}', "[]"):
        result = CliRunner().invoke(main, ["gateway", "--regenerate-sampling", wrong])
        assert result.exit_code == 2
        assert "regenerate_sampling" in result.output
