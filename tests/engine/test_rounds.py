# SPDX-License-Identifier: Apache-2.0
"""Rounds: who gets what in them, limits of drafting, and what happens when one fails."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import VOCAB_SIZE, EngineDriver, Plain, engine_config, live_sequences, num_different
from fakes.replay import rerun_passes
from session_requests import PARAMS, start, turn
from tandem_backend.engine import assembly
from tandem_backend.engine.account import Account
from tandem_backend.engine.drafters.base import CommittedRows, DraftContext, Proposal
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.errors import InternalError, InvalidRequestError, UnavailableError
from tandem_backend.model.graphs import GraphPasses
from tandem_backend.model.passes import LaunchedPasses, Passes
from tandem_backend.types import FinishReason, Prompt, Request, SamplingParams
from torch import Tensor


def request(request_id: str, token_ids: Sequence[int] = (3, 4, 5), **params: Any) -> Request:
    values = {"max_tokens": 6, "ignore_eos": True, **params}
    return Request(request_id=request_id, prompt=Prompt(token_ids=tuple(token_ids)), params=SamplingParams(**values))


def fail_once(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Let the call-th forward pass from now raise."""
    calls = iter(range(10**6))

    def failing(forward: Callable[..., Any]) -> Callable[..., Any]:
        def fail_or_forward(*args: Any) -> Any:
            if next(calls) == call:
                raise RuntimeError("out of luck")
            return forward(*args)

        return fail_or_forward

    for passes in (LaunchedPasses, GraphPasses):
        monkeypatch.setattr(passes, "forward", failing(passes.forward))


def test_a_failed_round_ends_the_requests_in_it_and_no_others(
    hybrid: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config(hybrid, drafters=("lookup", "mtp"), router="always", max_active=2, max_prefill_rows=4)
    driver = EngineDriver(config, poison=True)
    kept = driver.run(start("kept", sequence_id="kept"))
    driver.add(start("lost", sequence_id="lost"))
    driver.add(turn("lost too", sequence_id="lost"))
    driver.add(request("mate"))
    driver.add(request("queued"))
    fail_once(monkeypatch, 2)
    driver.finish()
    for request_id in ("lost", "mate"):
        error = driver.results[request_id].error
        assert isinstance(error, InternalError)
        assert str(error) == "the round failed: out of luck"
    error = driver.results["lost too"].error
    assert isinstance(error, InternalError)
    assert str(error).startswith("sequence 'lost' is lost: the round failed: out of luck; send sequence_start")
    assert num_different(driver.results["queued"], plain.run((3, 4, 5), PARAMS)) == 0
    assert "a round failed" in caplog.text
    assert list(driver.engine.scheduler.sessions) == ["kept"]
    again = driver.run(turn("again", (8,), sequence_id="kept"))
    assert num_different(again, plain.run((5, 6, 7, *kept.token_ids, 8), PARAMS)) == 0


def test_a_request_outside_the_failed_round_goes_on(
    hybrid: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt waits for its turn in the prefill budget while the first one's round fails."""
    driver = EngineDriver(engine_config(hybrid, max_prefill_rows=4), poison=True)
    driver.add(request("1", range(3, 15)))
    driver.add(request("2", range(3, 15)))
    fail_once(monkeypatch, 1)
    driver.finish()
    assert isinstance(driver.results["1"].error, InternalError)
    assert num_different(driver.results["2"], plain.run(tuple(range(3, 15)), PARAMS)) == 0


def test_streams_get_a_token_every_round_while_a_long_prompt_is_read(hybrid: Path, plain: Plain) -> None:
    driver = EngineDriver(engine_config(hybrid, joint_prefill_rows=64), poison=True)
    driver.add(request("stream", max_tokens=60))
    driver.step()
    prompt = tuple(3 + n % 28 for n in range(1000))
    driver.add(request("long", prompt))
    num_rounds = 0
    while not driver.results["long"].token_ids:
        tokens = {output.request_id: output.token_ids for output in driver.step()}
        assert len(tokens["stream"]) == 1
        num_rounds += 1
    assert num_rounds == 16
    driver.finish()
    assert num_different(driver.results["long"], plain.run(prompt, PARAMS)) == 0


def test_prompts_are_read_oldest_first_and_share_a_rounds_budget(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid, max_prefill_rows=10), poison=True)
    for n in range(3):
        driver.add(request(str(n), range(3, 10)))
    assert [output.request_id for output in driver.step()] == ["0"]
    assert [g.sequence.num_computed for g in driver.engine.scheduler.running] == [7, 3, 0]


class Bush:
    """Proposes so many siblings, and remembers what it was asked for."""

    def __init__(self, name: str, first_token: int, num_nodes: int) -> None:
        self.name = name
        self.token_ids = range(first_token, first_token + num_nodes)
        self.contexts: list[DraftContext] = []

    def begin(self, key: int) -> None: ...

    def end(self, key: int) -> None: ...

    def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        self.contexts += contexts
        proposed = [self.token_ids[: context.max_nodes] for context in contexts]
        return [Proposal(ids, [-1] * len(ids), [0.1] * len(ids)) for ids in proposed]


def most_drafted(driver: EngineDriver, request_id: str) -> int:
    """Draft nodes verified in the request's largest round."""
    seen = most = 0
    while driver.engine.has_work():
        driver.step()
        running = [g.stats for g in driver.engine.scheduler.running if g.request.request_id == request_id]
        stats = running[0] if running else driver.results[request_id].stats
        assert stats is not None
        most, seen = max(most, stats.num_draft_tokens - seen), stats.num_draft_tokens
    return most


@pytest.mark.parametrize(("asked", "allowed"), [(None, 6), (4, 4), (1, 1), (0, 0), (50, 6)])
def test_merged_drafts_keep_to_the_limit_of_the_request(hybrid: Path, asked: int | None, allowed: int) -> None:
    bushes = {name: Bush(name, first, 6) for name, first in (("a", 3), ("b", 12))}
    driver = EngineDriver(engine_config(hybrid, router="always", max_draft_tokens=6), bushes)
    driver.add(request("1", drafter="a+b", num_draft_tokens=asked))
    assert most_drafted(driver, "1") == allowed


def test_rows_of_a_round_keep_to_the_budget(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid, router="always", row_budget=7), {"a": Bush("a", 3, 10)})
    for n in range(3):
        driver.add(request(str(n), drafter="a"))
    driver.step()
    before = driver.engine.rounds.times.num_rows
    driver.step()
    assert driver.engine.rounds.times.num_rows - before == 7


