# SPDX-License-Identifier: Apache-2.0
"""Sequences of turns: what is kept between them, what is dropped, and in which order they run."""

from pathlib import Path

import pytest
from engine_driver import EngineDriver, Plain, engine_config, num_different
from session_requests import PARAMS, say, start, turn
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import FinishReason, Prompt, Request, SamplingParams


@pytest.fixture
def driver(hybrid: Path) -> EngineDriver:
    config = engine_config(hybrid, drafters=("lookup", "mtp"), router="always", max_active=2, max_sessions=2)
    return EngineDriver(config, poison=True)


@pytest.fixture
def chat(text_model: Path) -> EngineDriver:
    return EngineDriver(engine_config(text_model, drafters=("lookup", "mtp"), router="always"), poison=True)


def num_cached(driver: EngineDriver, request_id: str) -> int:
    stats = driver.results[request_id].stats
    assert stats is not None
    return stats.num_cached_tokens


def test_three_turns_of_ids(driver: EngineDriver, plain: Plain) -> None:
    tokens: list[int] = []
    for n, added in enumerate([(3, 4, 5), (6,), (7, 8) * 30]):
        tokens += added
        result = driver.run(turn(str(n), added, sequence_start=n == 0))
        assert num_different(result, plain.run(tokens, PARAMS)) == 0
        # All but the last output token, whose row was never computed.
        assert num_cached(driver, str(n)) == max(len(tokens) - len(added) - 1, 0)
        tokens += result.token_ids


def test_three_turns_of_text(chat: EngineDriver, plain_text: Plain) -> None:
    tokens: list[int] = []
    for n, text in enumerate(["Hello", " and more", "é 🙂"]):
        tokens += plain_text.encode(text)
        request = Request(
            request_id=str(n), prompt=Prompt(text=text), params=PARAMS, sequence_id=1, sequence_start=n == 0
        )
        result = chat.run(request)
        assert num_different(result, plain_text.run(tokens, PARAMS)) == 0
        tokens += result.token_ids
    assert num_cached(chat, "2") > 0


def rendered(plain_text: Plain, *turns: tuple[str, str]) -> tuple[int, ...]:
    text = "".join(f"<start>{role}:{content}<end>" for role, content in turns)
    return plain_text.encode(f"{text}<start>assistant:")


def test_turns_of_messages_remember_the_answers(chat: EngineDriver, plain_text: Plain) -> None:
    first = chat.run(say("1", "Hi", sequence_start=True))
    assert num_different(first, plain_text.run(rendered(plain_text, ("user", "Hi")), PARAMS)) == 0
    second = chat.run(say("2", "More"))
    stats = second.stats
    assert stats is not None
    history = rendered(plain_text, ("user", "Hi"), ("assistant", first.text), ("user", "More"))
    kept = (*rendered(plain_text, ("user", "Hi")), *first.token_ids)
    assert plain_text.decode(history).startswith(plain_text.decode(kept))
    tokens = (*kept, *plain_text.encode("<end><start>user:More<end><start>assistant:"))
    assert num_different(second, plain_text.run(tokens, PARAMS)) == 0
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (len(tokens), len(kept) - 1)


def test_a_template_that_rewrites_answers_falls_back_to_the_common_prefix(
    chat: EngineDriver, plain_text: Plain
) -> None:
    chat.run(say("1", "Hi", sequence_start=True))
    second = chat.run(say("2", "More", reasoning="dropped"))
    history = rendered(plain_text, ("user", "Hi"), ("assistant", "-"), ("user", "More"))
    assert num_different(second, plain_text.run(history, PARAMS)) == 0
    # The first turn's prompt but for its last token: there its anchor lies.
    assert num_cached(chat, "2") == len(rendered(plain_text, ("user", "Hi"))) - 1


def test_a_refused_turn_leaves_the_session_as_it_was(driver: EngineDriver, plain: Plain) -> None:
    first = driver.run(start("1"))
    driver.add(turn("2", (9,) * 1271))
    driver.finish()
    assert isinstance(driver.results["2"].error, InvalidRequestError)
    assert str(driver.results["2"].error).startswith("input_ids: the prompt has 1280 tokens; at most 1279 fit")
    third = driver.run(turn("3", (8,)))
    assert num_different(third, plain.run((5, 6, 7, *first.token_ids, 8), PARAMS)) == 0


def test_turns_of_one_sequence_run_in_order_and_others_pass_them(driver: EngineDriver, plain: Plain) -> None:
    driver.add(start("1"))
    driver.add(turn("2", (8,)))
    driver.add(turn("3", (9,), sequence_end=True))
    driver.add(Request(request_id="other", prompt=Prompt(token_ids=(4,)), params=PARAMS))
    driver.step()
    assert [g.request.request_id for g in driver.engine.scheduler.running] == ["1", "other"]
    driver.finish()
    tokens: tuple[int, ...] = (5, 6, 7)
    for request_id, added in (("1", ()), ("2", (8,)), ("3", (9,))):
        tokens = (*tokens, *added)
        assert num_different(driver.results[request_id], plain.run(tokens, PARAMS)) == 0
        tokens = (*tokens, *driver.results[request_id].token_ids)
    assert driver.engine.statistics()["num_sessions"] == 0


