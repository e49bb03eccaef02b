# SPDX-License-Identifier: Apache-2.0
"""The hook for grammars: masks along each node's own path, a state that no rejected draft touches."""

from dataclasses import replace
from pathlib import Path

import pytest
from constraints import Steps
from engine_driver import VOCAB_SIZE, EngineDriver, Result, engine_config, num_different
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import Prompt, Request, SamplingParams

PROMPT = (5, 9, 3, 3, 8)


def run(driver: EngineDriver, params: SamplingParams, request_id: str = "1") -> Result:
    prepared = driver.engine.prepare(Request(request_id=request_id, prompt=Prompt(token_ids=PROMPT), params=params))
    driver.engine.add(replace(prepared, constraint=Steps(VOCAB_SIZE)))
    driver.results[request_id] = Result()
    driver.finish()
    return driver.results[request_id]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["half", "oracle", "wrong", "lookup", "mtp", "mtp+lookup"])
def test_a_constraint_holds_on_every_path(hybrid: Path, drafter: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=1, drafter=drafter)
    plain = run(EngineDriver(engine_config(hybrid)), replace(params, drafter="none"))
    assert [token_id % 3 for token_id in plain.token_ids] == [n % 3 for n in range(24)]
    config = engine_config(hybrid, drafters=("lookup", "mtp"), router="always")
    extra = {name: ScriptedDrafter(name, {PROMPT: plain.token_ids}, VOCAB_SIZE) for name in ("half", "oracle", "wrong")}
    result = run(EngineDriver(config, extra), params)
    assert num_different(result, plain) == 0
    assert result.stats is not None
    if drafter != "lookup":  # a text without repetitions gives it nothing
        assert result.stats.num_draft_tokens > 0
    if drafter in ("half", "oracle"):
        assert result.stats.num_accepted_tokens > 0


def test_a_request_without_any_token_left_ends_with_an_error(hybrid: Path) -> None:
    """Tokens before it go out; nothing else is disturbed."""
    allowed = tuple(token_id for token_id in range(VOCAB_SIZE) if token_id % 3 != 2)
    params = SamplingParams(max_tokens=24, ignore_eos=True, allowed_token_ids=allowed)
    plain = run(EngineDriver(engine_config(hybrid)), params)
    assert len(plain.token_ids) == 2
    assert isinstance(plain.error, InvalidRequestError)
    oracle = ScriptedDrafter("oracle", {PROMPT: [*plain.token_ids, 2]}, VOCAB_SIZE)
    driver = EngineDriver(engine_config(hybrid, router="always"), {"oracle": oracle})
    result = run(driver, replace(params, drafter="oracle"))
    assert num_different(result, plain) == 0
    assert isinstance(result.error, InvalidRequestError)
    assert driver.engine.statistics()["num_active"] == 0
