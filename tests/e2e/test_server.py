# SPDX-License-Identifier: Apache-2.0
"""Behaviour of a real Triton server with our models: streams, sessions, clients that go away."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer
from triton_calls import (
    CONTEXT_LEN,
    EXACTLY,
    FULL_ANSWER,
    MODEL_REPOSITORY,
    PROMPT,
    Answer,
    GrpcStream,
    ask,
    post,
)

# Would run for many seconds: what waits behind it tells whether it was cancelled.
LONG = {"text_input": PROMPT, "max_tokens": 3000, "sampling_parameters": EXACTLY}
NUM_STREAMS = 32


@pytest.fixture
def stream(server: Any) -> Iterator[GrpcStream]:
    with GrpcStream(server.grpc_url) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_REPOSITORY / "tandem" / "1" / "tandem-pydoc" / "tokenizer.json"))


# Answers.


def test_a_grpc_stream_holds_deltas(stream: GrpcStream) -> None:
    stream.send(text_input=PROMPT, max_tokens=20, sampling_parameters=EXACTLY, stream=True, **FULL_ANSWER)
    responses = list(stream.responses())
    assert len(responses) > 1
    assert [response.finish_reason for response in responses] == ["None"] * (len(responses) - 1) + ["length"]
    answer = Answer(responses)
    assert answer.num_output_tokens == len(answer.token_ids) == len(answer.logprobs) == 20
    assert all(logprob <= 0 for logprob in answer.logprobs)
    assert answer.text.strip()


def test_without_stream_there_is_one_response_with_the_prompt(stream: GrpcStream) -> None:
    streamed = stream.answer(text_input=PROMPT, max_tokens=20)
    stream.send("whole", text_input=PROMPT, max_tokens=20, **FULL_ANSWER)
    responses = list(stream.responses("whole"))
    assert [response.text_output for response in responses] == [PROMPT + streamed.text]
    assert responses[0].token_ids == streamed.token_ids
    assert responses[0].num_output_tokens == streamed.num_output_tokens


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_http_gives_the_same_text(server: Any, path: str) -> None:
    expected = ask(server, text_input=PROMPT, max_tokens=20)
    body = {"text_input": PROMPT, "max_tokens": 20, "stream": path != "generate", "return_finish_reason": True}
    status, reply = post(server.http_url, path, body | {"exclude_input_in_output": True})
    events = [reply] if path == "generate" else reply
    assert status == 200
    assert "".join(event["text_output"] for event in events) == expected.text
    assert events[-1]["finish_reason"] == expected.finish_reason
    assert (len(events) > 1) == (path == "generate_stream")


@pytest.mark.parametrize(
    "body",
    [
        {"text_input": [PROMPT], "max_tokens": [5]},
        {"text_input": PROMPT, "max_tokens": 5, "temperature": 0, "stream": False},
        {"text_input": PROMPT, "parameters": {"max_tokens": 5, "temperature": 0.0}},
        {"text_input": PROMPT, "sampling_parameters": '{"max_tokens": "5", "temperature": "0"}'},
        {"text_input": PROMPT, "max_tokens": 5, "sequence_id": 4, "priority": 1, "stop_words": ["@@", "§"]},
        {"text_input": PROMPT, "max_tokens": 5, "stop": "@@"},
    ],
)
def test_http_takes_parameters_in_all_their_places(server: Any, body: dict[str, Any]) -> None:
    expected = ask(server, text_input=PROMPT, max_tokens=5)
    assert post(server.http_url, "generate", body) == (
        200,
        {"model_name": "tandem_generate", "model_version": "1", "text_output": PROMPT + expected.text},
    )


def test_vllm_clients_reach_the_front_over_grpc(server: Any) -> None:
    expected = ask(server, text_input=PROMPT, max_tokens=10)
    assert ask(server, model="tandem_generate", text_input=PROMPT, max_tokens=10) == expected


def test_chat_and_token_input(server: Any, tokenizer: Tokenizer) -> None:
    messages = json.dumps([{"role": "user", "content": "What does os.getcwd do?"}])
    rendered = "<|im_start|>user\nWhat does os.getcwd do?<|im_end|>\n<|im_start|>assistant\n"
    chat = ask(server, messages=messages, max_tokens=12)
    assert ask(server, text_input=rendered, max_tokens=12) == chat
    assert ask(server, input_ids=tokenizer.encode(rendered).ids, max_tokens=12) == chat
    thinking = ask(server, messages=messages, enable_thinking=True, max_tokens=12)
    assert thinking == ask(server, text_input=rendered + "<think>\n", max_tokens=12)
    tools = json.dumps([{"type": "function", "function": {"name": "get_time", "parameters": {}}}])
    assert ask(server, messages=messages, tools=tools, max_tokens=2).num_input_tokens > chat.num_input_tokens


@pytest.mark.parametrize("prompt", ["Grüße, 世界! 😀👩‍👩‍👧", "😀" * 50, "x = '\\ud83d\\ude00'\x00\t"])
def test_any_text_is_streamed_in_whole_characters(server: Any, stream: GrpcStream, prompt: str) -> None:
    streamed = stream.answer(text_input=prompt, max_tokens=40, sampling_parameters=EXACTLY)
    status, reply = post(server.http_url, "generate", {"text_input": prompt, "max_tokens": 40, "ignore_eos": True})
    assert (status, reply["text_output"]) == (200, prompt + streamed.text)


def test_stop_strings_never_reach_the_stream(stream: GrpcStream) -> None:
    whole = stream.answer(text_input=PROMPT, max_tokens=30, sampling_parameters=EXACTLY)
    stop = whole.text[8:11]
    stopped = stream.answer(text_input=PROMPT, max_tokens=30, stop_words=[stop])
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_max_tokens_1_and_more_than_fit(stream: GrpcStream) -> None:
    assert stream.answer(text_input=PROMPT, max_tokens=1).num_output_tokens == 1
    prompt = [40 + number % 100 for number in range(CONTEXT_LEN - 20)]
    filled = stream.answer(input_ids=prompt, max_tokens=2**31 - 1, sampling_parameters=EXACTLY)
    assert filled.finish_reason == "length"
    assert filled.num_output_tokens == 20


# Many at once.


def test_32_streams_get_what_each_gets_alone(server: Any) -> None:
    prompts = [f"def function_{number}(value):\n" for number in range(NUM_STREAMS)]
    alone = {prompt: ask(server, text_input=prompt, max_tokens=16) for prompt in prompts[::8]}
    streams = [GrpcStream(server.grpc_url) for _ in prompts]
    for opened, prompt in zip(streams, prompts, strict=True):
        opened.send(text_input=prompt, max_tokens=16, stream=True, **FULL_ANSWER)
    together = {prompt: Answer(list(opened.responses())) for opened, prompt in zip(streams, prompts, strict=True)}
    for opened in streams:
        opened.cancel()
    assert {prompt: together[prompt] for prompt in alone} == alone
    assert all(answer.num_output_tokens for answer in together.values())


def test_32_http_requests_at_once(server: Any) -> None:
    expected = PROMPT + ask(server, text_input=PROMPT, max_tokens=16).text
    texts: list[str] = []

    def generate() -> None:
        texts.append(post(server.http_url, "generate", {"text_input": PROMPT, "max_tokens": 16})[1]["text_output"])

    threads = [threading.Thread(target=generate) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * NUM_STREAMS
