# SPDX-License-Identifier: Apache-2.0
"""The gateway before a real Triton server, asked by the official client of the OpenAI API."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_process import GatewayProcess, running_gateway
from tandem_client.gateway.journal_file import read
from triton_calls import metrics, wait_until

QUESTION: Any = [{"role": "user", "content": "What does json.dumps do?"}]
TIME_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a zone.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
            "required": ["zone"],
        },
    },
}
LONG: Any = {"max_completion_tokens": 2000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def gateway(server: Any) -> Iterator[GatewayProcess]:
    with running_gateway(server.grpc_url, "--no-regenerate") as process:
        yield process


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none is asked for", max_retries=0) as opened:
        yield opened


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "tandem", "messages": QUESTION, **options})


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tandem"]
    assert client.models.retrieve("tandem").id == "tandem"
    with pytest.raises(openai.NotFoundError):
        chat(client, model="gpt-none")


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = chat(client, max_completion_tokens=24)
    chunks = list(chat(client, max_completion_tokens=24, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_the_reported_seed_draws_the_answer_again(client: openai.OpenAI) -> None:
    first = chat(client, max_completion_tokens=16, temperature=1.2)
    seed = first.choices[0].model_extra["tandem"]["seed"]
    again = chat(client, max_completion_tokens=16, temperature=1.2, seed=seed)
    assert again.choices[0].message.content == first.choices[0].message.content


def test_several_choices(client: openai.OpenAI) -> None:
    many = chat(client, n=3, temperature=1.5, seed=5, max_completion_tokens=12)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    for index, choice in enumerate(many.choices):
        alone = chat(client, temperature=1.5, seed=5 + index, max_completion_tokens=12)
        assert choice.message.content == alone.choices[0].message.content
    streamed = ["", "", ""]
    for chunk in chat(client, n=3, temperature=1.5, seed=5, max_completion_tokens=12, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == [choice.message.content for choice in many.choices]


def test_logprobs_spell_the_answer(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, max_completion_tokens=16)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    spelt = b"".join(bytes(entry.bytes) for entry in entries)
    assert spelt.decode() == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob == entry.top_logprobs[0].logprob


def test_a_stop_string_ends_draft_trees_with_the_tokens_that_hold_it(client: openai.OpenAI) -> None:
    options: Any = {"max_completion_tokens": 32, "extra_body": {"return_draft_trees": True}}
    text = chat(client, **options).choices[0].message.content
    for stop in (text[3:4], text[10:13], text[20:28]):
        answer = chat(client, stop=stop, **options).choices[0]
        tokens = answer.model_extra["tandem"]["draft_trees"]["tokens"]
        spelt = "".join(token["text"] for token in tokens)
        assert answer.message.content == text[: text.index(stop)]
        assert spelt.startswith(answer.message.content + stop)
        told = ""
        streamed = []
        for chunk in chat(client, stop=stop, stream=True, **options):
            told += chunk.choices[0].delta.content or ""
            streamed += chunk.choices[0].model_extra.get("tandem", {}).get("draft_trees", {}).get("tokens", [])
        assert told == answer.message.content
        assert [token["token_id"] for token in streamed] == [token["token_id"] for token in tokens]


def test_an_agent_calls_a_tool_and_reads_its_result(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What time is it in UTC?"}]
    name, arguments, call_id = "", "", ""
    for chunk in chat(client, messages=messages, tools=[TIME_TOOL], tool_choice="required", stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            call_id, name = call_id or piece.id, name or piece.function.name
            arguments += piece.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    assert (name, reason) == ("get_time", "tool_calls")
    assert json.loads(arguments)["zone"] in ("UTC", "CET")
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "12:00"},
    ]
    final = chat(client, messages=messages, tools=[TIME_TOOL], tool_choice="none", max_completion_tokens=16)
    assert final.choices[0].message.content
    assert final.choices[0].message.tool_calls is None


def test_an_answer_follows_its_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "lazy": {"type": "boolean"}},
        "required": ["name", "lazy"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "builtin", "schema": schema, "strict": True}}
    answer = json.loads(chat(client, response_format=form, max_completion_tokens=64).choices[0].message.content)
    assert set(answer) == {"name", "lazy"}
    assert isinstance(answer["lazy"], bool)


def test_reasoning_has_a_field_of_its_own(client: openai.OpenAI) -> None:
    message = chat(client, reasoning_effort="minimal", max_completion_tokens=100).choices[0].message
    assert "<think>" not in (message.content or "")
    assert message.model_extra["reasoning_content"]


def test_completions(client: openai.OpenAI) -> None:
    prompts = ["def read_lines(path):\n", "import "]
    both = client.completions.create(model="tandem", prompt=prompts, max_tokens=8, echo=True)
    for prompt, choice in zip(prompts, both.choices, strict=True):
        alone = client.completions.create(model="tandem", prompt=prompt, max_tokens=8, logprobs=2)
        assert choice.text == prompt + alone.choices[0].text
        logprobs: Any = alone.choices[0].logprobs
        assert "".join(logprobs.tokens) == alone.choices[0].text
        assert logprobs.text_offset[0] == 0
    stream = client.completions.create(model="tandem", prompt=prompts, max_tokens=8, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text.removeprefix(prompt) for prompt, choice in zip(prompts, both.choices, strict=True)]


def test_responses(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TIME_TOOL["function"], "strict": True}
    asked: Any = [{"role": "user", "content": "What time is it in UTC?"}]
    first = client.responses.create(model="tandem", input=asked, tools=[tool], tool_choice="required")
    (call,) = (item for item in first.output if item.type == "function_call")
    assert call.name == "get_time"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    again: Any = [*asked, *(item.model_dump(exclude_none=True) for item in first.output), output]
    options: Any = {"model": "tandem", "input": again, "instructions": "Be brief.", "max_output_tokens": 16}
    second = client.responses.create(**options)
    assert second.output_text
    assert second.usage is not None
    assert second.usage.output_tokens <= 16
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert streamed.output_text == second.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{second.status}"


def test_wrong_fields_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra_body={"top_k": -5})
    assert caught.value.param == "top_k"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[{"role": "user", "content": "x " * 5000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_deadline_ends_the_answer(client: openai.OpenAI) -> None:
    answer = chat(client, max_completion_tokens=2000, extra_body={"ignore_eos": True, "timeout_ms": 100})
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].model_extra["tandem"]["finish_reason"] == "timeout"


def num_active(server: Any) -> float:
    return metrics(server)["tandem_num_active"]


def test_a_client_that_leaves_stops_the_generation(client: openai.OpenAI, server: Any) -> None:
    stream = chat(client, stream=True, **LONG)
    next(iter(stream))
    wait_until(lambda: num_active(server) == 1)
    stream.close()
    wait_until(lambda: num_active(server) == 0, timeout_s=3)
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.3), **LONG)
    wait_until(lambda: num_active(server) == 0, timeout_s=3)


def test_sigterm_drains(server: Any) -> None:
    with (
        running_gateway(server.grpc_url) as process,
        openai.OpenAI(base_url=f"{process.url}/v1", api_key="-") as client,
    ):
        stream = iter(chat(client, stream=True, max_completion_tokens=300, extra_body={"ignore_eos": True}))
        next(stream)
        process.terminate()
        time.sleep(0.2)
        with pytest.raises(openai.APIConnectionError):
            chat(client.with_options(max_retries=0))
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert process.wait() == 0


def test_what_has_not_ended_at_the_end_of_draining_is_told_so_and_journaled(server: Any, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    with (
        running_gateway(server.grpc_url, "--drain-s", "0.5", "--journal", str(journal)) as process,
        openai.OpenAI(base_url=f"{process.url}/v1", api_key="-", max_retries=0) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        whole = pool.submit(chat, client, **LONG)
        stream = iter(chat(client, stream=True, **LONG))
        next(stream)
        wait_until(lambda: num_active(server) == 2)
        process.terminate()
        with pytest.raises(openai.APIError, match="shuts down"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as caught:
            whole.result()
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
        assert process.wait() == 0
    rows = read(journal, {}, None)
    assert sorted((row["status"], row["is_streaming"], row["error"]) for row in rows) == [
        (200, True, "ApiError"),
        (503, False, "ApiError"),
    ]
