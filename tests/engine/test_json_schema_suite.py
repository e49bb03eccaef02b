# SPDX-License-Identifier: Apache-2.0
"""The official JSON-Schema-Test-Suite, draft 2020-12: what the grammar lets through is valid, the rest is refused."""

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from answer_forms import json_schema
from tandem_backend.engine.grammar import GrammarCompiler, GrammarState
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import InvalidRequestError

SUITE = Path(__file__).parents[1] / "json_schema_suite"
VOCAB_SIZE, EOS = 8192, 2
MAX_TOKENS = 60
# Not what the draft says: the suite's `format` is an annotation there, which we enforce.
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def schemas() -> Iterator[tuple[str, Any]]:
    for path in sorted(SUITE.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield f"{path.stem}: {group['description']}", group


GROUPS = dict(schemas())


@pytest.fixture(scope="module")
def tokenizer(bundled: Path) -> Tokenizer:
    return Tokenizer(bundled)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS, 0))


@pytest.fixture(scope="module")
def claimed(compiler: GrammarCompiler) -> dict[str, GrammarState]:
    states = {}
    for name, group in GROUPS.items():
        with suppress(InvalidRequestError):
            states[name] = compiler.compile(json_schema(group["schema"]))
    return states


def allowed(state: GrammarState) -> np.ndarray:
    mask = torch.zeros(VOCAB_SIZE // 32, dtype=torch.int32)
    state.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))


def check_settled(state: GrammarState, choices: list[int], rng: random.Random) -> None:
    """What is known without a mask is what the mask says."""
    for token in [EOS, *rng.sample(choices, min(len(choices), 8)), *rng.sample(range(VOCAB_SIZE), 8)]:
        settled = state.settle(token)
        assert settled == token if token in choices else settled is None or choices == [settled]


def walk(state: GrammarState, rng: random.Random, closers: frozenset[int]) -> list[int] | None:
    """A random text that the masks let through, with a bias to its end; None where it does not end in time."""
    state, tokens = state.fork(), []
    while not state.is_finished():
        choices = allowed(state).tolist()
        assert choices, "the mask leaves nothing"
        check_settled(state, choices, rng)
        if EOS in choices and rng.random() < 0.7:
            return tokens
        endings = [token for token in choices if token in closers]
        token = rng.choice(endings if endings and rng.random() < 0.6 else choices)
        if token in (EOS, 0):
            return tokens
        assert state.advance(token)
        tokens.append(token)
        if len(tokens) > MAX_TOKENS:
            return None
    return tokens


def test_whatever_is_let_through_is_valid(tokenizer: Tokenizer, claimed: dict[str, GrammarState]) -> None:
    rng, num_checked = random.Random(0), 0
    closers = frozenset(tokenizer.encode(text, add_special_tokens=False)[0] for text in '"}],0')
    for name, state in claimed.items():
        validator = jsonschema.Draft202012Validator(GROUPS[name]["schema"], format_checker=FORMATS)
        for _ in range(6):
            tokens = walk(state, rng, closers)
            if tokens is not None:
                instance = json.loads(tokenizer.decode(tokens, skip_special_tokens=False))
                assert validator.is_valid(instance), (name, instance)
                num_checked += 1
    assert num_checked > 3 * len(claimed)


def test_the_suites_instances(tokenizer: Tokenizer, claimed: dict[str, GrammarState]) -> None:
    """No invalid instance is taken; valid ones are, with few exceptions: properties come in the schema's order."""
    byte_ids = [tokenizer.encode(chr(byte), add_special_tokens=False)[0] for byte in range(128)]
    taken, not_taken = 0, 0
    for name, state in claimed.items():
        for test in GROUPS[name]["tests"]:
            copied = state.fork()
            data = json.dumps(test["data"]).encode()
            is_taken = all(copied.advance(byte_ids[byte]) for byte in data)
            is_taken = is_taken and EOS in allowed(copied)
            assert not (is_taken and not test["valid"]), (name, test["description"])
            taken += is_taken and test["valid"]
            not_taken += not is_taken and test["valid"]
    assert taken > 10 * not_taken


def test_the_claimed_schemas_do_not_become_fewer(claimed: dict[str, GrammarState]) -> None:
    assert len(claimed) >= 160
    assert {name.partition(":")[0] for name in claimed} >= {
        "additionalProperties", "allOf", "anyOf", "const", "enum", "items", "maximum", "minLength", "pattern",
        "patternProperties", "prefixItems", "properties", "ref", "required", "type", "multipleOf", "minItems",
    }  # fmt: skip
