# SPDX-License-Identifier: Apache-2.0
"""Parsing: what reaches the engine, and which field an error names."""

import json
import re
from typing import Any

import pytest
from fakes.pb_utils import InferenceRequest
from hypothesis import given
from hypothesis import strategies as st
from tandem_backend.errors import InvalidRequestError
from tandem_backend.serving.request import Parsed, parse_request
from tandem_backend.types import SamplingParams


def parse(**values: Any) -> Parsed:
    return parse_request(InferenceRequest.of(**values), "1")


def params(*, sampling: dict[str, Any] | None = None, **values: Any) -> SamplingParams:
    if sampling is not None:
        values["sampling_parameters"] = json.dumps(sampling)
    request = parse(text_input="x", **values).request
    assert request is not None
    return request.params


def test_a_bare_prompt_is_stateless_and_greedy() -> None:
    parsed = parse(text_input="Grüße 😀")
    assert parsed.request is not None
    assert parsed.request.prompt.text == "Grüße 😀"
    assert parsed.request.sequence_id is None
    assert parsed.request.params == SamplingParams()
    assert not parsed.options.stream
    assert parsed.options.echo == "Grüße 😀"


@pytest.mark.parametrize(
    ("flags", "start", "end"), [(0, False, False), (1, True, False), (2, False, True), (3, True, True)]
)
@pytest.mark.parametrize("sequence_id", [7, "a name"])
def test_sequence_id_and_flags(sequence_id: int | str, flags: int, start: bool, end: bool) -> None:
    request = parse(text_input="x", sequence_id=sequence_id, flags=flags).request
    assert request is not None
    assert (request.sequence_id, request.sequence_start, request.sequence_end) == (sequence_id, start, end)


@pytest.mark.parametrize("sequence_id", [0, ""])
def test_without_a_sequence_flags_mean_nothing(sequence_id: int | str) -> None:
    request = parse(text_input="x", sequence_id=sequence_id, flags=3).request
    assert request is not None
    assert (request.sequence_id, request.sequence_start, request.sequence_end) == (None, False, False)


def test_stop_closes_the_sequence_and_needs_no_prompt() -> None:
    parsed = parse(stop=True, sequence_id="s", flags=2)
    assert (parsed.request, parsed.sequence_id) == (None, "s")
    assert parse(stop=False, text_input="x", sequence_id="s").request is not None
    with pytest.raises(InvalidRequestError, match=r"stop: .*sequence_id"):
        parse(stop=True)


def test_chat_input() -> None:
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    parsed = parse(
        messages=json.dumps(messages),
        tools=json.dumps(tools),
        enable_thinking=True,
        chat_template_kwargs='{"style": "short", "enable_thinking": false}',
    )
    assert parsed.request is not None
    prompt = parsed.request.prompt
    assert prompt.messages == tuple(messages)
    assert prompt.tools == tuple(tools)
    assert prompt.template_kwargs == {"style": "short", "enable_thinking": True}  # the tensor wins
    assert parsed.options.echo == ""


def test_token_input() -> None:
    parsed = parse(input_ids=[5, 6, 7])
    assert parsed.request is not None
    assert parsed.request.prompt.token_ids == (5, 6, 7)
    assert parsed.options.echo == ""


def test_a_value_counts_from_parameters_then_sampling_parameters_then_tensor() -> None:
    parameters = '{"max_tokens": 1, "min_tokens": 1, "drafter": "a"}'
    layered = params(parameters=parameters, sampling={"max_tokens": 2, "drafter": "b"}, max_tokens=3)
    assert (layered.max_tokens, layered.drafter, layered.min_tokens) == (3, "b", 1)


