# SPDX-License-Identifier: Apache-2.0
"""A constraint that raises ends its own request and leaves the round's others alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from constraints import Steps
from engine_driver import VOCAB_SIZE, EngineDriver, Plain, Result, engine_config, num_different
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.errors import InternalError
from tandem_backend.types import Prompt, Request, SamplingParams
from torch import Tensor

PROMPT = (5, 9, 3, 3, 8)
OTHERS = ((3, 5, 7, 3, 5), (11, 2, 2))
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
NUM_GOOD = 7  # output tokens before the fault
METHODS = ("fork", "advance", "fill_mask", "settle", "forced", "is_finished")


class Faulty(Steps):
    """Steps whose `method` raises once `num_good` tokens were taken."""

    method, num_good = "", 0

    def fork(self) -> "Faulty":
        self._meet("fork")
        forked = Faulty(self.vocab_size, self.modulus, self.num_taken)
        forked.method, forked.num_good = self.method, self.num_good
        return forked

    def advance(self, token_id: int) -> bool:
        self._meet("advance")
        return super().advance(token_id)

    def fill_mask(self, mask: Tensor) -> None:
        self._meet("fill_mask")
        super().fill_mask(mask)

    def settle(self, token_id: int) -> int | None:
        self._meet("settle")
        return super().settle(token_id)

    def forced(self) -> list[int]:
        self._meet("forced")
        return super().forced()

    def is_finished(self) -> bool:
        self._meet("is_finished")
        return super().is_finished()

    def _meet(self, method: str) -> None:
        if method == self.method and self.num_taken >= self.num_good:
            raise ZeroDivisionError(f"in {method}")


def faulty(method: str, num_good: int = NUM_GOOD) -> Faulty:
    constraint = Faulty(VOCAB_SIZE)
    constraint.method, constraint.num_good = method, num_good
    return constraint


def add(driver: EngineDriver, request: Request, constraint: Steps) -> None:
    driver.engine.add(replace(driver.engine.prepare(request), constraint=constraint))
    driver.results[request.request_id] = Result()


@pytest.fixture(scope="module")
def constrained(hybrid: Path) -> Callable[[SamplingParams], Result]:
    """What Steps gives, decoded plainly."""

    def run(params: SamplingParams) -> Result:
        driver = EngineDriver(engine_config(hybrid))
        add(driver, Request(request_id="1", prompt=Prompt(token_ids=PROMPT), params=params), Steps(VOCAB_SIZE))
        driver.finish()
        return driver.results["1"]

    return run


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["none", "half", "oracle", "mtp+lookup"])
@pytest.mark.parametrize("method", METHODS)
def test_a_fault_ends_its_own_request_only(
    method: str,
    drafter: str,
    temperature: float,
    hybrid: Path,
    plain: Plain,
    constrained: Callable[[SamplingParams], Result],
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = replace(PARAMS, temperature=temperature, seed=1)
    right = constrained(params)
    texts = {PROMPT: right.token_ids} | {prompt: plain.continuation(prompt) for prompt in OTHERS}
    extra = {name: ScriptedDrafter(name, texts, VOCAB_SIZE) for name in ("half", "oracle")}
    config = engine_config(hybrid, drafters=("lookup", "mtp"), router="always", max_failed_rounds=1)
    driver = EngineDriver(config, extra, poison=True)
    request = Request(request_id="faulty", prompt=Prompt(token_ids=PROMPT), params=replace(params, drafter=drafter))
    add(driver, request, faulty(method))
    for n, prompt in enumerate(OTHERS):
        other = replace(PARAMS, drafter=drafter)
        driver.add(Request(request_id=str(n), prompt=Prompt(token_ids=prompt), params=other))
    driver.finish()
    for n, prompt in enumerate(OTHERS):
        assert num_different(driver.results[str(n)], plain.run(prompt, PARAMS)) == 0
    failed = driver.results["faulty"]
    is_called = drafter != "none" or method not in ("fork", "forced")
    if is_called and not (method == "settle" and temperature):
        assert isinstance(failed.error, InternalError)
        assert str(failed.error) == f"the request's grammar failed: ZeroDivisionError: in {method}"
        assert 0 < len(failed.token_ids) <= NUM_GOOD
        assert caplog.text.count("a request's constraint failed") == 1
    else:  # plain decoding forks and forces nothing, and a drawn token takes a mask
        assert failed.error is None
    assert failed.token_ids == right.token_ids[: len(failed.token_ids)]
    assert failed.logprobs == right.logprobs[: len(failed.token_ids)]
    assert not driver.engine.health.is_broken
    assert not driver.engine.rounds.drafting.failed


@pytest.mark.parametrize("method", METHODS)
def test_a_session_goes_on_behind_what_its_failed_turn_gave(method: str, hybrid: Path, plain: Plain) -> None:
    driver = EngineDriver(engine_config(hybrid, drafters=("lookup",), router="always"), poison=True)
    turn = Request(request_id="1", prompt=Prompt(token_ids=PROMPT), params=PARAMS, sequence_id=1, sequence_start=True)
    add(driver, turn, faulty(method))
    driver.finish()
    failed = driver.results["1"]
    following = Request(request_id="2", prompt=Prompt(token_ids=(4, 6)), params=PARAMS, sequence_id=1)
    result = driver.run(following)
    whole = (*PROMPT, *failed.token_ids, 4, 6)
    assert num_different(result, plain.run(whole, PARAMS)) == 0


def test_a_fault_at_the_first_token_gives_none(hybrid: Path) -> None:
    for method in ("advance", "fill_mask"):
        driver = EngineDriver(engine_config(hybrid), poison=True)
        add(driver, Request(request_id="1", prompt=Prompt(token_ids=PROMPT), params=PARAMS), faulty(method, 0))
        driver.finish()
        assert isinstance(driver.results["1"].error, InternalError)
        assert driver.results["1"].token_ids == []
        assert driver.engine.statistics()["num_active"] == 0