def test_more_streams_than_the_row_budget_all_get_their_token(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid, router="always", row_budget=2), {"a": Bush("a", 3, 10)})
    for n in range(5):
        driver.add(request(str(n), drafter="a"))
    driver.step()
    assert [len(output.token_ids) for output in driver.step()] == [1] * 5


def test_no_drafter_is_asked_for_what_can_not_be_taken(hybrid: Path) -> None:
    bush = Bush("a", 3, 10)
    driver = EngineDriver(engine_config(hybrid, router="always"), {"a": bush})
    driver.run(request("1", drafter="a", max_tokens=4))
    assert [context.max_depth for context in bush.contexts] == [2, 1]


def test_drafters_that_lose_are_asked_less_and_less(hybrid: Path) -> None:
    """A costly drafter that is never right: the adaptive router soon does without it."""

    class Slow(Bush):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
            sum(range(200_000))  # a millisecond or more
            return super().propose(contexts)

    wrong = Slow("a", 0, 1)
    driver = EngineDriver(engine_config(hybrid), {"a": wrong})
    driver.run(request("1", drafter="a", max_tokens=200, min_tokens=200, stop_token_ids=(0,)))
    assert 1 <= len(wrong.contexts) < 60
    assert {context.max_depth for context in wrong.contexts} == {1}  # on trial to the end
    assert driver.results["1"].stats is not None
    assert driver.results["1"].stats.num_accepted_tokens == 0


def test_nobody_is_asked_while_no_account_is_open(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bush = Bush("a", 3, 1)
    driver = EngineDriver(engine_config(hybrid), {"a": bush})
    driver.add(request("1", drafter="a", max_tokens=20))
    driver.step()
    monkeypatch.setattr(Account, "is_open", False)
    driver.finish()
    assert not bush.contexts
    driver.add(request("2", drafter="a", max_tokens=20))
    driver.step()
    monkeypatch.setattr(Account, "is_open", True)
    driver.finish()
    assert bush.contexts


@pytest.mark.parametrize(("call_ms", "num_rows", "is_asked"), [(1e9, 2.0, False), (0.9, 0.0, True), (0.9, 2e6, False)])
def test_a_call_that_costs_more_than_it_brings_is_left_out(
    hybrid: Path, call_ms: float, num_rows: float, is_asked: bool
) -> None:
    """Unless a sequence was never asked for: without that nobody would learn that it brings more now."""
    bush = Bush("a", 3, 1)
    driver = EngineDriver(engine_config(hybrid), {"a": bush})
    drafting = driver.engine.rounds.drafting
    for n in range(2):
        driver.add(request(str(n), drafter="a", max_tokens=12))
    driver.step()
    drafting.call_ms["a", 2] = call_ms
    slots = [sequence.slot for sequence in live_sequences(driver.engine)]
    for slot in slots:
        drafting.accounts[slot, "a"] = Account(num_asked=1, num_rows=num_rows)
    driver.step()
    assert bool(bush.contexts) is is_asked
    drafting.accounts[slots[0], "a"] = Account()
    driver.step()
    assert bush.contexts


@pytest.mark.parametrize("passes", [LaunchedPasses, rerun_passes])
def test_rows_that_a_drafter_keeps_outlast_their_pass(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, passes: Callable[..., Passes]
) -> None:
    class Keeper(Bush):
        """Keeps the hidden states it is shown, and what they were then."""

        def observe(self, rows: Sequence[CommittedRows]) -> None:
            kept.extend((item.hidden, item.hidden.clone()) for item in rows)

    kept: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(assembly, "make_passes", lambda model, state, limits: passes(model, state))
    driver = EngineDriver(engine_config(hybrid, router="always"), {"a": Keeper("a", 3, 4)})
    driver.run(request("1", drafter="a", num_draft_tokens=0, max_tokens=8))
    for n in range(2):
        driver.add(request(f"joint {n}", drafter="a", max_tokens=8))
    driver.finish()
    assert len(kept) >= 16
    assert all(torch.equal(hidden, then) for hidden, then in kept)


def test_statistics_of_a_request(hybrid: Path, plain: Plain) -> None:
    oracle = ScriptedDrafter("oracle", plain.continuation, VOCAB_SIZE)
    wrong = Bush("a", 3, 1)
    driver = EngineDriver(engine_config(hybrid, router="always", max_draft_tokens=3), {"oracle": oracle, "a": wrong})
    stats = driver.run(request("1", drafter="oracle", max_tokens=9)).stats
    assert stats is not None
    # The prompt's round gives one token; then 3 accepted and a bonus token a round.
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_rounds) == (3, 9, 3)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (6, 6)
    assert stats.drafter_tokens == {"oracle": (6, 6)}
    times = (
        stats.arrival_time_ns,
        stats.first_scheduled_time_ns,
        stats.first_token_time_ns,
        stats.last_token_time_ns,
    )
    assert list(times) == sorted(times)
    assert times[0] > 0


