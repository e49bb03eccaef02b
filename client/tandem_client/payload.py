# SPDX-License-Identifier: Apache-2.0
"""From the arguments of `generate` to the input tensors of the model. Pure; shared by both clients."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

Tensor = npt.NDArray[Any]

_INT32 = np.iinfo(np.int32)
_RETURNED = (
    "return_token_ids",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_perf_metrics",
)


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `complete`; what is left out, or None, is the server's default.

    messages: chat messages {"role": ..., "content": ...}, instead of a prompt; in a session only the new ones.
    input_ids: prompt token ids, instead of a prompt.
    tools, enable_thinking, chat_template_kwargs: passed to the chat template; they need messages.
    max_tokens: limit of output tokens.
    stop: strings that end the answer. stop_token_ids: tokens that end it.
    temperature: 0, the default, is greedy; top_k, top_p, min_p shape what is drawn from.
    seed: draws the same answer again; one that the server chose is in the last chunk's usage.
    n: answers to the one prompt; answer k is drawn with seed + k. Not in a session.
    response_format: the answer's form, as in the OpenAI API; structured_outputs: the same in vLLM's words.
    tool_choice: "auto", "none", "required" or {"type": "function", "function": {"name": ...}}.
    reasoning_effort, max_reasoning_tokens: how long the answer may reason; reasoning_format: "tags", "field" or "both".
    logprobs: whether chunks carry the tokens' log probabilities; a number: and those of as many likeliest tokens.
    prompt_logprobs: the same for the prompt's tokens, on the first chunk.
    sampling: further sampling parameters by name (repetition_penalty, logit_bias, drafter, ignore_eos ...).
    return_receipt: the answer comes with a receipt, which `tandem audit` checks.
    return_draft_trees: chunks tell who proposed each token, and the draft trees of the rounds.
    timeout_s: seconds until the whole answer must be there; then RequestTimeoutError is raised.
    """

    messages: Sequence[Mapping[str, Any]] | None
    input_ids: Iterable[int] | None
    tools: Sequence[Mapping[str, Any]] | None
    enable_thinking: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    n: int | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    tool_choice: str | Mapping[str, Any] | None
    reasoning_effort: str | None
    max_reasoning_tokens: int | None
    reasoning_format: str | None
    logprobs: bool | int
    prompt_logprobs: int | None
    sampling: Mapping[str, Any] | None
    return_receipt: bool
    return_draft_trees: bool
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Payload:
    """The 1-D input tensors of one request by name, its time limit in seconds, and how many answers it will get."""

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    timeout_s: float | None = None
    num_choices: int = 1


def build_payload(
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    input_ids: Iterable[int] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    n: int | None = None,
    response_format: Mapping[str, Any] | None = None,
    structured_outputs: Mapping[str, Any] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
    max_reasoning_tokens: int | None = None,
    reasoning_format: str | None = None,
    logprobs: bool | int = False,
    prompt_logprobs: int | None = None,
    sampling: Mapping[str, Any] | None = None,
    return_receipt: bool = False,
    return_draft_trees: bool = False,
    timeout_s: float | None = None,
) -> Payload:
    """Build the tensors of a request; the arguments are those of GenerateOptions.

    Raises ValueError or TypeError naming the argument.
    """
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"timeout_s: must be above 0, got {timeout_s}")
    inputs = _prompt_inputs(prompt, messages, input_ids)
    if messages is not None:
        inputs |= _template_inputs(tools, enable_thinking, chat_template_kwargs)
    elif tools is not None or enable_thinking is not None or chat_template_kwargs is not None:
        raise ValueError("tools, enable_thinking and chat_template_kwargs: need messages")
    named = {
        "max_tokens": max_tokens,
        "stop": list(stop) if stop is not None and not isinstance(stop, str) else stop,
        "stop_token_ids": None if stop_token_ids is None else _token_ids("stop_token_ids", stop_token_ids).tolist(),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "n": n,
        "response_format": response_format,
        "structured_outputs": structured_outputs,
        "tool_choice": tool_choice,
        "reasoning_effort": reasoning_effort,
        "max_reasoning_tokens": max_reasoning_tokens,
        "reasoning_format": reasoning_format,
        "logprobs": None if isinstance(logprobs, bool) else logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    parameters = _join_parameters(sampling or {}, {name: value for name, value in named.items() if value is not None})
    if parameters:
        inputs["sampling_parameters"] = json_tensor("sampling", parameters)
    for name in ("stream", *_RETURNED):
        inputs[name] = _flag(True)
    if logprobs is not False:
        inputs["return_logprobs"] = _flag(True)
    if return_receipt:
        inputs["return_receipt"] = _flag(True)
    if return_draft_trees:
        inputs["return_draft_trees"] = _flag(True)
    return Payload(inputs, timeout_s, _num_choices(parameters.get("n")))


def _num_choices(n: object) -> int:
    """What `n`, a number or its text, asks for; one where the server will refuse it."""
    try:
        return max(int(str(n)), 1)
    except ValueError:
        return 1


def stop_payload(timeout_s: float) -> Payload:
    """The request that cancels what runs in a sequence; with the END flag it also drops the sequence's state."""
    return Payload({"stop": _flag(True)}, timeout_s)


def _prompt_inputs(
    prompt: str | None, messages: Sequence[Mapping[str, Any]] | None, input_ids: Iterable[int] | None
) -> dict[str, Tensor]:
    if sum(value is not None for value in (prompt, messages, input_ids)) != 1:
        raise ValueError("give exactly one of prompt, messages and input_ids")
    if prompt is not None:
        return {"text_input": _text("prompt", prompt)}
    if messages is not None:
        return {"messages": json_tensor("messages", list(messages))}
    assert input_ids is not None
    return {"input_ids": _token_ids("input_ids", input_ids)}


def _template_inputs(
    tools: Sequence[Mapping[str, Any]] | None,
    enable_thinking: bool | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    if tools is not None:
        inputs["tools"] = json_tensor("tools", list(tools))
    if enable_thinking is not None:
        inputs["enable_thinking"] = _flag(enable_thinking)
    if chat_template_kwargs is not None:
        inputs["chat_template_kwargs"] = json_tensor("chat_template_kwargs", dict(chat_template_kwargs))
    return inputs


def _join_parameters(sampling: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    for name in named:
        if name in sampling:
            raise ValueError(f"{name}: given both as an argument and in sampling")
    return {**sampling, **named}


def _flag(value: bool) -> Tensor:
    return np.array([value], dtype=np.bool_)


def _text(name: str, value: str) -> Tensor:
    if not isinstance(value, str):
        raise TypeError(f"{name}: must be str, got {type(value).__name__}")
    try:
        return np.array([value.encode("utf-8")], dtype=np.object_)
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: can't be encoded as UTF-8: {error.reason} at {error.start}") from error


def json_tensor(name: str, value: object) -> Tensor:
    """`value` as JSON in a text tensor. Raises ValueError naming the argument."""
    try:
        return _text(name, json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: can't be written as JSON: {error}") from error


def read_json_tensor(tensor: Tensor) -> Any:
    """The value that `json_tensor` wrote."""
    return json.loads(tensor[0])


def _token_ids(name: str, values: Iterable[int]) -> Tensor:
    ids = np.asarray(list(values))
    if ids.size == 0:
        return np.zeros(0, dtype=np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"{name}: must be integers in one dimension")
    if ids.min() < 0 or ids.max() > _INT32.max:
        raise ValueError(f"{name}: must be 0 to {_INT32.max}, got {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)
