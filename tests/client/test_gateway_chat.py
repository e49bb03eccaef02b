# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions over a scripted backend."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_transport import FINAL, AsyncFakeTransport, Script, answer, response
from fastapi.testclient import TestClient
from tandem_client import ConnectionFailedError, ServerError
from tandem_client.gateway.app import create_app
from tandem_client.gateway.settings import Settings

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello?"}]


def tool_call(call_id: Any = "call_1", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


@contextmanager
def gateway(*scripts: Script, **settings: Any) -> Iterator[tuple[TestClient, AsyncFakeTransport]]:
    transport = AsyncFakeTransport(*scripts)
    with TestClient(create_app(Settings(**settings), transport=transport)) as client:  # type: ignore[arg-type]
        yield client, transport


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tandem", "messages": MESSAGES, **fields}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def sampling(transport: AsyncFakeTransport, index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(transport.requests[index].payload.inputs["sampling_parameters"].item())
    return found


def test_a_whole_answer() -> None:
    with gateway(answer("Hi", " there")) as (client, transport):
        reply = client.post(CHAT, json=chat(max_tokens=5, top_k=3))
    assert reply.status_code == 200
    choice = reply.json()["choices"][0]
    assert choice["message"]["content"] == "Hi there"
    assert choice["finish_reason"] == "stop"
    assert reply.json()["usage"]["prompt_tokens"] == 7
    assert reply.json()["usage"]["completion_tokens"] == 2
    assert sampling(transport)["max_tokens"] == 5
    assert sampling(transport)["top_k"] == 3


def test_a_streamed_answer_ends_with_usage_and_done() -> None:
    with gateway(answer("Hi", " there")) as (client, _):
        reply = client.post(CHAT, json=chat(stream=True, stream_options={"include_usage": True}))
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = events(reply.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hi there"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 9


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (ServerError("INVALID_ARG", "top_k: must be at least -1, got -5"), 400, "top_k"),
        (ServerError("UNAVAILABLE", "the queue is full; retry after 7 s"), 503, None),
        (ServerError("INTERNAL", "Stub process 'tandem_0_0' is not healthy."), 503, None),
        (ServerError("INTERNAL", "a round failed"), 500, None),
        (ConnectionFailedError("127.0.0.1:1: refused"), 503, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_backend(error: Exception, status: int, param: str | None, stream: bool) -> None:
    with gateway([error]) as (client, _):
        reply = client.post(CHAT, json=chat(stream=stream))
    assert reply.status_code == status
    assert reply.json()["error"]["param"] == param
    assert ("retry-after" in reply.headers) == (status == 503)
    if "7 s" in str(error):
        assert reply.headers["retry-after"] == "7"


def test_an_error_after_the_start_ends_the_stream() -> None:
    with gateway([response("Hi", [1]), ServerError("INTERNAL", "a round failed")]) as (client, _):
        reply = client.post(CHAT, json=chat(stream=True))
    assert reply.status_code == 200
    assert events(reply.text)[-1]["error"]["message"] == "a round failed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "another"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"messages": [{"role": "assistant", "tool_calls": [tool_call({"a": 1})]}]}, "messages[0].tool_calls[0].id"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with gateway() as (client, transport):
        reply = client.post(CHAT, json=chat(**fields))
    assert reply.status_code == (404 if param == "model" else 400)
    assert reply.json()["error"]["param"] == param
    assert reply.json()["error"]["message"].startswith(param)
    assert transport.requests == []


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        *(
            (text, text)
            for text in ("[" * 2000, '{"a":' * 300 + "1" + "}" * 300, '{"a": "\\ud800"}', '{"a": NaN}', "[1]")
        ),
        (f'{{"a": {10**30}}}', {"a": 10**30}),
    ],
)
def test_arguments_of_a_call_that_are_no_plain_object_stay_text(text: str, arguments: Any) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [tool_call(arguments=text)]}]
    with gateway(answer("Hi")) as (client, transport):
        assert client.post(CHAT, json=chat(messages=messages)).status_code == 200
    sent = json.loads(transport.requests[0].payload.inputs["messages"].item())
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_tool_call_is_streamed_in_pieces() -> None:
    def delta(**function: str) -> bytes:
        more = {"id": "call_1", "type": "function"} if "name" in function else {}
        return json.dumps([{"index": 0, **more, "function": function}]).encode()

    script = [
        response("", [1], tool_calls=delta(name="get_time", arguments="")),
        response("", [2], tool_calls=delta(arguments='{"zone": ')),
        response("", [3], "tool_calls", tool_calls=delta(arguments='"UTC"}')),
        FINAL,
    ]
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
    with gateway(script) as (client, transport):
        reply = client.post(CHAT, json=chat(stream=True, tools=[tool], tool_choice="required"))
    pieces = [piece for event in events(reply.text) for piece in event["choices"][0]["delta"].get("tool_calls", [])]
    assert pieces[0]["id"] == "call_1"
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"zone": "UTC"}'
    assert events(reply.text)[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert json.loads(transport.requests[0].payload.inputs["tools"].item()) == [tool]
    assert sampling(transport)["tool_choice"] == "required"


def test_reasoning_has_a_field_of_its_own() -> None:
    script = [response("", [1], reasoning_content=b"Well."), response("Yes", [2], "stop", reasoning_content=b""), FINAL]

    with gateway(script) as (client, transport):
        message = client.post(CHAT, json=chat(reasoning_effort="low")).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Well.", "Yes")
    assert sampling(transport)["reasoning_format"] == "field"
    with gateway(script) as (client, _):
        chunks = events(client.post(CHAT, json=chat(stream=True)).text)
    assert chunks[1]["choices"][0]["delta"] == {"reasoning_content": "Well."}