def test_all_sampling_fields() -> None:
    assert params(
        sampling={
            "max_tokens": "20",
            "min_tokens": 2.0,
            "stop": ["a", "b"],
            "stop_token_ids": [1, "2"],
            "ignore_eos": "true",
            "include_stop_str_in_output": 1,
            "drafter": "lookup",
            "num_draft_tokens": "4",
            "seed": 2**64 - 1,
            "temperature": "0.5",
            "top_p": "0.9",
            "top_k": -1,
            "min_p": 0.1,
            "typical_p": 0.8,
            "repetition_penalty": 1.1,
            "presence_penalty": -1,
            "frequency_penalty": 2,
            "no_repeat_ngram_size": 3,
            "logit_bias": {"7": -100, "5": "1.5"},
            "bad_words": ["x", "y z"],
            "allowed_token_ids": "[1, 2]",
            "logprobs": 20,
            "logprobs_mode": "processed",
            "prompt_logprobs": 0,
            "n": "3",
            "best_of": 1,
            "top_logprobs": None,
        }
    ) == SamplingParams(
        max_tokens=20,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        include_stop=True,
        drafter="lookup",
        num_draft_tokens=4,
        temperature=0.5,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.8,
        seed=2**64 - 1,
        repetition_penalty=1.1,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        no_repeat_ngram_size=3,
        logit_bias=((5, 1.5), (7, -100.0)),
        bad_words=("x", "y z"),
        allowed_token_ids=(1, 2),
        num_logprobs=20,
        logprobs_mode="processed",
        prompt_logprobs=0,
        num_choices=3,
    )


def test_a_bias_may_be_json_text_and_a_bad_word_plain_text() -> None:
    parsed = params(parameters='{"logit_bias": "{\\"5\\": -1}", "bad_words": "no"}')
    assert (parsed.logit_bias, parsed.bad_words) == (((5, -1.0),), ("no",))


def test_stop_strings_in_all_their_forms() -> None:
    assert params(sampling={"stop": "END"}).stop == ("END",)
    assert params(parameters='{"stop": "END"}').stop == ("END",)
    assert params(sampling={"stop": "END"}, stop_words=["a", "b"]).stop == ("a", "b")
    assert params(parameters='{"stop_token_ids": "[3, 4]"}').stop_token_ids == (3, 4)


def test_top_k_1_is_greedy_at_any_temperature() -> None:
    assert params(sampling={"temperature": 0.7, "top_k": 1}).is_plain


