# SPDX-License-Identifier: Apache-2.0
"""Grammars, tool calls and reasoning through a real Triton server: the client over gRPC, HTTP through the front."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tandem_client import Completion, ServerError, TandemClient

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "kind": {"enum": ["function", "class", "module"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "object", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Describe json.dumps as JSON."}]
WEATHER = [{"role": "user", "content": "What is the weather in Rome?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.fixture
def client(server: Any) -> Iterator[TandemClient]:
    with TandemClient(server.grpc_url) as opened:
        yield opened


def generate(server: Any, **values: Any) -> list[dict[str, Any]]:
    """The events of HTTP generate_stream."""
    url = f"http://{server.http_url}/v2/models/tandem_generate/generate_stream"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(values).encode())) as reply:
        return [json.loads(line[len(b"data: ") :]) for line in reply if line.startswith(b"data: ")]


def test_a_schema_over_grpc_and_http(server: Any, client: TandemClient) -> None:
    answer = client.complete(messages=MESSAGES, response_format=FORMAT, max_tokens=80)
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    plain = client.complete(messages=MESSAGES, response_format=FORMAT, max_tokens=80, sampling={"drafter": "none"})
    assert (plain.text, plain.token_ids) == (answer.text, answer.token_ids)
    events = generate(
        server, messages=json.dumps(MESSAGES), response_format=json.dumps(FORMAT), max_tokens=80, stream=True
    )
    assert "".join(event["text_output"] for event in events) == answer.text
    guided = generate(
        server,
        messages=json.dumps(MESSAGES),
        guided_decoding_guide_type="json_schema",
        guided_decoding_guide=json.dumps(SCHEMA),
        max_tokens=80,
    )
    assert [event["text_output"] for event in guided] == [answer.text]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tool_calls_are_streamed(server: Any, client: TandemClient, choice: Any) -> None:
    chunks = list(client.generate(messages=WEATHER, tools=TOOLS, tool_choice=choice, max_tokens=60))
    answer = Completion.from_chunks(chunks)
    assert (answer.text, answer.finish_reason) == ("", "tool_calls")
    [call] = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    values = {"messages": json.dumps(WEATHER), "tools": json.dumps(TOOLS), "max_tokens": 60}
    [event] = generate(server, **values, tool_choice=json.dumps(choice) if isinstance(choice, dict) else choice)
    [delta] = json.loads(event["tool_calls"])
    assert delta["id"] == call.id
    assert delta["function"] == {"name": call.name, "arguments": call.arguments}


def test_a_session_goes_on_after_a_call(client: TandemClient) -> None:
    with client.session() as session:
        first = session.complete(messages=WEATHER, tools=TOOLS, max_tokens=60)
        assert first.tool_calls
        result = [{"role": "tool", "content": '{"temperature": 21}'}]
        second = session.complete(messages=result, tools=TOOLS, max_tokens=40)
        assert second.usage.num_cached_tokens > first.usage.num_input_tokens
        assert second.text


def test_reasoning_is_split_and_bounded(client: TandemClient) -> None:
    def ask(**options: Any) -> Completion:
        question = [{"role": "user", "content": "What does zip() do?"}]
        return client.complete(messages=question, max_tokens=120, **options)

    written = ask(enable_thinking=True)
    assert "</think>" in written.text
    split = ask(enable_thinking=True, reasoning_format="field")
    assert split.token_ids == written.token_ids
    assert written.text == f"{split.reasoning}\n</think>\n\n{split.text}"
    both = ask(enable_thinking=True, reasoning_format="both")
    assert (both.text, both.reasoning) == (written.text, split.reasoning)
    bounded = ask(enable_thinking=True, max_reasoning_tokens=5, reasoning_format="field")
    assert split.reasoning.startswith(bounded.reasoning)
    assert bounded.token_ids[:5] == written.token_ids[:5]
    assert ask(reasoning_effort="none", reasoning_format="field").reasoning == ""


def test_wrong_forms_are_refused_and_disturb_nothing(client: TandemClient) -> None:
    for options, message in (
        ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "not supported: uniqueItems"),
        ({"response_format": {"type": "yaml"}}, "response_format: type must be"),
        ({"tool_choice": "required"}, "tool_choice: needs messages and tools"),
    ):
        with pytest.raises(ServerError, match=message) as caught:
            client.complete(messages=MESSAGES, **options)
        assert caught.value.code == "INVALID_ARG"
    assert client.complete(messages=MESSAGES, response_format=FORMAT, max_tokens=80).finish_reason == "stop"