def test_end_drops_the_state_and_takes_no_more_turns(driver: EngineDriver) -> None:
    driver.add(start("1"))
    driver.add(turn("2", sequence_end=True))
    with pytest.raises(InvalidRequestError, match=r"^sequence_id: no open sequence 1 "):
        driver.add(turn("3"))
    driver.finish()
    statistics = driver.engine.statistics()
    assert statistics["num_sessions"] == 0
    assert statistics["num_free_slots"] == statistics["num_slots"]
    with pytest.raises(InvalidRequestError, match=r"^sequence_id: no open sequence 1 .*send sequence_start"):
        driver.add(turn("4"))


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_end_cancelled_while_it_waits_still_ends_the_sequence(driver: EngineDriver, num_steps: int) -> None:
    driver.add(start("1"))
    driver.add(turn("2", sequence_end=True))
    for _ in range(num_steps):
        driver.step()
    driver.engine.cancel("2")
    driver.finish()
    assert driver.results["2"].finish_reason == FinishReason.CANCELLED
    assert driver.results["1"].finish_reason == FinishReason.LENGTH
    statistics = driver.engine.statistics()
    assert statistics["num_sessions"] == 0
    assert statistics["num_free_slots"] == statistics["num_slots"]


def test_an_end_cancelled_behind_a_waiting_turn_leaves_that_turn_its_state(driver: EngineDriver, plain: Plain) -> None:
    first = driver.run(start("1"))
    for n in range(2):
        driver.add(Request(request_id=f"busy {n}", prompt=Prompt(token_ids=(4,)), params=PARAMS))
    driver.step()
    driver.add(turn("2", (8,)))
    driver.add(turn("3", sequence_end=True))
    driver.engine.cancel("3")
    driver.finish()
    assert num_different(driver.results["2"], plain.run((5, 6, 7, *first.token_ids, 8), PARAMS)) == 0
    assert driver.engine.statistics()["num_sessions"] == 0


def test_start_on_a_live_sequence_cancels_and_begins_anew(driver: EngineDriver, plain: Plain) -> None:
    driver.add(start("1"))
    driver.add(turn("2"))
    driver.step()
    driver.add(start("3", (11, 12)))
    driver.finish()
    assert driver.results["1"].finish_reason == driver.results["2"].finish_reason == FinishReason.CANCELLED
    assert num_different(driver.results["3"], plain.run((11, 12), PARAMS)) == 0
    fourth = driver.run(turn("4", (13,)))
    tokens = (11, 12, *driver.results["3"].token_ids, 13)
    assert num_different(fourth, plain.run(tokens, PARAMS)) == 0


def test_a_turn_cancelled_while_it_writes_keeps_what_was_given_out(driver: EngineDriver, plain: Plain) -> None:
    driver.add(start("1", params=SamplingParams(max_tokens=50, ignore_eos=True)))
    for _ in range(3):
        driver.step()
    driver.engine.cancel("1")
    driver.finish()
    given = driver.results["1"].token_ids
    assert 0 < len(given) < 50
    second = driver.run(turn("2", (8,)))
    assert num_different(second, plain.run((5, 6, 7, *given, 8), PARAMS)) == 0


def test_a_turn_cancelled_inside_its_prompt_keeps_the_prompt(hybrid: Path, plain: Plain) -> None:
    driver = EngineDriver(engine_config(hybrid, drafters=("mtp",), router="always", max_prefill_rows=4), poison=True)
    prompt = tuple(range(3, 17))
    driver.add(start("1", prompt))
    driver.step()
    driver.engine.cancel("1")
    driver.finish()
    assert driver.results["1"].token_ids == []
    second = driver.run(turn("2", (8,)))
    assert num_different(second, plain.run((*prompt, 8), PARAMS)) == 0
    assert num_cached(driver, "2") == 4


def test_idle_sessions_are_swept_and_busy_ones_are_not(driver: EngineDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.run(start("1", sequence_id=1))
    assert driver.engine.sweep() == 0
    driver.add(start("2", sequence_id=2, params=SamplingParams(max_tokens=30, ignore_eos=True)))
    driver.step()
    now = driver.engine.scheduler.sessions[1].last_used_s
    monkeypatch.setattr("time.monotonic", lambda: now + driver.engine.config.session_idle_s + 1)
    assert driver.engine.sweep() == 1
    assert list(driver.engine.scheduler.sessions) == [2]
    with pytest.raises(InvalidRequestError, match="idle for too long"):
        driver.add(turn("3", sequence_id=1))
    driver.finish()
    assert driver.results["2"].finish_reason == FinishReason.LENGTH


def test_closing_a_sequence_cancels_its_turns(driver: EngineDriver) -> None:
    driver.add(start("1"))
    driver.add(turn("2"))
    driver.step()
    driver.engine.close_sequence(1)
    driver.engine.close_sequence("unknown")
    driver.finish()
    assert {r.finish_reason for r in driver.results.values()} == {FinishReason.CANCELLED}
    assert driver.engine.statistics()["num_sessions"] == 0