@pytest.mark.parametrize(
    ("sampling", "drafter"),
    [
        ({"draft": False}, "none"),
        ({"draft": "off"}, "none"),
        ({"draft": "off", "drafter": "none"}, "none"),
        ({"draft": "on"}, None),
        ({"draft": True, "drafter": "lookup"}, "lookup"),
        ({"draft": None, "drafter": "mtp"}, "mtp"),
    ],
)
def test_draft_is_a_switch(sampling: dict[str, Any], drafter: str | None) -> None:
    assert params(sampling=sampling).drafter == drafter
    assert params(parameters=json.dumps(sampling)).drafter == drafter


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"draft": False, "drafter": "mtp+lookup"}, "draft: is off, but drafter is 'mtp\\+lookup'"),
        ({"draft": "on", "drafter": "none"}, "draft: is on, but drafter is 'none'"),
        ({"draft": "perhaps"}, "draft: .*got 'perhaps'"),
        ({"temperature": -0.1}, r"temperature: must be 0 \(greedy\) or 0.001 to 100, got -0.1"),
        ({"temperature": "1e-8"}, r"temperature: must be 0 \(greedy\) or 0.001 to 100, got '1e-8'"),
        ({"temperature": "warm"}, "temperature: .*number.*, got 'warm'"),
        ({"temperature": True}, "temperature: must be a number, got True"),
        ({"temperature": float("inf")}, "temperature: .*finite number"),
        ({"top_p": 0}, "top_p: .*greater than or equal to 0.000001, got 0"),
        ({"top_p": 1e-46}, "top_p: .*greater than or equal to 0.000001, got 1e-46"),
        ({"top_p": 1.5}, "top_p: .*less than or equal to 1, got 1.5"),
        ({"typical_p": 0}, "typical_p: .*greater than or equal to 0.000001"),
        ({"top_k": -2}, "top_k: .*greater than or equal to -1, got -2"),
        ({"min_p": 1.1}, "min_p: .*less than or equal to 1"),
        ({"presence_penalty": 2.5}, "presence_penalty: .*less than or equal to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty: .*greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty: .*greater than or equal to 0.01, got 0"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty: .*greater than or equal to 0.01"),
        ({"stop": {}}, r"stop: must be a string or a list of strings, got \{\}"),
        ({"stop": ["ok", "x" * 257]}, r"stop\[1\]: .*at most 256 characters"),
        ({"bad_words": ["x" * 257]}, r"bad_words\[0\]: .*at most 256 characters"),
        ({"allowed_token_ids": [1, True]}, "allowed_token_ids: must be a list of integers, without"),
        ({"logit_bias": 5}, "logit_bias: must be an object of biases by token id, as JSON if it is text, got 5"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: .*greater than or equal to 0"),
        ({"seed": -1}, "seed: .*greater than or equal to 0"),
        ({"seed": 2**64}, "seed: .*less than"),
        ({"n": 0}, "n: .*greater than or equal to 1, got 0"),
        ({"n": 17}, "n: .*less than or equal to 16, got 17"),
        ({"n": True}, "n: must be a number"),
        ({"best_of": 2}, "best_of: only 1"),
        ({"use_beam_search": True}, "use_beam_search: only false"),
        ({"logprobs": 21}, "logprobs: .*less than or equal to 20"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode: .*'raw' or 'processed'"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: .*less than or equal to 20"),
        ({"logit_bias": {"5": 101}}, r"logit_bias\[5\]: .*less than or equal to 100"),
        ({"logit_bias": {"five": 1}}, r"logit_bias\[five\]: .*integer"),
        ({"logit_bias": "5"}, "logit_bias: .*got '5'"),
        ({"bad_words": [""]}, r"bad_words\[0\]: .*got ''"),
        ({"allowed_token_ids": []}, "allowed_token_ids: .*at least 1"),
        ({"max_tokens": 0}, "max_tokens: .*greater than or equal to 1, got 0"),
        ({"max_tokens": "many"}, "max_tokens: .*integer.*, got 'many'"),
        ({"max_tokens": 2.5}, "max_tokens: .*integer.*, got 2.5"),
        ({"max_tokens": True}, "max_tokens: must be a number"),
        ({"min_tokens": -1}, "min_tokens: .*got -1"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens: must be at most max_tokens \(4\), got 5"),
        ({"stop": ["a", ""]}, r"stop\[1\]: .*got ''"),
        ({"stop": ["a"] * 17}, "stop: .*16"),
        ({"stop": 5}, "stop: .*got 5"),
        ({"stop_token_ids": [1, -2]}, r"stop_token_ids\[1\]: .*got -2"),
        ({"stop_token_ids": "x"}, "stop_token_ids: must be a list of integers.*got 'x'"),
        ({"drafter": 3}, "drafter: .*got 3"),
        ({"num_draft_tokens": -1}, "num_draft_tokens: .*got -1"),
        ({"ignore_eos": "perhaps"}, "ignore_eos: .*got 'perhaps'"),
        ({"max_tokens": 0, "top_p": 5}, "max_tokens: .*; top_p: "),
    ],
)
def test_a_wrong_value_is_refused_by_name(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        params(sampling=sampling)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of text_input, messages, input_ids must be sent, got none"),
        ({"text_input": "x", "input_ids": [1]}, "got text_input and input_ids"),
        ({"text_input": b"\xff\xfe"}, "text_input: must be UTF-8"),
        ({"text_input": ["a", "b"]}, "text_input: must have exactly one element, got 2"),
        ({"text_input": "x", "tools": "[]"}, "tools: only allowed with messages"),
        ({"text_input": "x", "enable_thinking": True}, "enable_thinking: only allowed with messages"),
        ({"messages": "hi"}, "messages: not valid JSON"),
        ({"messages": '{"role": "user"}'}, "messages: must be a JSON list of objects"),
        ({"messages": '["hi"]'}, "messages: must be a JSON list of objects"),
        ({"messages": '[{"content": "\\ud800"}]'}, "messages: holds a lone surrogate"),
        ({"messages": "[" * 100_000}, "messages: is nested too deeply"),
        ({"messages": "[]", "chat_template_kwargs": "[]"}, "chat_template_kwargs: must be a JSON object, got list"),
        ({"text_input": "x", "sampling_parameters": '{"max_tokens": 5'}, "sampling_parameters: not valid JSON"),
        ({"text_input": "x", "sampling_parameters": "5"}, "sampling_parameters: must be a JSON object, got int"),
        ({"text_input": "x", "max_tokens": 0}, "max_tokens: .*got 0"),
        ({"text_input": "x", "stop_words": ["a", ""]}, r"stop_words\[1\]"),
        ({"text_input": "x", "guided_decoding_guide": "{}"}, "guided_decoding_guide_type: must be one of json"),
        (
            {"text_input": "x", "stream": True, "exclude_input_in_output": False},
            "exclude_input_in_output: must be true",
        ),
    ],
)
def test_a_wrong_input_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(**values)


