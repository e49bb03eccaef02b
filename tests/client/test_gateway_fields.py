# SPDX-License-Identifier: Apache-2.0
"""The table of request fields: whole against the official client's, and each row does what it says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from fake_transport import AsyncFakeTransport, answer
from fastapi.testclient import TestClient
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from tandem_client.gateway.app import create_app
from tandem_client.gateway.fields import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    RESPONSES,
    TABLE,
    Flag,
    Integer,
    Number,
    Object,
    Row,
    Rule,
    Text,
    TokenIds,
    rows,
)
from tandem_client.gateway.settings import Settings

README = Path(__file__).parents[2] / "client" / "tandem_client" / "gateway" / "README.md"
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions", RESPONSES: "/v1/responses"}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tandem", "messages": [{"role": "user", "content": "Hello?"}]},
    COMPLETIONS: {"model": "tandem", "prompt": "Hello?"},
    RESPONSES: {"model": "tandem", "input": "Hello?"},
}
# A value for each field of a type that says too little, and what it needs beside it.
VALUES: dict[str, Any] = {
    "stop": "\n",
    "n": 1,
    "tool_choice": "auto",
    "tools": [{"type": "function", "name": "f", "function": {"name": "f"}}],
    "include": ["message.output_text.logprobs"],
    "stream_options": {"include_usage": True},
    "bad_words": "x",
    "logit_bias": {"5": 1.0},
    "prompt": "Hello?",
    "input": "Hello?",
    "messages": LEAST[CHAT]["messages"],
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "model": "tandem",
}
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
}
ROWS = [(endpoint, row) for endpoint in ENDPOINTS for row in rows(endpoint).values()]


def ids(value: Any) -> str:
    return value.name if isinstance(value, Row) else str(value)


def example(row: Row) -> Any:
    if row.name in VALUES:
        return VALUES[row.name]
    kinds = ((Flag, True), (Integer, 2), (Number, 0.5), (Object, {}), (TokenIds, [1]), (Text, "x"))
    return next(value for kind, value in kinds if kind == row.type)


class Poster:
    """A gateway whose backend answers every request, and what it was asked last."""

    def __init__(self, client: TestClient, transport: AsyncFakeTransport) -> None:
        self._client, self._transport = client, transport

    def __call__(self, endpoint: str, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The reply, and the backend request's inputs: none where it was refused."""
        self._transport.requests.clear()
        self._transport.scripts[:] = [answer("Hi")]
        reply = self._client.post(PATHS[endpoint], json=body)
        inputs = self._transport.requests[0].payload.inputs if self._transport.requests else {}
        return reply, {name: value.tolist() for name, value in inputs.items()}


@pytest.fixture(scope="module")
def post() -> Iterator[Poster]:
    transport = AsyncFakeTransport()
    with TestClient(create_app(Settings(regenerate=False), transport=transport)) as client:  # type: ignore[arg-type]
        yield Poster(client, transport)


@pytest.mark.parametrize(
    ("endpoint", "official"),
    [
        (CHAT, chat_params.CompletionCreateParamsStreaming),
        (COMPLETIONS, completion_create_params.CompletionCreateParamsStreaming),
        (RESPONSES, response_create_params.ResponseCreateParamsStreaming),
    ],
)
def test_every_field_of_the_official_client_is_there(endpoint: str, official: Any) -> None:
    known = {row.name for row in rows(endpoint).values() if not row.is_extension}
    assert set(get_type_hints(official)) - known == set()
    assert known - set(get_type_hints(official)) == set()


def test_a_field_has_one_row_an_endpoint() -> None:
    for endpoint in ENDPOINTS:
        names = [row.name for row in TABLE if endpoint in row.endpoints]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(("endpoint", "row"), [each for each in ROWS if each[1].rule is not Rule.REFUSED], ids=ids)
def test_fields_that_are_accepted(post: Poster, endpoint: str, row: Row) -> None:
    beside = {name: value for name, value in BESIDE.get(row.name, {}).items() if name in rows(endpoint)}
    reply, inputs = post(endpoint, {**LEAST[endpoint], **beside, row.name: example(row)})
    assert reply.status_code == 200, reply.text
    if row.forwarded:
        assert json.loads(inputs["sampling_parameters"][0])[row.name] == example(row)
    if row.rule is Rule.NO_EFFECT:
        assert inputs == post(endpoint, LEAST[endpoint])[1]
    if row.name not in LEAST[endpoint]:
        assert post(endpoint, {**LEAST[endpoint], row.name: None})[1] == post(endpoint, LEAST[endpoint])[1] != {}


@pytest.mark.parametrize(("endpoint", "row"), [each for each in ROWS if each[1].rule is Rule.REFUSED], ids=ids)
def test_fields_that_are_refused(post: Poster, endpoint: str, row: Row) -> None:
    for value in ("something", {"id": 1}, ["text", "audio"], 7, True):
        reply, inputs = post(endpoint, {**LEAST[endpoint], row.name: value})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == (row.name, "unsupported_parameter")
        assert row.note in error["message"]
        assert inputs == {}
    for value in (None, *row.accepts):
        assert post(endpoint, {**LEAST[endpoint], row.name: value})[0].status_code == 200


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_unknown_fields_are_refused(post: Poster, endpoint: str) -> None:
    reply, _ = post(endpoint, {**LEAST[endpoint], "temprature": 1})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "temprature"


@pytest.mark.parametrize(
    ("endpoint", "name", "value", "allowed"),
    [
        (COMPLETIONS, "prompt", [1, "a"], "a list of texts, token ids"),
        (RESPONSES, "input", [5], "text or a list of objects"),
        (CHAT, "stop", [5], "text or a list of texts"),
        (CHAT, "tool_choice", 5, "text or an object"),
    ],
)
def test_all_that_a_field_may_be_is_told(post: Poster, endpoint: str, name: str, value: Any, allowed: str) -> None:
    reply, _ = post(endpoint, {**LEAST[endpoint], name: value})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, name, "invalid_type")
    assert allowed in error["message"]


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"role": "pope", "content": "x"}, "role"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "content[0].type"),
        ({"type": "item_reference", "id": "x"}, "type"),
        ({"type": "function_call", "name": "f", "call_id": "c"}, "arguments"),
    ],
)
def test_a_wrong_item_of_the_input_is_named(post: Poster, item: dict[str, Any], place: str) -> None:
    reply, _ = post(RESPONSES, {"model": "tandem", "input": [{"role": "user", "content": "Hello?"}, item]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, f"input[1].{place}")


def table() -> str:
    """The README's table, made from the one in the code."""
    short = {CHAT: "chat", COMPLETIONS: "completions", RESPONSES: "responses"}
    lines = ["| field | of | rule | |", "|-|-|-|-|"]
    for row in TABLE:
        where = "all" if row.endpoints == ENDPOINTS else ", ".join(short[endpoint] for endpoint in row.endpoints)
        accepted = ", ".join(f"`{json.dumps(value)}`" for value in row.accepts)
        rule = "extension" if row.is_extension else f"{row.rule}{f', but for {accepted}' if accepted else ''}"
        lines.append(f"| `{row.name}` | {where} | {rule} | {row.note} |")
    return "\n".join(lines)


def test_the_readme_has_the_table() -> None:
    assert table() in README.read_text(encoding="utf-8")