def test_a_full_queue_is_unavailable(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid, max_active=1, max_queued=1))
    driver.add(request("1"))
    driver.add(request("2"))
    with pytest.raises(UnavailableError, match=r"^the queue is full \(2 waiting, 0 running"):
        driver.add(request("3"))
    driver.finish()
    driver.run(request("4"))
    assert {r.finish_reason for r in driver.results.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"token_ids": ()}, "input_ids: must not be empty"),
        ({"token_ids": (1, 31)}, r"input_ids: token ids must be in \[0, 31\), got 31"),
        ({"token_ids": (-1,)}, r"input_ids: token ids must be in \[0, 31\), got -1"),
        ({"token_ids": (3,) * 1280}, "input_ids: the prompt has 1280 tokens; at most 1279 fit"),
        ({"text": "hello"}, "text_input: the checkpoint has no tokenizer; send input_ids"),
        ({"messages": ({"role": "user", "content": "x"},)}, "messages: the checkpoint has no tokenizer"),
    ],
)
def test_a_bad_prompt_is_refused_by_its_field(hybrid: Path, bad: dict[str, Any], message: str) -> None:
    driver = EngineDriver(engine_config(hybrid))
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        driver.engine.prepare(Request(request_id="1", prompt=Prompt(**bad), params=PARAMS))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"text": ""}, "text_input: must not be empty"),
        ({"text": "x" * 512}, "text_input: the prompt has 512 tokens; at most 511 fit"),
        (
            {"messages": ({"role": "refused", "content": "x"},)},
            "messages: the chat template refused them: no such role",
        ),
        ({"messages": ({"role": "user", "content": "x" * 512},)}, "messages: the prompt has"),
    ],
)
def test_a_bad_text_is_refused_by_its_field(text_model: Path, bad: dict[str, Any], message: str) -> None:
    driver = EngineDriver(engine_config(text_model))
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        driver.engine.prepare(Request(request_id="1", prompt=Prompt(**bad), params=PARAMS))


def test_a_request_that_memory_can_never_hold_is_refused(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid, kv_cache_bytes=1 << 20))
    driver.engine.scheduler.blocks.size = 4
    message = r"^max_tokens: 200 prompt tokens and 300 output tokens need 8 KV blocks; kv_cache_bytes holds 4"
    with pytest.raises(InvalidRequestError, match=message):
        driver.engine.prepare(request("1", (3,) * 200, max_tokens=300))


@pytest.mark.parametrize("name", ["oracle", "mtp", "lookup+mtp", "", "lookup+"])
def test_an_unknown_drafter_is_refused_by_name(hybrid: Path, name: str) -> None:
    driver = EngineDriver(engine_config(hybrid, drafters=("lookup",)))
    unknown = name.removeprefix("lookup+")
    with pytest.raises(
        InvalidRequestError, match=f"^drafter: unknown drafter '{unknown}'; this model has none, lookup"
    ):
        driver.engine.prepare(request("1", drafter=name))


def test_a_request_may_choose_its_drafters(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid, drafters=("lookup", "mtp"), router="always"))
    for drafter, expected in [("none", set()), ("mtp", {"mtp"}), (None, {"lookup", "mtp"}), ("none+mtp", {"mtp"})]:
        result = driver.run(request(str(drafter), (3, 4) * 10, drafter=drafter))
        assert result.stats is not None
        assert set(result.stats.drafter_tokens) <= expected
        assert ("mtp" in result.stats.drafter_tokens) == ("mtp" in expected)
