# SPDX-License-Identifier: Apache-2.0
"""Several choices of a real Triton server: each is the single answer with its seed, and one request is one stream."""

import asyncio
import json
import time
from typing import Any

import pytest
from tandem_client import AsyncTandemClient, Completion, ServerError, TandemClient
from triton_calls import PROMPT, GrpcStream, metrics, post, wait_until

SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "logprobs": 2, "stop": "\n\n"}
LONG: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 4000}


def key(answer: Completion) -> tuple[Any, ...]:
    return (answer.text, answer.token_ids, answer.logprobs, answer.top_logprobs, answer.finish_reason)


def test_each_choice_is_the_single_answer_with_its_seed(server: Any) -> None:
    prompt = "def choose_lines(path, number):\n"  # which no other test has brought into the prefix cache
    with TandemClient(server.grpc_url) as client:
        found = client.complete(prompt, **SAMPLED, seed=5, n=4).choices
        singles = [client.complete(prompt, **SAMPLED, seed=5 + k) for k in range(4)]
        greedy = client.complete(prompt, max_tokens=8, n=2).choices
    assert [key(answer) for answer in found] == [key(answer) for answer in singles]
    assert [answer.usage.seed for answer in found] == [5, 6, 7, 8]
    assert len({answer.token_ids for answer in found}) > 1
    assert all(answer.usage.num_cached_tokens == answer.usage.num_input_tokens - 1 for answer in found[1:])
    assert key(greedy[0]) == key(greedy[1])

    async def run() -> Completion:
        async with AsyncTandemClient(server.grpc_url) as client:
            return await client.complete(prompt, **SAMPLED, seed=5, n=4)

    assert [key(answer) for answer in asyncio.run(run()).choices] == [key(answer) for answer in singles]


def test_http_gives_all_choices_in_one_response_and_streams_them_by_index(server: Any) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 12, "temperature": 0.9, "seed": 5, "n": 3}
    asked |= {"exclude_input_in_output": True, "return_token_ids": True, "return_finish_reason": True}
    status, whole = post(server.http_url, "generate", {**asked, "return_perf_metrics": True, "return_logprobs": True})
    assert status == 200
    assert whole["choice_index"] == [0, 1, 2]
    assert [int(seed) for seed in whole["seed"]] == [5, 6, 7]
    assert len(whole["token_ids"]) == sum(whole["num_output_tokens"])
    assert [len(json.loads(text)) for text in whole["logprobs"]] == whole["num_output_tokens"]
    status, events = post(server.http_url, "generate_stream", {**asked, "stream": True})
    assert status == 200
    texts = ["", "", ""]
    for event in events:
        texts[event["choice_index"]] += event["text_output"]
    assert texts == whole["text_output"]
    assert sorted(e["choice_index"] for e in events if e["finish_reason"] != "None") == [0, 1, 2]
    singles = [post(server.http_url, "generate", {**asked, "n": 1, "seed": 5 + k})[1] for k in range(3)]
    assert [single["text_output"] for single in singles] == texts
    assert all("choice_index" not in single for single in singles)


@pytest.mark.parametrize("model", ["tandem", "tandem_generate"])
def test_a_client_that_cancels_ends_all_choices(server: Any, model: str) -> None:
    sampling = '{"ignore_eos": true, "n": 4, "temperature": 0.5, "seed": 1}'
    num_sessions = metrics(server)["tandem_num_sessions"]  # that other tests left open
    with GrpcStream(server.grpc_url) as leaving:
        leaving.send(model=model, stream=True, sampling_parameters=sampling, **LONG)
        next(leaving.responses())
    cancelled_s = time.time()

    def is_over() -> bool:
        found = metrics(server)
        is_new = found["tandem_heartbeat_timestamp_seconds"] > cancelled_s
        is_idle = found["tandem_num_active"] == found["tandem_num_queued"] == 0
        return is_new and is_idle and found["tandem_num_sessions"] <= num_sessions

    wait_until(is_over)


def test_an_open_sequence_has_one_answer_a_turn(server: Any) -> None:
    with TandemClient(server.grpc_url) as client, client.session() as session:
        with pytest.raises(ServerError, match="n: must be 1 for a turn of a sequence that stays open") as refused:
            session.complete(PROMPT, max_tokens=4, n=2)
        assert refused.value.code == "INVALID_ARG"
        assert len(session.complete(PROMPT, max_tokens=4).choices) == 1
