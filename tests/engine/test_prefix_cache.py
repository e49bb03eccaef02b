# SPDX-License-Identifier: Apache-2.0
"""The prefix cache in the engine: what is found, that it is the cold state to the bit, and what must not be found."""

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import pytest
import torch
from cold_state import ColdStates, tokens
from engine_driver import EngineDriver, Plain, Result, engine_config, live_sequences, num_different
from fakes.tiny_model import tiny_checkpoint
from session_requests import start, turn
from tandem_backend.engine.drafters.base import Drafter
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.types import Prompt, Request, SamplingParams
from torch import Tensor

MAX_LEN = 640
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = tuple(tokens(1, 150))


@pytest.fixture(scope="module")
def cold(hybrid: Path) -> ColdStates:
    return ColdStates(hybrid, MAX_LEN)


def new_driver(
    checkpoint: Path, extra_drafters: Mapping[str, Drafter] | None = None, **overrides: object
) -> EngineDriver:
    values = {"drafters": ("lookup", "mtp"), "router": "always", "max_sessions": 4, "anchor_grid": 0, **overrides}
    return EngineDriver(engine_config(checkpoint, **values), extra_drafters, poison=True)


@pytest.fixture
def driver(hybrid: Path) -> EngineDriver:
    return new_driver(hybrid)


IDS: Iterator[str] = (str(n) for n in count())


def ask(driver: EngineDriver, token_ids: object, params: SamplingParams = PARAMS, salt: str = "") -> Result:
    prompt = Prompt(token_ids=tuple(token_ids))  # type: ignore[arg-type]
    return driver.run(Request(request_id=next(IDS), prompt=prompt, params=params, cache_salt=salt))


def num_cached(result: Result) -> int:
    assert result.stats is not None
    return result.stats.num_cached_tokens


def test_the_same_prompt_computes_its_last_token_alone(driver: EngineDriver, plain: Plain) -> None:
    first, second = ask(driver, LONG), ask(driver, LONG)
    assert (num_cached(first), num_cached(second)) == (0, len(LONG) - 1)
    for result in (first, second):
        assert num_different(result, plain.run(LONG, PARAMS)) == 0
    counters = driver.engine.counters().caches["prefix"]
    assert (counters.num_hits, counters.num_misses, counters.num_saved_tokens) == (1, 1, len(LONG) - 1)


def test_a_conversation_sent_again_goes_on_where_its_answer_ended(driver: EngineDriver, plain: Plain) -> None:
    text = LONG
    for n in range(4):
        result = ask(driver, text)
        assert num_different(result, plain.run(text, PARAMS)) == 0
        # The answer's last token is not computed when it ends.
        assert num_cached(result) == (len(text) - 4 if n else 0)
        text = (*text, *result.token_ids, 5, 6, 7)


def test_branches_share_what_they_have_in_common(driver: EngineDriver, plain: Plain) -> None:
    ask(driver, LONG[:130])
    for branch in (tokens(2, 40), tokens(3, 40)):
        text = (*LONG[:130], *branch)
        result = ask(driver, text)
        assert num_cached(result) == 129
        assert num_different(result, plain.run(text, PARAMS)) == 0
    assert num_cached(ask(driver, (*LONG[:129], 30))) == 129
    assert num_cached(ask(driver, (*LONG[:100], 30))) == 0


@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
def test_anchors_lie_on_the_grid_whatever_the_chunks(hybrid: Path, plain: Plain, chunk: int) -> None:
    driver = new_driver(hybrid, anchor_grid=40, max_prefill_rows=chunk)
    ask(driver, LONG)
    positions = sorted(anchor.position for anchor in driver.engine.scheduler.cache.anchors())
    assert positions == [40, 80, 120, 149, 157]
    text = (*LONG[:100], *tokens(4, 9))
    result = ask(driver, text)
    assert num_cached(result) == 80
    assert num_different(result, plain.run(text, PARAMS)) == 0


def test_every_anchor_is_the_cold_state_to_the_bit(hybrid: Path, cold: ColdStates, plain: Plain) -> None:
    """Those within prompts, and the end of a generation that was written by verify rounds with accepted drafts."""
    half = ScriptedDrafter("half", plain.continuation, plain.vocab_size)
    driver = new_driver(hybrid, {"half": half}, anchor_grid=16, max_prefill_rows=23)
    result = ask(driver, LONG[:49], SamplingParams(max_tokens=40, ignore_eos=True, drafter="half"))
    assert result.stats is not None
    assert result.stats.num_accepted_tokens > 10
    positions = [anchor.position for anchor in driver.engine.scheduler.cache.anchors()]
    assert sorted(positions) == [16, 32, 48, 64, 80, 88]
    assert cold.num_wrong_anchors(driver.engine) == 0


def test_a_wrong_state_would_be_seen(hybrid: Path, cold: ColdStates) -> None:
    driver = new_driver(hybrid)
    driver.add(Request(request_id="1", prompt=Prompt(token_ids=LONG[:20]), params=PARAMS))
    driver.step()
    sequence = live_sequences(driver.engine)[0]
    state = driver.engine.rounds.state
    assert cold.num_different(state, sequence) == 0
    part: Tensor = state.layers[0].delta  # type: ignore[union-attr]
    part[sequence.slot].view(-1)[0] = torch.nextafter(part[sequence.slot].view(-1)[0], torch.tensor(9.0))
    assert cold.num_different(state, sequence) == 1


