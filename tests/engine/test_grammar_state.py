# SPDX-License-Identifier: Apache-2.0
"""A grammar's forced run is worked out once and stays right behind every token."""

from pathlib import Path

import pytest
from tandem_backend.engine.grammar import GrammarCompiler, GrammarState
from tandem_backend.engine.grammar.compile import MAX_CHARACTERS
from tandem_backend.engine.grammar.state import MAX_FORCED
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import InvalidRequestError
from tandem_backend.model.config import load_model_config
from tandem_backend.types import Grammar, GrammarKind


class Counting:
    """A matcher that counts how often a run is worked out."""

    def __init__(self, state: GrammarState) -> None:
        self._matcher = state.matcher
        self.num_runs = 0

    def compute_ff_tokens(self) -> list[int]:
        self.num_runs += 1
        return self._matcher.compute_ff_tokens()

    def consume_token(self, token_id: int) -> bool:
        return self._matcher.consume_token(token_id)


def compile_regex(checkpoint: Path, source: str) -> GrammarState:
    model, tokenizer = load_model_config(checkpoint), Tokenizer(checkpoint)
    compiler = GrammarCompiler(tokenizer, model.vocab_size, tuple(model.eos_token_ids))
    return compiler.compile(Grammar(kind=GrammarKind.REGEX, source=source, field="guided_regex"))


def test_a_long_run_is_worked_out_once(bundled: Path) -> None:
    state = compile_regex(bundled, "def f\\(x\\): return x{900}")
    fresh = compile_regex(bundled, "def f\\(x\\): return x{900}")
    matcher = state.matcher = Counting(state)
    whole = fresh.matcher.compute_ff_tokens()
    assert len(whole) > MAX_FORCED
    for position, token_id in enumerate(whole):
        assert state.forced() == whole[position : position + MAX_FORCED]
        assert state.advance(token_id)
    assert matcher.num_runs == 1


def test_a_fork_goes_its_own_way(bundled: Path) -> None:
    state = compile_regex(bundled, "(import json|import os)")
    start = state.forced()
    fork = state.fork()
    for token_id in start:
        assert fork.advance(token_id)
    assert state.forced() == start
    again = compile_regex(bundled, "(import json|import os)")
    for token_id in start:
        again.advance(token_id)
    assert fork.forced() == again.forced()


def test_a_source_that_is_too_long_is_refused_before_anything_is_done(bundled: Path) -> None:
    with pytest.raises(InvalidRequestError, match="guided_regex: must have at most 131072 characters, has 131073"):
        compile_regex(bundled, "x" * (MAX_CHARACTERS + 1))
