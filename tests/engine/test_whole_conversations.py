# SPDX-License-Identifier: Apache-2.0
"""Turns that bring the whole conversation: answers depend on that alone, and what is kept makes them cheap."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from cold_state import tokens
from engine_driver import EngineDriver, Plain, engine_config, num_different
from session_requests import PARAMS, turn
from tandem_backend.types import Prompt, Request

FIRST = tuple(tokens(1, 90))


def new_driver(checkpoint: Path, **overrides: object) -> EngineDriver:
    values = {"drafters": ("lookup", "mtp"), "router": "always", "max_active": 2, "max_sessions": 2, **overrides}
    return EngineDriver(engine_config(checkpoint, **values), poison=True)


def whole(request_id: str, token_ids: Sequence[int], *, start: bool = False, sequence_id: str = "chat") -> Request:
    return turn(request_id, token_ids, sequence_id=sequence_id, sequence_start=start, whole_conversation=True)


def num_cached(driver: EngineDriver, request_id: str) -> int:
    stats = driver.results[request_id].stats
    assert stats is not None
    return stats.num_cached_tokens


def test_turns_go_on_from_what_the_sequence_keeps(hybrid: Path, plain: Plain) -> None:
    driver = new_driver(hybrid)
    conversation = FIRST
    for n in range(3):
        result = driver.run(whole(str(n), conversation, start=n == 0))
        assert num_different(result, plain.run(conversation, PARAMS)) == 0
        assert result.stats is not None
        assert result.stats.num_prompt_tokens == len(conversation)
        # All that was there before but for its last token, whose row was never computed.
        assert num_cached(driver, str(n)) == (len(conversation) - 4 if n else 0)
        conversation = (*conversation, *result.token_ids, 9, 8, 7)


@pytest.mark.parametrize("edited", [FIRST[:40], (*FIRST, 9), (*FIRST[:40], 9, *FIRST[41:])])
def test_another_conversation_begins_anew(hybrid: Path, plain: Plain, edited: Sequence[int]) -> None:
    driver = new_driver(hybrid)
    driver.run(whole("1", FIRST, start=True))
    for request_id in ("2", "3"):  # the second time it is what the sequence keeps, and the answer is asked anew
        assert num_different(driver.run(whole(request_id, edited)), plain.run(edited, PARAMS)) == 0
    assert num_cached(driver, "3") == len(edited) - 1


def test_a_regenerated_answer_resumes_at_the_end_of_its_prompt(hybrid: Path, plain: Plain) -> None:
    driver = new_driver(hybrid)
    for request_id in ("1", "2", "3"):
        result = driver.run(whole(request_id, FIRST, start=request_id == "1"))
        assert num_different(result, plain.run(FIRST, PARAMS)) == 0
    assert num_cached(driver, "3") == len(FIRST) - 1


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_turn_of_either_kind_may_follow_the_other(hybrid: Path, plain: Plain, is_whole: bool) -> None:
    driver = new_driver(hybrid)
    conversation = FIRST
    for n in range(4):
        added = (9, 8, 7)
        brings_all = (n % 2 == 0) == is_whole or n == 0
        request = whole(str(n), conversation, start=n == 0) if brings_all else turn(str(n), added, sequence_id="chat")
        result = driver.run(request)
        assert num_different(result, plain.run(conversation, PARAMS)) == 0
        conversation = (*conversation, *result.token_ids, *added)


def test_whole_messages_are_what_the_next_turn_is_added_to(text_model: Path) -> None:
    driver = EngineDriver(engine_config(text_model), poison=True)

    def say(request_id: str, *texts: str, **flags: bool) -> str:
        messages = tuple({"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts))
        prompt = Prompt(messages=messages)
        return driver.run(Request(request_id=request_id, prompt=prompt, params=PARAMS, sequence_id=1, **flags)).text

    say("1", "Hi", sequence_start=True, whole_conversation=True)
    answers = [say("2", "Hi", "Yes?", "More", whole_conversation=True), say("3", "And more")]
    messages = driver.engine.scheduler.sessions[1].messages
    assert messages is not None
    assert [message["content"] for message in messages] == ["Hi", "Yes?", "More", answers[0], "And more", answers[1]]


def test_a_sequence_keeps_its_state_where_the_prefix_cache_has_no_room(hybrid: Path, plain: Plain) -> None:
    """What a sequence is for: others' prompts push cached prefixes out, open sequences last."""
    driver = new_driver(hybrid, prefix_cache_bytes=1)
    conversation = FIRST
    for n in range(3):
        kept = driver.run(whole(f"kept {n}", conversation, start=n == 0))
        single = driver.run(Request(request_id=f"single {n}", prompt=Prompt(token_ids=conversation), params=PARAMS))
        for result in (kept, single):
            assert num_different(result, plain.run(conversation, PARAMS)) == 0
        conversation = (*conversation, *kept.token_ids, 9, 8, 7)
    assert num_cached(driver, "single 2") == 0
    assert num_cached(driver, "kept 2") == len(conversation) - len(kept.token_ids) - 3 - 4