def test_unknown_parameters_are_reported_or_with_strict_refused() -> None:
    parsed = parse(text_input="x", parameters='{"sequence_id": 5, "triton_enable_empty_final_response": true}')
    assert parsed.ignored == ("sequence_id",)
    for strict in (True, "true"):
        with pytest.raises(InvalidRequestError, match="strict: unknown sampling parameters: temprature, topp"):
            params(sampling={"temprature": 0, "topp": 1, "max_tokens": 3, "strict": strict})
    assert params(sampling={"max_tokens": 3, "strict": True}).max_tokens == 3


def test_echo_is_off_when_excluded_or_streamed() -> None:
    assert parse(text_input="x", exclude_input_in_output=True).options.echo == ""
    assert parse(text_input="x", stream=True).options.echo == ""
    assert parse(text_input="x", stream=True, exclude_input_in_output=True).options.stream


texts = st.text(alphabet="a1-é😀\x00\ud800", max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(
    [
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "seed",
        "drafter",
        "draft",
        "response_format",
        "structured_outputs",
        "guided_choice",
        "guided_decoding_guide_type",
        "tool_choice",
        "reasoning_effort",
        "max_reasoning_tokens",
        "strict",
        "other",
    ]
)


@given(st.dictionaries(names, json_values))
def test_any_json_gives_parameters_or_a_clear_error(sampling: dict[str, Any]) -> None:
    message = ""
    try:
        result = params(sampling=sampling)
        assert result.max_tokens is None or result.min_tokens <= result.max_tokens
        assert all(result.stop)
    except InvalidRequestError as error:
        message = str(error)
    assert not message or re.match(r"\w+", message)[0] in {*sampling, "sampling_parameters"}


def test_a_turn_may_bring_the_whole_conversation() -> None:
    plain, whole = parse(text_input="x"), parse(text_input="x", parameters='{"whole_conversation": true}')
    assert plain.request is not None
    assert whole.request is not None
    assert (plain.request.whole_conversation, whole.request.whole_conversation) == (False, True)
    assert whole.ignored == ()


def test_a_cache_salt_separates_tenants() -> None:
    plain, salted = parse(text_input="x"), parse(text_input="x", parameters='{"cache_salt": "tenant 1"}')
    assert plain.request is not None
    assert salted.request is not None
    assert (plain.request.cache_salt, salted.request.cache_salt) == ("", "tenant 1")
    assert salted.ignored == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"whole_conversation": "maybe"}, "whole_conversation: .* boolean, .*got 'maybe'"),
        ({"cache_salt": 5}, "cache_salt: .* string, got 5"),
        ({"cache_salt": "x" * 257}, "cache_salt: .* at most 256 characters"),
        ({"admin": "drop_all"}, "admin: .* 'drop_all'"),
    ],
)
def test_wrong_own_fields_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(text_input="x", sampling_parameters=json.dumps(values))


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop_token_ids": [-1] * 200_000},
        {"logit_bias": {f"x{n}": "y" for n in range(100_000)}},
        {"allowed_token_ids": [0] * ((1 << 20) + 1)},
        {"bad_words": [""] * 250},
        {"strict": True, **{f"name{n}": 1 for n in range(10_000)}},
        {"max_tokens": 8, "min_tokens": 10**4000},
    ],
    ids=["token ids", "biases", "too many ids", "bad words", "unknown names", "a long number"],
)
def test_an_error_stays_short_however_much_is_wrong(sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params(sampling=sampling)
    assert len(caught.value.wire()) < 5000
