# SPDX-License-Identifier: Apache-2.0
"""Regeneration and loop escape: when the gateway samples by itself, with what, and that its seed gives it again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tandem_backend.errors import InvalidRequestError
from tandem_backend.serving.sampling import parse_sampling
from tandem_client.gateway.errors import ApiError
from tandem_client.gateway.loop_escape import is_looping
from tandem_client.gateway.regenerate import Answered, read_header
from tandem_client.gateway.sampling_choice import SAMPLING_FIELDS, SamplingChooser
from tandem_client.gateway.sampling_settings import SamplingSettings, read_generation_config
from tandem_client.gateway.seeds import fresh_seed, mode_of

ONE, OTHER = b"1" * 16, b"2" * 16
USER = {"role": "user", "content": "List the files."}
REGENERATE = SamplingSettings(temperature=0.5, top_p=0.9)
ESCAPE = SamplingSettings(temperature=1.5)


def chooser(*, regenerate: bool = True, loop_turns: int = 3) -> SamplingChooser:
    answered = Answered(max_entries=10, window_s=100.0) if regenerate else None
    return SamplingChooser(answered, REGENERATE, loop_turns, ESCAPE)


def call(arguments: object = '{"path": "."}', name: str = "ls") -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls: dict[str, Any], result: str = "nothing") -> list[dict[str, Any]]:
    return [
        {"role": "assistant", "content": None, "tool_calls": list(calls)},
        *({"role": "tool", "tool_call_id": "x", "content": result} for _ in calls),
    ]


LOOP = [USER, *turn(call()) * 3]


def choose(
    chooser: SamplingChooser, *, digest: bytes = ONE, messages: Any = (USER,), **values: Any
) -> tuple[str, dict[str, Any]]:
    choice = chooser.choose(digest, messages, sent=frozenset({"model", "messages", *values.pop("sent", ())}), **values)
    return choice.mode, dict(choice.values)


def test_a_conversation_is_greedy_until_it_was_answered() -> None:
    ours = chooser()
    assert choose(ours) == choose(ours) == ("greedy", {})
    ours.note_answer(ONE)
    assert choose(ours, digest=OTHER) == ("greedy", {})
    (mode, first), (_, second) = choose(ours), choose(ours)
    assert mode == "regenerate"
    assert first["seed"] != second["seed"]
    assert {**first, "seed": 0} == {"temperature": 0.5, "top_p": 0.9, "seed": 0}


@pytest.mark.parametrize("field", sorted(SAMPLING_FIELDS))
def test_a_request_that_chose_its_sampling_is_as_sent(field: str) -> None:
    ours = chooser()
    ours.note_answer(ONE)
    for again in (None, True, False):
        assert choose(ours, sent=[field], again=again) == ("as_sent", {})
    assert choose(ours, sent=[field], messages=LOOP) == ("as_sent", {})


def test_the_header_decides_where_it_is_there() -> None:
    ours = chooser()
    assert choose(ours, again=True)[0] == "regenerate"
    ours.note_answer(ONE)
    assert choose(ours, again=False) == ("greedy", {})


def test_turned_off_nothing_is_regenerated() -> None:
    ours = chooser(regenerate=False)
    ours.note_answer(ONE)
    assert choose(ours) == choose(ours, again=False) == ("greedy", {})
    with pytest.raises(ApiError, match=r"X-Tandem-Regenerate: .*turned off"):
        choose(ours, again=True)
    seed = fresh_seed("regenerate", ONE)
    assert choose(ours, sent=["seed"], seed=seed) == ("as_sent", {})


@pytest.mark.parametrize(("mode", "messages"), [("regenerate", [USER]), ("loop_escape", LOOP)])
def test_a_reported_seed_alone_gives_the_same_sampling_again(mode: str, messages: Any) -> None:
    ours = chooser()
    ours.note_answer(ONE)
    found, values = choose(ours, messages=messages)
    assert found == mode
    elsewhere = chooser()  # another gateway, or this one after a restart
    again = choose(elsewhere, messages=messages, sent=["seed"], seed=values["seed"])
    assert again == (mode, values)
    assert choose(elsewhere, digest=OTHER, messages=messages, sent=["seed"], seed=values["seed"]) == ("as_sent", {})
    assert choose(elsewhere, sent=["seed", "temperature"], seed=values["seed"]) == ("as_sent", {})


def test_the_header_is_one_or_zero() -> None:
    assert [read_header(h) for h in ({}, {"x-tandem-regenerate": "0"}, {"x-tandem-regenerate": "1"})] == [
        None,
        False,
        True,
    ]
    with pytest.raises(ApiError, match="X-Tandem-Regenerate: must be 0 or 1, got 'yes'"):
        read_header({"x-tandem-regenerate": "yes"})


def test_answers_are_remembered_for_a_while_and_only_so_many() -> None:
    now = [0.0]
    answered = Answered(max_entries=2, window_s=10, clock=lambda: now[0])
    for digest in (b"a", b"b", b"a", b"c"):
        answered.add(digest)
    assert [digest in answered for digest in (b"a", b"b", b"c")] == [True, False, True]
    assert len(answered) == 2
    now[0] = 10.1
    assert b"a" not in answered


@pytest.mark.parametrize(
    ("messages", "loops"),
    [
        ([USER], False),
        ([USER, *turn(call()) * 2], False),
        ([USER, *turn(call()) * 3], True),
        ([USER, *turn(call()) * 4], True),
        ([USER, *turn(call('{"path":"."}')), *turn(call({"path": "."})), *turn(call())], True),  # however it is written
        ([USER, *turn(call()) * 2, *turn(call('{"path": "/"}'))], False),
        ([USER, *turn(call()) * 2, *turn(call(name="cat"))], False),
        ([USER, *turn(call()) * 3, *turn(call(name="cat"))], False),  # progress
        ([USER, *turn(call()) * 3, {"role": "assistant", "content": "There are none."}], False),
        ([USER, *turn(call()) * 3, USER], False),
        ([USER, *turn(call()) * 2, USER, *turn(call())], False),
        (
            [USER, *turn(call(), call(name="cat")), *turn(call(), call(name="pwd")), *turn(call())],
            True,
        ),  # one of several
        ([USER, *turn(call("not json")) * 3], True),
        ([USER, *turn(call("[" * 100_000)) * 3], True),
        ([USER, *turn(call('{"a":' * 990 + "1" + "}" * 990)) * 3], True),
        ([USER, *turn(call(), result="1"), *turn(call(), result="2"), *turn(call(), result="3")], True),
        ([USER, *({"role": "assistant", "content": "Hm."} for _ in range(3))], False),
    ],
)
def test_a_loop_is_one_call_in_every_turn(messages: Any, loops: bool) -> None:
    assert is_looping(messages, 3) == loops
    assert choose(chooser(), messages=messages)[0] == ("loop_escape" if loops else "greedy")


def test_loop_escape_samples_with_its_settings_and_can_be_turned_off() -> None:
    _, values = choose(chooser(), messages=LOOP)
    assert {**values, "seed": 0} == {"temperature": 1.5, "seed": 0}
    assert choose(chooser(loop_turns=0), messages=LOOP) == ("greedy", {})
    assert choose(chooser(loop_turns=4), messages=LOOP) == ("greedy", {})


def test_seeds_fit_into_any_json_reader_and_are_told_from_a_clients_own() -> None:
    seeds = [fresh_seed(mode, ONE) for mode in ("regenerate", "loop_escape") for _ in range(100)]
    assert len(set(seeds)) == 200
    assert all(0 <= seed < 2**53 and json.loads(json.dumps(float(seed))) == seed for seed in seeds)
    assert [mode_of(seed, ONE) for seed in seeds] == ["regenerate"] * 100 + ["loop_escape"] * 100
    assert not [seed for seed in seeds if mode_of(seed, OTHER) or mode_of(seed + 1, ONE)]
    assert not [value for value in (None, True, 1.0, -1, 2**53, 2**64 - 1, *range(1000)) if mode_of(value, ONE)]


def test_a_generation_config_says_how_to_sample(tmp_path: Path) -> None:
    assert read_generation_config(None).values() == {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    file = tmp_path / "generation_config.json"
    file.write_text(
        '{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null, "eos_token_id": 2}'
    )
    assert read_generation_config(file).values() == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize("content", ["{", "[1]", '{"temperature": 0}', '{"top_p": "all"}', None])
def test_a_wrong_generation_config_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "generation_config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=rf"^generation_config: {file}: "):
        read_generation_config(file)


def is_taken(read: Callable[..., object], values: dict[str, float]) -> bool:
    try:
        read(values)
    except (ValueError, InvalidRequestError):
        return False
    return True


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("top_p", (1e-6, 1.0), (9e-7, 1.01)),
        ("typical_p", (1e-6, 1.0), (9e-7, 1.01)),
        ("min_p", (0.0, 1.0), (-0.01, 1.01)),
        ("repetition_penalty", (0.01, 10.0), (0.009, 10.1)),
        ("temperature", (0.001, 100.0), (0.0009, 100.1)),
    ],
)
def test_what_the_gateway_samples_with_the_model_takes(
    name: str, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    for read in (SamplingSettings.model_validate, parse_sampling):
        assert all(is_taken(read, {name: value}) for value in inside)
        assert not any(is_taken(read, {name: value}) for value in outside)
