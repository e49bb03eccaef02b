# SPDX-License-Identifier: Apache-2.0
"""Grammars, tool choices and reasoning limits: plain decoding's bits whatever is drafted and whoever shares a pass."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from answer_forms import FORMS, SCHEMA, TOOLS, ask, grammar, json_schema
from engine_driver import EngineDriver, Result, engine_config, num_different
from tandem_backend.config import MIB
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import (
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    Request,
    SamplingParams,
    ToolChoice,
    ToolMode,
)

DRAFTERS = ("forced", "lookup", "mtp", "wrong", "half", "oracle", "wrong+oracle+mtp+lookup")


def drafting(request: Request, drafter: str | None, request_id: str) -> Request:
    return replace(request, request_id=request_id, params=replace(request.params, drafter=drafter))


@pytest.fixture(scope="module")
def plain(bundled: Path) -> dict[str, Result]:
    """One request at a time, one row a pass, nothing drafted."""
    driver = EngineDriver(engine_config(bundled, max_active=1, max_prefill_rows=1, kv_cache_bytes=16 * MIB))
    return {name: driver.run(drafting(request, "none", name)) for name, request in FORMS.items()}


@pytest.fixture(scope="module")
def speculating(bundled: Path, plain: dict[str, Result]) -> EngineDriver:
    config = engine_config(bundled, drafters=("lookup", "mtp"), router="always", kv_cache_bytes=64 * MIB)
    answers: dict[tuple[int, ...], list[int]] = {}
    extra = {name: ScriptedDrafter(name, answers, 8192) for name in ("wrong", "half", "oracle")}
    driver = EngineDriver(config, extra)
    for name, request in FORMS.items():
        answers[driver.engine.prepare(request).prompt_ids] = plain[name].token_ids
    assert len(answers) == len(FORMS)
    return driver


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_nothing(speculating: EngineDriver, plain: dict[str, Result], drafter: str) -> None:
    """All requests share their rounds."""
    for name, request in FORMS.items():
        speculating.add(drafting(request, drafter, f"{drafter}: {name}"))
    speculating.finish()
    for name, reference in plain.items():
        result = speculating.results[f"{drafter}: {name}"]
        assert num_different(result, reference) == 0, name
        assert (result.text, result.finish_reason) == (reference.text, reference.finish_reason)


def test_answers_alone_are_those_of_a_batch(speculating: EngineDriver, plain: dict[str, Result]) -> None:
    for name, request in FORMS.items():
        assert num_different(speculating.run(drafting(request, "mtp+lookup", f"alone: {name}")), plain[name]) == 0


def test_each_answer_has_its_form(plain: dict[str, Result]) -> None:
    texts = {name: result.text for name, result in plain.items()}
    for name in ("schema", "schema, sampled", "schema, penalties"):
        jsonschema.validate(json.loads(texts[name]), SCHEMA)
    assert isinstance(json.loads(texts["object"]), dict)
    assert re.fullmatch(r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]", texts["regex"])
    assert texts["choice"] in ("yes", "no", "perhaps not")
    assert re.fullmatch(r"[0-9]{1,3} \+ [0-9]{1,3} = [0-9]{1,3}", texts["ebnf"])
    assert re.fullmatch(r"Hello, [A-Z][a-z]{2,9}!", texts["lark"])
    for name, tool in (("call", "get_weather"), ("calls", "evaluate"), ("named call", "evaluate")):
        assert texts[name].startswith(f'<tool_call>\n{{"name": "{tool}", "arguments": {{'), texts[name]
        assert texts[name].endswith("}}\n</tool_call>")
    assert all(result.finish_reason == FinishReason.STOP for name, result in plain.items() if name != "stall")


def test_reasoning_is_closed_by_the_templates_tokens(speculating: EngineDriver, plain: dict[str, Result]) -> None:
    """At their true positions: the target goes on behind them as behind a prompt that holds them."""
    closing = speculating.engine.tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    for name, num_tokens in (("budget", 9), ("no budget", 0), ("schema after reasoning", 12)):
        output = plain[name].token_ids
        assert output[num_tokens : num_tokens + len(closing)] == closing
        assert closing[1] not in output[:num_tokens]
    prompt = speculating.engine.prepare(FORMS["budget"]).prompt_ids
    answer = plain["budget"].token_ids[9 + len(closing) :]
    prefilled = Request(
        request_id="prefilled",
        prompt=Prompt(token_ids=(*prompt, *plain["budget"].token_ids[:9], *closing)),
        params=SamplingParams(max_tokens=72 - 9 - len(closing)),
    )
    result = speculating.run(prefilled)
    assert result.token_ids == answer
    rows = plain["budget"].rows[-len(answer) :]
    assert all(torch.equal(a, b) for a, b in zip(result.rows, rows, strict=True))


def test_a_looping_block_is_closed(plain: dict[str, Result]) -> None:
    """The bias makes the target say one token over and over."""
    assert plain["stall"].token_ids[:8] == [301] * 8
    assert plain["stall"].token_ids[8:11] == plain["no budget"].token_ids[:3], "the template's closing"
    assert plain["stall"].token_ids[11:] == [301] * 61


def test_forced_tokens_are_drafted_and_taken(bundled: Path, plain: dict[str, Result]) -> None:
    driver = EngineDriver(engine_config(bundled, drafters=("lookup",), kv_cache_bytes=16 * MIB))
    result = driver.run(drafting(FORMS["named call"], "forced", "forced"))
    assert num_different(result, plain["named call"]) == 0
    assert result.stats is not None
    drafted, accepted = result.stats.drafter_tokens["forced"]
    assert drafted >= accepted >= 15
    nothing = driver.run(drafting(FORMS["named call"], "none", "none"))
    assert nothing.stats is not None
    assert nothing.stats.num_draft_tokens == 0
    assert driver.engine.counters().drafter_tokens["forced"] == (drafted, accepted)


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(400):
    DEEP = {"type": "array", "items": DEEP}

REFUSED = [
    (json_schema(DEEP), "structured_outputs: recursion limit"),
    (grammar(GrammarKind.REGEX, "(" * 5000 + ")" * 5000), "structured_outputs: .*invalid regex"),
    (grammar(GrammarKind.GRAMMAR, "start: " + "(" * 5000 + ")" * 5000), "too deeply nested"),
    (grammar(GrammarKind.GRAMMAR, "root ::= " + "(" * 5000 + ")" * 5000), "recursion"),
    (json_schema({"type": "array", "uniqueItems": True}), "structured_outputs: .*not supported: uniqueItems"),
    (json_schema({"not": {"type": "string"}}), "structured_outputs: .*not supported: not"),
    (json_schema({"properties": {"a": {"if": {}, "then": {}}}}), "not supported: if, then"),
    (json_schema({"$ref": "https://example.com/schema"}), "within the schema only, got https://example.com/schema"),
    (json_schema({"oneOf": [{"type": "string"}, {"minLength": 2}]}), "oneOf is supported where"),
    (json_schema({"type": "string", "format": "colour"}), "Unknown format: colour"),
    (json_schema(False), "JSON Schema must be an object, got false"),
    (grammar(GrammarKind.REGEX, "(a|b"), "structured_outputs: .*unclosed group"),
    (grammar(GrammarKind.REGEX, "a(?=b)"), "look-ahead"),
    (grammar(GrammarKind.GRAMMAR, "root ::= missing"), "missing"),
    (grammar(GrammarKind.GRAMMAR, "start: missing"), "missing"),
    (grammar(GrammarKind.GRAMMAR, "nonsense {{"), "structured_outputs: "),
]


@pytest.mark.parametrize(("form", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(speculating: EngineDriver, form: Grammar, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        speculating.engine.prepare(ask("?", grammar=form))


def test_wrong_tools_are_refused_by_name(speculating: EngineDriver) -> None:
    def refused(tools: Any, message: str, **choice: Any) -> None:
        request = ask("?", tools=tools, tool_choice=ToolChoice(**{"mode": ToolMode.REQUIRED, **choice}))
        with pytest.raises(InvalidRequestError, match=message):
            speculating.engine.prepare(request)

    refused(TOOLS, "tool_choice: no tool 'x' among .*get_weather, evaluate", mode=ToolMode.NAMED, name="x")
    refused((), "tool_choice: needs messages and tools")
    refused(({"type": "function"},), r"tools\[0\]: name must be")
    refused(({"name": "a b"},), r"tools\[0\]: name must be")
    refused(({"name": "a"}, {"name": "a"}), r"tools\[1\]: name 'a' is there twice")
    refused(({"name": "a", "parameters": []},), r"tools\[0\]: parameters must be")
    unsupported = {"type": "object", "properties": {"x": {"contains": {}}}}
    refused(({"name": "a", "parameters": unsupported},), "parameters of 'a': .*not supported: contains")
    with pytest.raises(InvalidRequestError, match="leaves no room for structured_outputs"):
        speculating.engine.prepare(
            ask("?", tools=TOOLS, tool_choice=ToolChoice(mode=ToolMode.REQUIRED), grammar=json_schema({}))
        )


def test_a_checkpoint_without_a_tokenizer_refuses_forms(hybrid: Path) -> None:
    engine = EngineDriver(engine_config(hybrid)).engine
    for params in (SamplingParams(grammar=json_schema({})), SamplingParams(max_reasoning_tokens=3)):
        with pytest.raises(InvalidRequestError, match=r"structured_outputs|max_reasoning_tokens"):
            engine.prepare(Request(request_id="1", prompt=Prompt(token_ids=(3, 4)), params=params))


def test_a_tokenizer_that_llguidance_cannot_take_only_costs_the_grammars(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "to_json", lambda _: "{}")
    driver = EngineDriver(engine_config(bundled, kv_cache_bytes=16 * MIB))
    with pytest.raises(InvalidRequestError, match="structured_outputs: grammars can't be enforced"):
        driver.engine.prepare(FORMS["schema"])
    assert driver.run(replace(FORMS["no budget"], request_id="1")).text.startswith("\n</think>")


def test_a_grammar_ends_the_answer_before_min_tokens_and_with_ignore_eos(speculating: EngineDriver) -> None:
    form = grammar(GrammarKind.CHOICE, '["yes", "no"]')
    result = speculating.run(replace(ask("?", grammar=form, min_tokens=9, ignore_eos=True), request_id="early"))
    assert result.text in ("yes", "no")
    assert result.finish_reason == FinishReason.STOP
