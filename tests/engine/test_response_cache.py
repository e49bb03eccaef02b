# SPDX-License-Identifier: Apache-2.0
"""Whole answers kept: for whom, for how long, and that they are the same to the bit."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from engine_driver import EngineDriver, Plain, Result, engine_config
from session_requests import start
from tandem_backend.engine.cache.responses import ResponseCache, ResponseKey, response_key
from tandem_backend.types import FinishReason, Prompt, Request, SamplingParams, StepOutput

PROMPT = (3, 4, 5)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
SEEDED = replace(PARAMS, temperature=1.0, seed=7)
IDS = (str(n) for n in count())


@pytest.fixture
def driver(hybrid: Path) -> EngineDriver:
    return EngineDriver(engine_config(hybrid, drafters=("lookup",), response_cache_bytes=100_000))


def ask(
    driver: EngineDriver, params: SamplingParams = PARAMS, prompt: tuple[int, ...] = PROMPT, salt: str = ""
) -> Result:
    request_id = next(IDS)
    driver.add(Request(request_id=request_id, prompt=Prompt(token_ids=prompt), params=params, cache_salt=salt))
    driver.finish()
    return driver.results[request_id]


def is_kept(result: Result) -> bool:
    assert result.stats is not None
    return result.stats.is_cached_response


@pytest.mark.parametrize("params", [PARAMS, SEEDED, replace(PARAMS, num_logprobs=2, prompt_logprobs=1)])
def test_the_same_request_gets_the_same_answer_from_memory(driver: EngineDriver, params: SamplingParams) -> None:
    first, second = ask(driver, params), ask(driver, replace(params, drafter="none"))
    assert [is_kept(first), is_kept(second)] == [False, True]
    assert (second.token_ids, second.logprobs, second.text) == (first.token_ids, first.logprobs, first.text)
    assert second.finish_reason == first.finish_reason == FinishReason.LENGTH
    counters = driver.engine.counters().caches["response"]
    assert (counters.num_hits, counters.num_misses, counters.num_saved_tokens) == (1, 1, 9)
    assert driver.engine.statistics()["response_cache_bytes"] > 0


def test_it_is_plain_decoding_to_the_bit(driver: EngineDriver, plain: Plain) -> None:
    reference = plain.run(PROMPT, PARAMS)
    for _ in range(2):
        result = ask(driver)
        assert (result.token_ids, result.logprobs) == (reference.token_ids, reference.logprobs)


@pytest.mark.parametrize(
    ("params", "prompt", "salt"),
    [
        (replace(PARAMS, max_tokens=7), PROMPT, ""),
        (replace(PARAMS, num_logprobs=1), PROMPT, ""),
        (replace(SEEDED, seed=8), PROMPT, ""),
        (PARAMS, (*PROMPT, 6), ""),
        (PARAMS, PROMPT, "another"),
    ],
)
def test_another_request_does_not(
    driver: EngineDriver, params: SamplingParams, prompt: tuple[int, ...], salt: str
) -> None:
    ask(driver)
    ask(driver, SEEDED)
    assert not is_kept(ask(driver, params, prompt, salt))


def test_neither_unseeded_requests_nor_turns_of_sequences_are_kept(driver: EngineDriver) -> None:
    unseeded = replace(SEEDED, seed=None)
    assert [is_kept(ask(driver, unseeded)) for _ in range(2)] == [False, False]
    driver.run(start("turn", PROMPT))
    assert not is_kept(ask(driver, PARAMS))
    assert driver.engine.counters().caches["response"].num_misses == 1


def test_a_sequence_of_one_request_is_kept_and_still_ends_the_one_before(driver: EngineDriver) -> None:
    single = Request(
        request_id="single",
        prompt=Prompt(token_ids=PROMPT),
        params=PARAMS,
        sequence_id="one",
        sequence_start=True,
        sequence_end=True,
    )
    kept = ask(driver)
    driver.add(start("open", PROMPT, sequence_id="one"))
    driver.step()
    driver.add(single)
    driver.finish()
    assert driver.results["open"].finish_reason == FinishReason.CANCELLED
    assert is_kept(driver.results["single"])
    assert driver.results["single"].token_ids == kept.token_ids
    assert driver.engine.statistics()["num_sessions"] == 0


def test_cancelled_answers_are_not_kept(driver: EngineDriver) -> None:
    driver.add(Request(request_id="cancelled", prompt=Prompt(token_ids=PROMPT), params=PARAMS))
    driver.step()
    driver.engine.cancel("cancelled")
    driver.finish()
    assert driver.results["cancelled"].token_ids
    assert not is_kept(ask(driver))


def test_it_is_off_by_default(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid))
    assert [is_kept(ask(driver)) for _ in range(2)] == [False, False]
    assert driver.engine.counters().caches["response"].num_misses == 0


def test_clearing_forgets_answers_and_prefixes(driver: EngineDriver) -> None:
    ask(driver)
    assert driver.engine.clear_caches() == {"prefix": 2, "response": 1}
    again = ask(driver)
    assert again.stats is not None
    assert (again.stats.is_cached_response, again.stats.num_cached_tokens) == (False, 0)


def add(cache: ResponseCache, name: str, num_tokens: int = 10) -> ResponseKey:
    request = Request(request_id=name, prompt=Prompt(text=name))
    key = response_key(request, tuple(range(num_tokens)))
    assert key is not None
    key = replace(key, cache_salt=name)
    cache.expect(name, key)
    cache.watch([StepOutput(request_id=name, text="a"), StepOutput(request_id=name, finish_reason=FinishReason.STOP)])
    return key


def test_answers_grow_old() -> None:
    now = [0.0]
    cache = ResponseCache(100_000, ttl_s=5, clock=lambda: now[0])
    key = add(cache, "a")
    now[0] = 5
    assert cache.answer(key, "x", 0) is not None
    now[0] = 5.1
    assert cache.answer(key, "x", 0) is None
    assert cache.num_bytes == 0


def test_the_least_recently_used_answer_makes_room() -> None:
    cache = ResponseCache(5000, ttl_s=5)
    keys = [add(cache, name) for name in "abc"]
    assert cache.answer(keys[0], "x", 0) is not None
    keys.append(add(cache, "d"))
    assert [cache.answer(key, "x", 0) is not None for key in keys] == [True, False, True, True]
    assert cache.counters.num_evictions == 1
    add(cache, "too large", 1000)
    assert cache.num_bytes <= 5000
