# SPDX-License-Identifier: Apache-2.0
"""Requests that were found to hurt others, or to end in a bug's message: refused early, by the field's name."""

from pathlib import Path
from typing import Any

import pytest
from engine_driver import EngineDriver, engine_config
from session_requests import start, turn
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import Prompt, Request, SamplingParams

USER = {"role": "user", "content": "Hello."}


@pytest.fixture(scope="module")
def driver(bundled: Path) -> EngineDriver:
    return EngineDriver(engine_config(bundled, kv_cache_bytes=64 * 1024 * 1024))


def refusal(driver: EngineDriver, prompt: Prompt, **params: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        driver.engine.prepare(Request(request_id="1", prompt=prompt, params=SamplingParams(**params)))
    return str(caught.value)


def refuse_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: Tokenizer, text: str, **options: Any) -> list[int]:
        raise AssertionError("a text that can't fit is tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)


def test_a_huge_text_is_refused_before_it_is_tokenised(driver: EngineDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_encode(monkeypatch)
    assert refusal(driver, Prompt(text="x" * 4_000_000)).startswith("text_input: the prompt has at least")
    long = {"role": "user", "content": "x" * 4_000_000}
    assert refusal(driver, Prompt(messages=(long,))).startswith("messages: the prompt has at least")
    assert refusal(driver, Prompt(messages=(USER,) * 5000)).startswith("messages: the prompt has at least 5000 tokens")


@pytest.mark.parametrize("text", ["a", "\n", "  ", "é", "e\u0301", "\U0001f40d", "<|im_start|>", "json.dumps(obj)"])
def test_the_bound_never_exceeds_the_tokens(driver: EngineDriver, text: str) -> None:
    tokenizer = driver.engine.tokenizer
    assert tokenizer is not None
    for many in (text, text * 50, text * 999):
        assert tokenizer.min_tokens(many) <= len(tokenizer.encode(many, add_special_tokens=False))


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "messages", "tools", "add_generation_prompt", "bos_token"]
)
def test_a_client_can_not_reach_into_the_template_engine(driver: EngineDriver, name: str) -> None:
    prompt = Prompt(messages=(USER,), template_kwargs={name: "x"})
    assert refusal(driver, prompt) == f"chat_template_kwargs: {name} may not be set"


def test_min_tokens_needs_a_token_that_does_not_stop(driver: EngineDriver) -> None:
    every = tuple(range(driver.engine.model.config.vocab_size))
    message = refusal(driver, Prompt(token_ids=(5,)), min_tokens=2, stop_token_ids=every)
    assert message == "min_tokens: must be 0 where stop_token_ids leave no other token"


def test_the_end_of_a_refused_turn_frees_the_sequence(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid))
    driver.run(start("first", (3, 4, 5)))
    driver.engine.end_sequence("unknown")
    driver.add(turn("second", (6,)))
    (sequence_id,) = driver.engine.scheduler.sessions
    driver.engine.end_sequence(sequence_id)
    assert driver.engine.scheduler.sessions  # a turn of it is left
    driver.finish()
    assert driver.results["second"].error is None
    assert not driver.engine.scheduler.sessions
    assert driver.engine.scheduler.slots.num_free == driver.engine.scheduler.slots.size


def test_scheduled_comes_before_the_first_token(driver: EngineDriver) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    stats = driver.run(Request(request_id="times", prompt=Prompt(token_ids=(5, 6, 7)), params=params)).stats
    assert stats is not None
    assert stats.arrival_time_ns <= stats.first_scheduled_time_ns < stats.first_token_time_ns
