# SPDX-License-Identifier: Apache-2.0
"""Grammars that llguidance can't compile in time or without crashing are refused, and the process lives on."""

import json
from pathlib import Path

import pytest
import torch
from tandem_backend.engine.grammar import GrammarCompiler
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import Grammar, GrammarKind

NUM_RULES, NUM_SCHEMAS = 5000, 2200
CHAIN = "\n".join(["start: r0", *(f'r{n}: r{n + 1} | "x{n}"' for n in range(NUM_RULES)), f'r{NUM_RULES}: "z"'])
NESTED = {
    "$defs": {
        **{f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(NUM_SCHEMAS)},
        f"d{NUM_SCHEMAS}": {},
    },
    "$ref": "#/$defs/d0",
}


@pytest.fixture(scope="module")
def compiler(bundled: Path) -> GrammarCompiler:
    return GrammarCompiler(Tokenizer(bundled), 8192, (1,))


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 99_999_999}), "CPU time"),
        (GrammarKind.CHOICE, json.dumps([f"w{n}" for n in range(100_000)]), "at most 131072 characters"),
        (GrammarKind.GRAMMAR, CHAIN, "too deep"),
        (GrammarKind.JSON_SCHEMA, json.dumps(NESTED), "too deep"),
    ],
    ids=["endless", "large", "deep rules", "deep schema"],
)
def test_what_takes_too_much_is_refused_by_its_field_and_the_next_is_served(
    compiler: GrammarCompiler, kind: GrammarKind, source: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"guided: .*{reason}"):
        compiler.compile(Grammar(kind=kind, source=source, field="guided"))
    state = compiler.compile(Grammar(kind=GrammarKind.REGEX, source=f"after {reason}", field="guided"))
    assert state.forced()


def test_an_error_of_the_library_names_no_stack(compiler: GrammarCompiler) -> None:
    source = "start: r0\n" + "\n".join(f'r{n}: "a{n}"' for n in range(3)) + "\nr0: r9"
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(Grammar(kind=GrammarKind.GRAMMAR, source=source, field="guided"))
    assert "backtrace" not in str(caught.value)


def test_an_ambiguous_grammar_ends_with_nothing_allowed_and_does_not_go_on_for_ever(compiler: GrammarCompiler) -> None:
    source = 'start: a\na: b b b b b\nb: a | "" | /./'
    state = compiler.compile(Grammar(kind=GrammarKind.GRAMMAR, source=source, field="guided"))
    mask = torch.full((8192 // 32,), -1, dtype=torch.int32)
    for _ in range(200):
        state.fill_mask(mask)
        if not mask.any():
            return
        assert state.advance(100)
    pytest.fail("200 tokens of a grammar whose every step doubles the work")
