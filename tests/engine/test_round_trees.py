# SPDX-License-Identifier: Apache-2.0
"""What a request is told of its rounds: who proposed each token, each round's tree; and that asking changes nothing."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import VOCAB_SIZE, EngineDriver, Plain, Result, engine_config, num_different
from tandem_backend.engine import round_trees
from tandem_backend.engine.choices import choice_ids
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.types import FinishReason, Prompt, Request, SamplingParams

PROMPT = (3, 5, 7, 3, 5, 7, 3)
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = replace(PARAMS, temperature=1.0, seed=11)
DRAFTERS = ["none", "wrong", "half", "oracle", "mtp+lookup"]


@pytest.fixture
def driver(hybrid: Path, plain: Plain) -> EngineDriver:
    """Every drafter, and each round verifies all that it gets."""
    names = ("wrong", "half", "oracle")
    scripted = {name: ScriptedDrafter(name, plain.continuation, VOCAB_SIZE) for name in names}
    config = engine_config(hybrid, drafters=("lookup", "mtp"), router="always", response_cache_bytes=100_000)
    return EngineDriver(config, scripted)


def request(name: str = "r", params: SamplingParams = PARAMS, *, asks: bool = True, **fields: object) -> Request:
    values: dict[str, object] = {"prompt": Prompt(token_ids=PROMPT), "params": params, "return_draft_trees": asks}
    return Request(request_id=name, **(values | fields))  # type: ignore[arg-type]


def check(result: Result, anchor: int | None = None) -> None:
    """The rounds give exactly the answer's tokens, their trees are trees, and they add up to the statistics.

    anchor: the first round's, where it is no pass over a prompt.
    """
    assert sum(tree.num_tokens for tree in result.rounds) == len(result.token_ids)
    assert [tree.index for tree in result.rounds] == list(range(len(result.rounds)))
    left, drafted, accepted = list(result.token_ids), Counter[str](), Counter[str]()
    for tree in result.rounds:
        tokens, left = left[: tree.num_tokens], left[tree.num_tokens :]
        assert len(tree.path) == len(tree.proposers) <= len(tokens)
        assert tree.token_ids is not None
        if tree.index == 0:
            assert (tree.token_ids, tree.path, len(tokens)) == ((), (), 1)
        else:
            assert (tree.token_ids[0], tree.parents[0], tree.drafters[0]) == (anchor, -1, "")
            assert all(parent < node for node, parent in enumerate(tree.parents))
            assert len(tree.token_ids) == len(tree.parents) == len(tree.scores) == len(tree.drafters)
            assert [tree.token_ids[node] for node in tree.path] == tokens[: len(tree.path)]
            assert [tree.parents[node] for node in tree.path] == [0, *tree.path][:-1][: len(tree.path)]
            assert [tree.drafters[node] for node in tree.path] == list(tree.proposers)
        drafted.update(tree.drafters[1:])
        accepted.update(tree.proposers[: tree.num_tokens - 1])  # the statistics count kept rows
        anchor = tokens[-1]
    assert result.stats is not None
    assert result.stats.num_decode_rounds == len(result.rounds) - 1
    known = {name: (drafted[name], accepted[name]) for name in drafted}
    assert result.stats.drafter_tokens == known


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
def test_the_rounds_give_the_answer_and_asking_changes_nothing(
    driver: EngineDriver, plain: Plain, params: SamplingParams, drafter: str
) -> None:
    asked = replace(params, drafter=drafter)
    result = driver.run(request(params=asked))
    check(result)
    assert num_different(result, plain.run(PROMPT, params)) == 0
    if drafter == "oracle" and params is PARAMS:
        assert all(set(tree.proposers) == {"oracle"} for tree in result.rounds[1:-1])
    if drafter in ("none", "wrong"):
        assert not any(tree.path for tree in result.rounds) or params is SAMPLED
    assert any(len(tree.parents) > 1 for tree in result.rounds) == (drafter != "none")


def test_only_who_asks_is_told(driver: EngineDriver) -> None:
    params = replace(PARAMS, drafter="half")
    driver.add(request("asks", params))
    driver.add(request("does not", replace(params, max_tokens=23), asks=False))
    driver.finish()
    check(driver.results["asks"])
    assert driver.results["does not"].rounds == []
    assert driver.results["asks"].token_ids[:23] == driver.results["does not"].token_ids


def test_each_choice_has_its_own(driver: EngineDriver) -> None:
    several = request(params=replace(SAMPLED, num_choices=3, drafter="mtp+lookup"))
    driver.run(several)
    answers = [driver.results[name] for name in choice_ids(several)]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    for answer in answers:
        check(answer)


def test_a_stop_within_an_accepted_run_cuts_it(driver: EngineDriver, plain: Plain) -> None:
    text = plain.run(PROMPT, PARAMS).token_ids
    stop = next(token for n, token in enumerate(text) if n > 3 and token not in text[:n])
    result = driver.run(request(params=replace(PARAMS, drafter="oracle", stop_token_ids=(stop,))))
    assert result.finish_reason is FinishReason.STOP
    check(result)
    last = result.rounds[-1]
    assert last.token_ids is not None
    assert len(last.path) == last.num_tokens < len(last.token_ids) - 1
    assert last.token_ids[last.path[-1]] == stop  # what ended the answer was drafted


def test_every_turn_of_a_session_begins_with_its_prompts_pass(driver: EngineDriver) -> None:
    params = replace(PARAMS, max_tokens=7, drafter="mtp+lookup")
    first = driver.run(request("1", params, sequence_id=1, sequence_start=True))
    second = driver.run(request("2", params, sequence_id=1))
    assert second.stats is not None
    assert second.stats.num_cached_tokens >= len(PROMPT)
    check(first)
    check(second)


def test_a_kept_answer_has_no_rounds(driver: EngineDriver) -> None:
    first, again = driver.run(request("1")), driver.run(request("2"))
    unasked = driver.run(request("3", asks=False))
    check(first)
    for kept in (again, unasked):
        assert kept.stats is not None
        assert kept.stats.is_cached_response
        assert (kept.token_ids, kept.rounds) == (first.token_ids, [])


def test_nodes_are_told_up_to_a_limit(driver: EngineDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = driver.run(request("1", replace(PARAMS, drafter="half")))
    sizes = [len(tree.token_ids or ()) for tree in whole.rounds]
    monkeypatch.setattr(round_trees, "MAX_TOLD_NODES", sum(size - 1 for size in sizes[1:4]))
    cut = driver.run(request("2", replace(PARAMS, drafter="half"), cache_salt="computed again"))
    assert cut.rounds[:4] == whole.rounds[:4]
    assert len(cut.rounds) > 6
    assert any(tree.token_ids is None for tree in cut.rounds)
    for tree, known in zip(cut.rounds[4:], whole.rounds[4:], strict=True):
        if len(known.parents) > 1:
            assert (tree.token_ids, tree.parents) == (None, ())
        assert (tree.path, tree.proposers, tree.num_tokens) == (known.path, known.proposers, known.num_tokens)


def test_a_request_that_was_cancelled_was_told_what_it_got(driver: EngineDriver) -> None:
    driver.add(request(params=replace(PARAMS, drafter="oracle", max_tokens=48)))
    for _ in range(3):
        driver.step()
    driver.engine.cancel("r")
    driver.finish()
    assert driver.results["r"].finish_reason is FinishReason.CANCELLED
    check(driver.results["r"])