def test_tenants_can_not_probe_each_other(driver: EngineDriver, plain: Plain) -> None:
    ask(driver, LONG, salt="a")
    assert num_cached(ask(driver, LONG, salt="b")) == 0
    assert num_cached(ask(driver, LONG)) == 0
    result = ask(driver, LONG, salt="a")
    assert num_cached(result) == len(LONG) - 1
    assert num_different(result, plain.run(LONG, PARAMS)) == 0


def test_drafts_are_accepted_after_a_hit_as_they_are_without(hybrid: Path) -> None:
    """The mtp head goes on from its kept rows: the same drafts, so the same rounds."""
    drafts = SamplingParams(max_tokens=40, ignore_eos=True, drafter="mtp")
    for length in (127, 128, 129, 130):
        text = LONG[:length]
        results = [ask(new_driver(hybrid), text, drafts)]
        driver = new_driver(hybrid)
        ask(driver, text[:-1], SamplingParams(max_tokens=1, drafter="mtp"))
        results += [ask(driver, text, drafts), ask(driver, text, drafts)]
        assert [num_cached(result) for result in results] == [0, length - 1, length - 1]
        stats = [result.stats for result in results if result.stats is not None]
        assert stats[0].num_draft_tokens > 30
        assert len({(s.num_draft_tokens, s.num_accepted_tokens, s.num_decode_rounds) for s in stats}) == 1


def test_who_drafts_with_mtp_does_not_resume_where_nothing_feeds_it(driver: EngineDriver) -> None:
    """Else its conversation would go without drafts to its end; it computes the prompt, and then all are served."""
    without, with_mtp = SamplingParams(max_tokens=8, drafter="none"), SamplingParams(max_tokens=8, drafter="mtp")
    ask(driver, LONG, without)
    first = ask(driver, LONG, with_mtp)
    assert num_cached(first) == 0
    assert first.stats is not None
    assert first.stats.num_draft_tokens > 0
    assert num_cached(ask(driver, LONG, with_mtp)) == num_cached(ask(driver, LONG, without)) == len(LONG) - 1


def test_a_cancelled_prompt_serves_the_next(hybrid: Path, plain: Plain) -> None:
    driver = new_driver(hybrid, max_prefill_rows=50)
    driver.add(Request(request_id="cancelled", prompt=Prompt(token_ids=LONG), params=PARAMS))
    driver.step()
    driver.engine.cancel("cancelled")
    driver.finish()
    result = ask(driver, LONG)
    assert num_cached(result) == 50
    assert num_different(result, plain.run(LONG, PARAMS)) == 0


def test_a_failed_round_leaves_nothing_behind(driver: EngineDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.add(Request(request_id="fails", prompt=Prompt(token_ids=LONG), params=PARAMS))
    driver.step()
    known = driver.engine.scheduler.cache.num_anchors
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine.model, "commit", lambda *_: 1 / 0)
        driver.step()
    assert driver.results["fails"].error is not None
    assert driver.engine.scheduler.cache.num_anchors == known == 1


def test_a_dropped_session_serves_who_sends_the_conversation_again(driver: EngineDriver, plain: Plain) -> None:
    first = driver.run(start("1", LONG))
    second = driver.run(turn("2", (7, 8)))
    text = (*LONG, *first.token_ids, 7, 8, *second.token_ids)
    driver.engine.close_sequence(1)
    result = ask(driver, (*text, 9))
    assert num_cached(result) == len(text) - 1
    assert num_different(result, plain.run((*text, 9), PARAMS)) == 0


def test_a_prefix_is_read_by_many_at_once(driver: EngineDriver, plain: Plain) -> None:
    ask(driver, LONG)
    texts = [(*LONG[:149], *tokens(seed, 3)) for seed in range(6)]
    for n, text in enumerate(texts):
        driver.add(Request(request_id=f"{n} of many", prompt=Prompt(token_ids=text), params=PARAMS))
    driver.finish()
    for n, text in enumerate(texts):
        result = driver.results[f"{n} of many"]
        assert num_cached(result) == 149
        assert num_different(result, plain.run(text, PARAMS)) == 0


def test_the_budget_holds(hybrid: Path, plain: Plain) -> None:
    driver = new_driver(hybrid, prefix_cache_bytes=300_000, anchor_grid=32)
    for seed in range(6):
        text = tokens(seed, 100)
        assert num_different(ask(driver, text), plain.run(text, PARAMS)) == 0
        assert 0 < driver.engine.scheduler.cache.num_bytes <= 300_000
    assert driver.engine.counters().caches["prefix"].num_evictions > 0
    assert num_cached(ask(driver, text)) == 99


def test_it_can_be_turned_off(hybrid: Path) -> None:
    driver = new_driver(hybrid, prefix_cache_bytes=0)
    assert [num_cached(ask(driver, LONG)) for _ in range(2)] == [0, 0]
    assert driver.engine.scheduler.cache.num_bytes == 0


def test_without_recurrent_layers_a_request_resumes_at_any_token(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama", vocab_size=31)
    plain, cold = Plain(checkpoint), ColdStates(checkpoint, MAX_LEN)
    driver = new_driver(checkpoint, drafters=("lookup",))
    ask(driver, LONG)
    for length in (1, 63, 64, 65, 128, 149):
        text = (*LONG[:length], 30, 29, 28)
        result = ask(driver, text)
        assert num_cached(result) == length
        assert num_different(result, plain.run(text, PARAMS)) == 0
    assert cold.num_wrong_anchors(driver.engine) == 0
