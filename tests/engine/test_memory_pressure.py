# SPDX-License-Identifier: Apache-2.0
"""When slots or blocks are short: which sessions go, what they are told, and that nobody waits for ever."""

from pathlib import Path

import pytest
from engine_driver import EngineDriver, Plain, engine_config, limit_blocks, num_different
from session_requests import PARAMS, say, start, turn
from tandem_backend.engine.pools import IndexPool
from tandem_backend.errors import InvalidRequestError, UnavailableError
from tandem_backend.types import FinishReason, Prompt, Request


@pytest.fixture
def driver(hybrid: Path) -> EngineDriver:
    config = engine_config(hybrid, drafters=("lookup", "mtp"), router="always", max_active=2, max_sessions=4)
    return EngineDriver(config, poison=True)


def test_the_least_recently_used_session_goes_when_slots_are_short(driver: EngineDriver, plain: Plain) -> None:
    driver.engine.scheduler.slots = IndexPool(4)
    for sequence_id in (1, 2, 3, 4):
        driver.run(start(f"first {sequence_id}", sequence_id=sequence_id))
    driver.run(turn("again", sequence_id=1))
    driver.run(Request(request_id="needs a slot", prompt=Prompt(token_ids=(4,)), params=PARAMS))
    assert sorted(driver.engine.scheduler.sessions) == [1, 3, 4]
    with pytest.raises(InvalidRequestError, match=r"^sequence_id: no open sequence 2 .*dropped for memory"):
        driver.add(turn("evicted", sequence_id=2))
    first = driver.results["first 1"].token_ids
    tokens = (5, 6, 7, *first, 5, 6, 7, *driver.results["again"].token_ids, 8)
    assert num_different(driver.run(turn("kept", (8,), sequence_id=1)), plain.run(tokens, PARAMS)) == 0


def test_sessions_go_when_blocks_are_short(driver: EngineDriver, plain: Plain) -> None:
    limit_blocks(driver.engine, 5)
    driver.run(start("1", sequence_id=1))
    driver.run(start("2", (3,) * 100, sequence_id=2))
    assert sorted(driver.engine.scheduler.sessions) == [1, 2]
    long = driver.run(Request(request_id="3", prompt=Prompt(token_ids=(4, 5) * 65), params=PARAMS))
    assert num_different(long, plain.run((4, 5) * 65, PARAMS)) == 0
    assert list(driver.engine.scheduler.sessions) == [2]


def test_waiting_turns_whose_states_block_each_other(driver: EngineDriver, plain: Plain) -> None:
    """The first is served; the other is told that its state is gone."""
    limit_blocks(driver.engine, 4)
    first = driver.run(start("1", (3,) * 100, sequence_id=1))
    driver.run(start("2", (4,) * 100, sequence_id=2))
    driver.add(turn("3", (3,) * 50, sequence_id=1))
    driver.add(turn("4", (4,) * 50, sequence_id=2))
    driver.finish()
    assert num_different(driver.results["3"], plain.run((*(3,) * 100, *first.token_ids, *(3,) * 50), PARAMS)) == 0
    error = driver.results["4"].error
    assert isinstance(error, UnavailableError)
    assert str(error).startswith("sequence 2 was dropped for memory while this turn waited; send sequence_start")
    with pytest.raises(InvalidRequestError, match=r"^sequence_id: no open sequence 2 "):
        driver.add(turn("5", sequence_id=2))


def test_a_turn_that_can_never_fit_is_refused_and_holds_nobody_up(driver: EngineDriver, plain: Plain) -> None:
    limit_blocks(driver.engine, 4)
    driver.run(start("1", (3,) * 150, sequence_id=1))
    driver.add(turn("2", (3,) * 150, sequence_id=1))
    driver.add(Request(request_id="3", prompt=Prompt(token_ids=(4,)), params=PARAMS))
    driver.finish()
    error = driver.results["2"].error
    assert isinstance(error, InvalidRequestError)
    assert "need 5 KV blocks; kv_cache_bytes holds 4" in str(error)
    assert num_different(driver.results["3"], plain.run((4,), PARAMS)) == 0


def test_a_turn_of_messages_starts_though_memory_is_smaller_than_the_context(text_model: Path) -> None:
    chat = EngineDriver(engine_config(text_model), poison=True)
    limit_blocks(chat.engine, 3)
    chat.run(say("1", "Hi", sequence_start=True))
    assert chat.run(say("2", "More")).finish_reason == FinishReason.LENGTH


def test_waiting_sessions_give_their_slots_to_a_request_before_them(hybrid: Path) -> None:
    num_slots = 4
    config = engine_config(hybrid, max_active=1, max_sessions=num_slots, max_queued=8)
    driver = EngineDriver(config, poison=True)
    driver.engine.scheduler.slots = IndexPool(num_slots)
    for sequence_id in range(num_slots):
        driver.run(start(f"first {sequence_id}", sequence_id=sequence_id))
    driver.add(Request(request_id="single", prompt=Prompt(token_ids=(4,)), params=PARAMS))
    for sequence_id in range(num_slots):
        driver.add(turn(f"second {sequence_id}", sequence_id=sequence_id))
    driver.finish()
    assert driver.results["single"].finish_reason == FinishReason.LENGTH
    seconds = [driver.results[f"second {sequence_id}"] for sequence_id in range(num_slots)]
    assert all(result.finish_reason == FinishReason.LENGTH for result in seconds[:-1])
    assert isinstance(seconds[-1].error, UnavailableError)
