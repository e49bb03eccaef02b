# SPDX-License-Identifier: Apache-2.0
"""The grammar of tool calls: what it lets through is a call by the tool's schema, in both formats."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tandem_backend.engine.grammar import GrammarCompiler, GrammarState
from tandem_backend.engine.grammar.compile import DEFAULT_WHITESPACE
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.engine.tools import ToolFormat, make_parser, read_tools
from tandem_backend.engine.tools.grammar import tool_grammar
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import Grammar, GrammarKind

VOCAB_SIZE, EOS = 8192, 2
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
TOOLS = read_tools([{"name": "weather", "parameters": PARAMETERS}, {"name": "now"}])


@pytest.fixture(scope="module")
def tokenizer(bundled: Path) -> Tokenizer:
    return Tokenizer(bundled)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS, 0))


def source(form: ToolFormat, tools: Any = TOOLS, *, parallel: bool = True) -> str:
    return tool_grammar(form, tools, parallel=parallel, tags_are_tokens=True, whitespace_pattern=DEFAULT_WHITESPACE)


def start(compiler: GrammarCompiler, form: ToolFormat, **options: Any) -> GrammarState:
    return compiler.compile(Grammar(kind=GrammarKind.GRAMMAR, source=source(form, **options), field="tools"))


def allowed(state: GrammarState) -> list[int]:
    mask = torch.zeros(VOCAB_SIZE // 32, dtype=torch.int32)
    state.fill_mask(mask)
    found: list[int] = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")).tolist()
    return found


def walk(state: GrammarState, rng: random.Random) -> list[int] | None:
    """A random answer; None where it does not end in time."""
    tokens: list[int] = []
    while not state.is_finished() and len(tokens) < 250:
        choices = allowed(state)
        if EOS in choices and rng.random() < 0.8:
            return tokens
        token = rng.choice([choice for choice in choices if choice not in (EOS, 0)])
        assert state.advance(token)
        tokens.append(token)
    return tokens if state.is_finished() else None


@pytest.mark.parametrize("form", ToolFormat)
def test_whatever_is_let_through_is_a_call_by_the_schema(
    tokenizer: Tokenizer, compiler: GrammarCompiler, form: ToolFormat
) -> None:
    rng, num_calls = random.Random(1), {"weather": 0, "now": 0}
    for _ in range(60):
        tokens = walk(start(compiler, form), rng)
        if tokens is None:
            continue
        parser = make_parser(form, TOOLS)
        stream = tokenizer.stream()
        parts = [parser.push(stream.push(token)) for token in tokens] + [parser.push(stream.flush()), parser.finish()]
        assert "".join(part.content for part in parts) == ""
        deltas = [delta for part in parts for delta in part.calls]
        for index in range(parser.num_calls):
            [name] = [delta.name for delta in deltas if delta.index == index and delta.name is not None]
            arguments = json.loads("".join(delta.arguments for delta in deltas if delta.index == index))
            num_calls[name] += 1
            schema = {**PARAMETERS, "additionalProperties": False} if name == "weather" else {"maxProperties": 0}
            jsonschema.Draft202012Validator(schema).validate(arguments)
    assert min(num_calls.values()) >= 5


@pytest.mark.parametrize(
    ("form", "text", "is_call"),
    [
        (ToolFormat.HERMES, '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}', True),
        (ToolFormat.HERMES, '{"name": "weather", "arguments": {"city": "Rome"}}', False),
        (ToolFormat.HERMES, '{"name": "weather", "arguments": {"city": "Rome", "days": "3"}}', False),
        (ToolFormat.HERMES, '{"name": "wether", "arguments": {}}', False),
        (
            ToolFormat.QWEN_XML,
            "<function=weather>\n<parameter=city>\nR<\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>",
            True,
        ),
        (ToolFormat.QWEN_XML, "<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>", False),
        (
            ToolFormat.QWEN_XML,
            "<function=weather>\n<parameter=city>\nthirteen chars\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>",
            False,
        ),
        (ToolFormat.QWEN_XML, "<function=now>\n</function>", True),
    ],
)
def test_calls_as_the_template_writes_them(
    tokenizer: Tokenizer, compiler: GrammarCompiler, form: ToolFormat, text: str, is_call: bool
) -> None:
    call = f"<tool_call>\n{text}\n</tool_call>"
    for answer, parallel in ((call, False), (f"{call}\n{call}", True)):
        state = start(compiler, form, parallel=parallel)
        taken = all(state.advance(token) for token in tokenizer.encode(answer, add_special_tokens=False))
        assert (taken and EOS in allowed(state)) == is_call
    state = start(compiler, form, parallel=False)
    tokens = tokenizer.encode(f"{call}\n{call}", add_special_tokens=False)
    assert not all(state.advance(token) for token in tokens), "one call is one call"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "array"}, "the parameters of 'f' must be of type object"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "the argument 'a' of 'f' uses pattern"),
        ({"properties": {"a>b": {"type": "string"}}}, "the argument 'a>b' of 'f' can't be written"),
        ({"anyOf": [{"required": ["a"]}]}, "the parameters of 'f' use anyOf"),
    ],
)
def test_what_xml_cannot_enforce_is_refused_by_name(parameters: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        source(ToolFormat.QWEN_XML, read_tools([{"name": "f", "parameters": parameters}]))
