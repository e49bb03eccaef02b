# SPDX-License-Identifier: Apache-2.0
"""Sampled answers of a real Triton server: a seed is all that counts, whatever is drafted, whoever is served."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tandem_client import ServerError, TandemClient
from triton_calls import PROMPT, post

SAMPLED = {"max_tokens": 40, "temperature": 0.8, "top_p": 0.95, "logprobs": 3}
PENALTIES = {"ignore_eos": True, "repetition_penalty": 1.2, "frequency_penalty": 0.3}


def test_a_seed_gives_the_same_answer_alone_beside_others_and_without_drafts(server: Any) -> None:
    with TandemClient(server.grpc_url) as client, ThreadPoolExecutor(8) as pool:
        alone = client.complete(PROMPT, **SAMPLED, seed=1, sampling=PENALTIES)
        plain = client.complete(PROMPT, **SAMPLED, seed=1, sampling={**PENALTIES, "drafter": "none"})
        seeds = [1, 2, 3, 1, 4, 5, 6, 1]
        together = list(pool.map(lambda seed: client.complete(PROMPT, **SAMPLED, seed=seed, sampling=PENALTIES), seeds))
    key = (alone.text, alone.token_ids, alone.logprobs, alone.top_logprobs)
    assert len(alone.token_ids) == 40
    assert alone.top_logprobs is not None
    assert all(len(top) == 3 for top in alone.top_logprobs)
    assert alone.usage.seed == 1
    for answer in (plain, *(a for a, seed in zip(together, seeds, strict=True) if seed == 1)):
        assert (answer.text, answer.token_ids, answer.logprobs, answer.top_logprobs) == key
    assert len({answer.token_ids for answer in together}) == 6


def test_an_answer_without_a_seed_can_be_replayed(server: Any) -> None:
    with TandemClient(server.grpc_url) as client:
        answers = [client.complete(PROMPT, **SAMPLED) for _ in range(2)]
        assert answers[0].token_ids != answers[1].token_ids
        again = client.complete(PROMPT, **SAMPLED, seed=answers[0].usage.seed)
        assert (again.token_ids, again.logprobs) == (answers[0].token_ids, answers[0].logprobs)
        assert client.complete(PROMPT, max_tokens=4).usage.seed is None


def test_http_takes_sampling_and_gives_prompt_logprobs(server: Any) -> None:
    body = {"text_input": PROMPT, "max_tokens": 20, "temperature": 0.7, "seed": 2**63 + 1, "prompt_logprobs": 2}
    asked = {"return_perf_metrics": True, "return_num_input_tokens": True, "exclude_input_in_output": True}
    replies = [post(server.http_url, "generate", {**body, **asked}) for _ in range(2)]
    assert [status for status, _ in replies] == [200, 200]
    first, second = (reply for _, reply in replies)
    assert first["text_output"] == second["text_output"]
    assert int(first["seed"]) == 2**63 + 1
    entries = json.loads(first["prompt_logprobs"])
    assert len(entries) == first["num_input_tokens"]
    assert entries[0] is None
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries[1:])


def test_relaxed_acceptance_is_refused_unless_the_engine_allows_it(server: Any) -> None:
    with TandemClient(server.grpc_url) as client, pytest.raises(ServerError, match="relax_tau: must be absent"):
        client.complete(PROMPT, max_tokens=4, sampling={"relax_tau": 0.5})
