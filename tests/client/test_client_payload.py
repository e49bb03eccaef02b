# SPDX-License-Identifier: Apache-2.0
"""From arguments to tensors."""

import json
from typing import Any

import numpy as np
import pytest
from tandem_client.payload import build_payload

MESSAGES = [{"role": "user", "content": "Grüße 🎈"}]


def test_a_prompt_asks_for_a_stream_and_everything_a_chunk_holds() -> None:
    inputs = build_payload("Grüße 🎈").inputs
    assert inputs["text_input"].tolist() == ["Grüße 🎈".encode()]
    flags = {name: tensor.tolist() for name, tensor in inputs.items() if name != "text_input"}
    names = ["stream", "return_token_ids", "return_finish_reason", "return_num_input_tokens", "return_perf_metrics"]
    assert flags == {name: [True] for name in names}
    assert all(inputs[name].dtype == np.bool_ for name in names)


def test_messages_carry_the_template_arguments() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    payload = build_payload(
        messages=MESSAGES, tools=tools, enable_thinking=False, chat_template_kwargs={"date": "today"}, timeout_s=2.5
    )
    assert json.loads(payload.inputs["messages"].item()) == MESSAGES
    assert json.loads(payload.inputs["tools"].item()) == tools
    assert payload.inputs["enable_thinking"].tolist() == [False]
    assert json.loads(payload.inputs["chat_template_kwargs"].item()) == {"date": "today"}
    assert "text_input" not in payload.inputs
    assert payload.timeout_s == 2.5


def test_input_ids_are_int32_in_one_dimension() -> None:
    ids = build_payload(input_ids=np.array([3, 1, 2], dtype=np.int64)).inputs["input_ids"]
    assert (ids.dtype, ids.tolist()) == (np.int32, [3, 1, 2])


def test_sampling_joins_the_named_parameters() -> None:
    payload = build_payload(
        "x", max_tokens=0, stop=("a", "b"), stop_token_ids=[np.int64(5)], sampling={"drafter": "none"}, logprobs=True
    )
    assert json.loads(payload.inputs["sampling_parameters"].item()) == {
        "drafter": "none",
        "max_tokens": 0,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
    }
    assert payload.inputs["return_logprobs"].tolist() == [True]
    assert json.loads(build_payload("x", stop="a").inputs["sampling_parameters"].item()) == {"stop": "a"}


def test_the_form_of_the_answer_goes_with_the_sampling_parameters() -> None:
    form = {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a+"},
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "reasoning_effort": "low",
        "max_reasoning_tokens": 3,
        "reasoning_format": "field",
    }
    assert json.loads(build_payload("x", **form).inputs["sampling_parameters"].item()) == form


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({}, ValueError, "exactly one of prompt"),
        ({"prompt": "x", "input_ids": [1]}, ValueError, "exactly one of prompt"),
        ({"prompt": 5}, TypeError, "prompt"),
        ({"prompt": "\ud800"}, ValueError, "prompt"),
        ({"prompt": "x", "tools": []}, ValueError, "tools"),
        ({"messages": [{"role": object()}]}, ValueError, "messages"),
        ({"input_ids": [1.5]}, TypeError, "input_ids"),
        ({"input_ids": [True]}, TypeError, "input_ids"),
        ({"input_ids": [[1]]}, TypeError, "input_ids"),
        ({"input_ids": [2**31]}, ValueError, "input_ids"),
        ({"input_ids": [-1]}, ValueError, "input_ids"),
        ({"prompt": "x", "stop_token_ids": ["y"]}, TypeError, "stop_token_ids"),
        ({"prompt": "x", "max_tokens": 1, "sampling": {"max_tokens": 2}}, ValueError, "max_tokens"),
        ({"prompt": "x", "sampling": {"temperature": float("nan")}}, ValueError, "sampling"),
        ({"prompt": "x", "timeout_s": 0}, ValueError, "timeout_s"),
        ({"prompt": "x", "max_token": 1}, TypeError, "max_token"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        build_payload(**arguments)


def test_sampling_arguments_stand_in_sampling_parameters() -> None:
    payload = build_payload("x", temperature=0.5, top_k=3, seed=2**64 - 1, logprobs=5, prompt_logprobs=0)
    assert json.loads(payload.inputs["sampling_parameters"].item()) == {
        "temperature": 0.5,
        "top_k": 3,
        "seed": 2**64 - 1,
        "logprobs": 5,
        "prompt_logprobs": 0,
    }
    assert payload.inputs["return_logprobs"].tolist() == [True]
    assert "return_logprobs" not in build_payload("x", logprobs=False).inputs
    assert "sampling_parameters" not in build_payload("x", logprobs=True).inputs
