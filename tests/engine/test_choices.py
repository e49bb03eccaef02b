# SPDX-License-Identifier: Apache-2.0
"""n choices from one prompt, which is read once: each equals, bit for bit, the single request with its seed."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from constraints import Steps
from engine_driver import VOCAB_SIZE, EngineDriver, Plain, Result, engine_config, limit_blocks, num_different
from tandem_backend.config import MIB
from tandem_backend.engine.choices import choice_ids
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.errors import InvalidRequestError, UnavailableError
from tandem_backend.types import FinishReason, Prompt, Request, SamplingParams

PROMPT = tuple((7 * n * n + n) % VOCAB_SIZE for n in range(75))
OTHER = (3, 5, 7, 3, 5)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = replace(PARAMS, temperature=1.0, seed=2**64 - 2)  # whose successors start at 0 again
KINDS = {
    "greedy": PARAMS,
    "sampled": SAMPLED,
    "penalties": replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.5, top_p=0.9, num_logprobs=3),
    "stops": replace(SAMPLED, stop_token_ids=(3, 11, 17), ignore_eos=False, min_tokens=2),
}


def request(num_choices: int, params: SamplingParams = SAMPLED, name: str = "r", **fields: object) -> Request:
    asked = replace(params, num_choices=num_choices)
    return Request(request_id=name, prompt=Prompt(token_ids=PROMPT), params=asked, **fields)  # type: ignore[arg-type]


def single(params: SamplingParams, index: int) -> SamplingParams:
    return params if params.seed is None else replace(params, seed=(params.seed + index) % 2**64)


def choices(driver: EngineDriver, num_choices: int, name: str = "r") -> list[Result]:
    """What the choices of a request got."""
    return [driver.results[choice] for choice in choice_ids(request(num_choices, name=name))]


def num_wrong(found: list[Result], plain: Plain, params: SamplingParams) -> int:
    return sum(num_different(got, plain.run(PROMPT, single(params, k))) for k, got in enumerate(found))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", ["none", "half", "oracle", "mtp+lookup"])
@pytest.mark.parametrize("cache_bytes", [0, 2 * MIB])
def test_each_choice_is_the_single_answer_with_its_seed(
    kind: str, drafter: str, cache_bytes: int, hybrid: Path, plain: Plain
) -> None:
    params = KINDS[kind]
    extra = {
        name: ScriptedDrafter(name, {PROMPT: plain.run(PROMPT, params).token_ids}, VOCAB_SIZE)
        for name in ("half", "oracle")
    }
    config = engine_config(
        hybrid,
        drafters=("lookup", "mtp"),
        router="always",
        prefix_cache_bytes=cache_bytes,
        max_active=4,
        max_prefill_rows=32,
        joint_prefill_rows=7,
    )
    driver = EngineDriver(config, extra, poison=True)
    driver.add(Request(request_id="beside", prompt=Prompt(token_ids=OTHER), params=PARAMS))
    driver.add(request(5, replace(params, drafter=drafter)))
    driver.finish()
    found = choices(driver, 5)
    assert num_wrong(found, plain, params) == 0
    assert num_different(driver.results["beside"], plain.run(OTHER, PARAMS)) == 0
    stats = [result.stats for result in found if result.stats is not None]
    assert [item.seed for item in stats] == [single(params, k).seed for k in range(5)]
    assert [item.num_cached_tokens for item in stats] == [0, *[len(PROMPT) - 1 if cache_bytes else 0] * 4]
    assert len({tuple(result.token_ids) for result in found}) == (1 if kind == "greedy" else 5)
    assert driver.engine.statistics()["num_active"] == 0


def test_a_constraint_is_the_choices_own(hybrid: Path) -> None:
    def run(num_choices: int, params: SamplingParams, drafter: str) -> list[Result]:
        driver = EngineDriver(engine_config(hybrid, drafters=("lookup", "mtp"), router="always"), poison=True)
        asked = request(num_choices, replace(params, drafter=drafter))
        driver.engine.add(replace(driver.engine.prepare(asked), constraint=Steps(VOCAB_SIZE)))
        driver.results |= {name: Result() for name in choice_ids(asked)}
        driver.finish()
        return choices(driver, num_choices)

    found = run(4, SAMPLED, "mtp+lookup")
    for k, result in enumerate(found):
        assert num_different(result, run(1, single(SAMPLED, k), "none")[0]) == 0
        assert [token_id % 3 for token_id in result.token_ids] == [n % 3 for n in range(20)]


def test_without_a_seed_the_choices_follow_a_fresh_one(hybrid: Path, plain: Plain) -> None:
    driver = EngineDriver(engine_config(hybrid))
    driver.add(request(3, replace(SAMPLED, seed=None)))
    driver.finish()
    seeds = [result.stats.seed for result in choices(driver, 3) if result.stats is not None]
    assert seeds[0] is not None
    assert seeds == [seeds[0], seeds[0] + 1, seeds[0] + 2]
    assert num_wrong(choices(driver, 3), plain, replace(SAMPLED, seed=seeds[0])) == 0


def test_choices_take_turns_where_memory_is_short(hybrid: Path, plain: Plain) -> None:
    driver = EngineDriver(engine_config(hybrid, max_active=8, prefix_cache_bytes=2 * MIB), poison=True)
    limit_blocks(driver.engine, driver.engine.scheduler.num_blocks(len(PROMPT) + 20) + 1)
    driver.add(request(4))
    most = 0
    while driver.engine.has_work():
        driver.step()
        most = max(most, int(driver.engine.statistics()["num_active"]))
    assert most < 4
    assert num_wrong(choices(driver, 4), plain, SAMPLED) == 0


def test_the_first_tells_the_prompts_logprobs_and_the_others_do_not_compute_them(hybrid: Path, plain: Plain) -> None:
    params = replace(SAMPLED, prompt_logprobs=2)
    driver = EngineDriver(engine_config(hybrid))
    driver.add(request(3, params))
    driver.finish()
    first, *later = choices(driver, 3)
    assert num_different(first, plain.run(PROMPT, params)) == 0
    assert [result.prompt_logprobs for result in later] == [[], []]
    for k, result in enumerate(later, start=1):
        assert num_different(result, plain.run(PROMPT, single(SAMPLED, k))) == 0
    assert [r.stats.num_cached_tokens for r in later if r.stats is not None] == [len(PROMPT) - 1] * 2


def cancel_all(driver: EngineDriver) -> None:
    for name in choice_ids(request(4)):
        driver.engine.cancel(name)


def close_sequence(driver: EngineDriver) -> None:
    driver.engine.close_sequence("s")


def start_anew(driver: EngineDriver) -> None:
    driver.add(request(1, replace(PARAMS, max_tokens=1), "next", sequence_id="s", sequence_start=True))


@pytest.mark.parametrize("num_steps", [0, 1, 4, 8])
@pytest.mark.parametrize("end", [cancel_all, close_sequence, start_anew])
def test_all_choices_can_be_ended(end: Callable[[EngineDriver], None], num_steps: int, hybrid: Path) -> None:
    """Those that run and those that wait, for their turn or for the prompt."""
    driver = EngineDriver(engine_config(hybrid, max_active=3, max_prefill_rows=20), poison=True)
    driver.add(request(4, sequence_id="s", sequence_start=True, sequence_end=True))
    for _ in range(num_steps):
        driver.step()
    end(driver)
    driver.finish()
    assert {result.finish_reason for result in choices(driver, 4)} == {FinishReason.CANCELLED}


def test_a_choice_that_is_cancelled_leaves_the_others(hybrid: Path, plain: Plain) -> None:
    """Also the one that reads the prompt for all."""
    driver = EngineDriver(engine_config(hybrid, max_prefill_rows=20), poison=True)
    driver.add(request(4))
    driver.step()
    driver.engine.cancel("r")
    driver.finish()
    first, *later = choices(driver, 4)
    assert first.finish_reason == FinishReason.CANCELLED
    for k, result in enumerate(later, start=1):
        assert num_different(result, plain.run(PROMPT, single(SAMPLED, k))) == 0


def test_all_choices_end_in_time(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid, max_active=2))
    driver.add(request(4, timeout_ms=1))
    time.sleep(0.002)
    driver.finish()
    assert [result.finish_reason for result in choices(driver, 4)] == [FinishReason.TIMEOUT] * 4


def test_choices_of_a_request_that_is_served_are_not_turned_away(hybrid: Path, plain: Plain) -> None:
    """queue_timeout_s is for requests that wait for their first start."""
    driver = EngineDriver(engine_config(hybrid, max_active=1, queue_timeout_s=0.05))
    driver.add(request(3))
    driver.step()
    time.sleep(0.06)
    driver.finish()
    assert num_wrong(choices(driver, 3), plain, SAMPLED) == 0


def test_known_answers_are_choices_too(hybrid: Path, plain: Plain) -> None:
    driver = EngineDriver(engine_config(hybrid, response_cache_bytes=MIB))
    for k in (0, 2):
        driver.run(request(1, single(SAMPLED, k), f"single {k}"))
    driver.add(request(4))
    driver.finish()
    found = choices(driver, 4)
    assert [r.stats.is_cached_response for r in found if r.stats is not None] == [True, False, True, False]
    for k, result in enumerate(found):
        assert result.token_ids == plain.run(PROMPT, single(SAMPLED, k)).token_ids


def test_each_choice_has_the_receipt_of_the_single_answer(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid))
    driver.add(request(3, return_receipt=True))
    driver.finish()
    for k, result in enumerate(choices(driver, 3)):
        alone = driver.run(request(1, single(SAMPLED, k), f"single {k}", return_receipt=True))
        assert result.receipt is not None
        assert result.receipt == alone.receipt


def test_all_choices_have_room_or_none_is_taken(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid, max_active=2, max_queued=3))
    driver.add(request(3))
    with pytest.raises(UnavailableError, match="the queue is full"):
        driver.add(request(3, name="second"))
    driver.add(request(2, name="third"))
    driver.finish()
    assert set(driver.results) == {"r", "r#1", "r#2", "third", "third#1"}
    with pytest.raises(InvalidRequestError, match=r"^n: must be at most 5, .*; got 6$"):
        driver.engine.prepare(request(6))


@pytest.mark.parametrize("flags", [{}, {"sequence_start": True}, {"sequence_end": True}])
def test_a_turn_of_an_open_sequence_has_one_answer(flags: dict[str, bool], hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid))
    with pytest.raises(InvalidRequestError, match=r"^n: must be 1 for a turn of a sequence that stays open"):
        driver.engine.prepare(request(2, sequence_id=5, **flags))
