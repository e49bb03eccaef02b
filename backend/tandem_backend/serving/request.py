# SPDX-License-Identifier: Apache-2.0
"""Triton's request to ours. Pure: it reads tensors, parameters, correlation id and flags, and touches nothing else."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tandem_backend.errors import InvalidRequestError
from tandem_backend.serving.answer_fields import AnswerFields, ReasoningFormat, take_answer_fields
from tandem_backend.serving.own_fields import AdminCall, OwnFields, take_own
from tandem_backend.serving.sampling import parse_sampling, unknown_names
from tandem_backend.serving.urgency import Urgency, take_urgency
from tandem_backend.types import Prompt, Request, SequenceId

FLAG_SEQUENCE_START = 1
FLAG_SEQUENCE_END = 2

PROMPT_INPUTS = ("text_input", "messages", "input_ids")
TEMPLATE_INPUTS = ("tools", "enable_thinking", "chat_template_kwargs")
# Tensors that are sampling parameters under the same name; a tensor wins over the parameter.
SAMPLING_INPUTS = ("max_tokens", "stop_words", "seed", "guided_decoding_guide_type", "guided_decoding_guide")
OTHER_FIELDS = {*Urgency.model_fields, *AnswerFields.model_fields, *OwnFields.model_fields}
# The protocol's own parameters; not the model's, so never "unknown".
ERROR_PARAMETER = "tandem_error_as_output"  # set by tandem_generate
TRANSPORT_PARAMETERS = ("binary_data_output", "headers", ERROR_PARAMETER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """How a request wants its answer. `echo` is the prompt text that goes before the first output."""

    stream: bool = False
    echo: str = ""
    reasoning_format: ReasoningFormat = ReasoningFormat.TAGS
    return_finish_reason: bool = False
    return_cumulative_logprob: bool = False
    return_logprobs: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_token_ids: bool = False
    return_perf_metrics: bool = False
    return_receipt: bool = False
    logprobs_bytes: bool = False  # logprobs say what each token stands for
    return_draft_trees: bool = False
    relaxed_acceptance: bool = False  # marks every response: the text may differ from plain decoding's


RETURN_INPUTS = tuple(item.name for item in fields(ResponseOptions) if item.name.startswith("return_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A generation to run, or with `request` None an admin's call or a sequence to close.

    `ignored` are the unknown parameters.
    """

    request: Request | None
    sequence_id: SequenceId | None
    options: ResponseOptions = field(default_factory=ResponseOptions)
    ignored: tuple[str, ...] = ()
    admin: AdminCall | None = None


def parse_request(request: Any, request_id: str) -> Parsed:
    """Read a Triton request of the `tandem` model. `request_id` is ours and unique; the client's may repeat.

    Raises InvalidRequestError naming the field and what is allowed.
    """
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    sequence_id = request.correlation_id() or None
    if _read(inputs, "stop", _bool, False):
        if sequence_id is None:
            raise InvalidRequestError("stop: closes a sequence, so it needs a sequence_id; none was sent")
        says_reason = _read(inputs, "return_finish_reason", _bool, False)
        return Parsed(request=None, sequence_id=sequence_id, options=ResponseOptions(return_finish_reason=says_reason))
    values, ignored = _collect_sampling(inputs, read_parameters(request))
    own, admin = take_own(values)
    if admin is not None:
        return Parsed(request=None, sequence_id=None, admin=admin)
    prompt = _parse_prompt(inputs)
    urgency = take_urgency(values, request.timeout())
    form = take_answer_fields(values)
    params, prompt = form.apply(parse_sampling(values), prompt)
    flags = request.flags() if sequence_id is not None else 0
    relaxed = params.relax_tau is not None
    options = _parse_options(
        inputs,
        prompt,
        reasoning_format=form.reasoning_format,
        relaxed_acceptance=relaxed,
        logprobs_bytes=own.logprobs_bytes,
    )
    parsed = Request(
        request_id=request_id,
        prompt=prompt,
        params=params,
        sequence_id=sequence_id,
        sequence_start=bool(flags & FLAG_SEQUENCE_START),
        sequence_end=bool(flags & FLAG_SEQUENCE_END),
        priority=urgency.priority,
        timeout_ms=urgency.timeout_ms,
        cache_salt=own.cache_salt,
        whole_conversation=own.whole_conversation,
        return_receipt=options.return_receipt,
        return_draft_trees=options.return_draft_trees,
    )
    return Parsed(request=parsed, sequence_id=sequence_id, options=options, ignored=tuple(ignored))


def read_parameters(request: Any) -> str:
    """A request's parameters as JSON text. Raises InvalidRequestError where they are no text."""
    try:
        parameters: str = request.parameters()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"request parameters: must be UTF-8, but {error.reason}") from error
    return parameters


def wants_error_output(request: Any) -> bool:
    """Whether errors shall come as an output: what `tandem_generate` asks for (see response.ERROR_OUTPUT)."""
    try:
        return ERROR_PARAMETER in json.loads(request.parameters() or "{}")
    except ValueError:  # not UTF-8: refused for it, and not by us
        return False


def ended_sequence(request: Any) -> SequenceId | None:
    """The sequence that this request ends, for when it is refused: Triton server takes END as given all the same."""
    return request.correlation_id() or None if request.flags() & FLAG_SEQUENCE_END else None


def _parse_prompt(inputs: Mapping[str, Any]) -> Prompt:
    given = [name for name in PROMPT_INPUTS if name in inputs]
    if len(given) != 1:
        raise InvalidRequestError(
            f"exactly one of {', '.join(PROMPT_INPUTS)} must be sent, got {' and '.join(given) or 'none'}"
        )
    misplaced = [name for name in TEMPLATE_INPUTS if name in inputs]
    if misplaced and given != ["messages"]:
        raise InvalidRequestError(f"{misplaced[0]}: only allowed with messages, got {given[0]}")
    template_kwargs = dict(_read(inputs, "chat_template_kwargs", _json_object, {}))
    if "enable_thinking" in inputs:
        template_kwargs["enable_thinking"] = _read(inputs, "enable_thinking", _bool, False)
    return Prompt(
        text=_read(inputs, "text_input", _text, None),
        messages=_read(inputs, "messages", _json_objects, None),
        token_ids=_read(inputs, "input_ids", _integers, None),
        tools=_read(inputs, "tools", _json_objects, None),
        template_kwargs=template_kwargs,
    )


def _parse_options(
    inputs: Mapping[str, Any],
    prompt: Prompt,
    *,
    reasoning_format: ReasoningFormat,
    relaxed_acceptance: bool,
    logprobs_bytes: bool,
) -> ResponseOptions:
    stream = _read(inputs, "stream", _bool, False)
    exclude_input = _read(inputs, "exclude_input_in_output", _bool, stream)
    if stream and not exclude_input:
        raise InvalidRequestError("exclude_input_in_output: must be true or absent when stream is true, got false")
    return ResponseOptions(
        stream=stream,
        echo="" if exclude_input else prompt.text or "",
        relaxed_acceptance=relaxed_acceptance,
        logprobs_bytes=logprobs_bytes,
        reasoning_format=reasoning_format,
        **{name: _read(inputs, name, _bool, False) for name in RETURN_INPUTS},
    )


def _collect_sampling(inputs: Mapping[str, Any], parameters: str) -> tuple[dict[str, Any], list[str]]:
    """Merge the three places a sampling value may stand in: request parameters < sampling_parameters < tensors."""
    values: dict[str, Any] = {
        name: value
        for name, value in _json_object("request parameters", parameters or "{}").items()
        if name not in TRANSPORT_PARAMETERS and not name.startswith("triton_")
    }
    values.update(_read(inputs, "sampling_parameters", _json_object, {}))
    strict = values.pop("strict", False) in (True, "true", "True", 1, "1")
    ignored = [name for name in unknown_names(values) if name not in OTHER_FIELDS]
    if strict and ignored:
        raise InvalidRequestError(f"strict: unknown sampling parameters: {', '.join(ignored)}")
    for name in ignored:
        del values[name]
    readers: dict[str, Callable[[str, Any], Any]] = {"max_tokens": _integer, "seed": _integer, "stop_words": _texts}
    for name in SAMPLING_INPUTS:
        if name in inputs:
            values[name] = _read(inputs, name, readers.get(name, _text), None)
    return values, ignored


def _read(inputs: Mapping[str, Any], name: str, reader: Callable[[str, Any], Any], default: Any) -> Any:
    return reader(name, inputs[name]) if name in inputs else default


def _scalar(name: str, array: Any) -> Any:
    if array.size != 1:
        raise InvalidRequestError(f"{name}: must have exactly one element, got {array.size}")
    return array.reshape(-1)[0]


def _bool(name: str, array: Any) -> bool:
    return bool(_scalar(name, array))


def _integer(name: str, array: Any) -> int:
    return int(_scalar(name, array))


def _integers(name: str, array: Any) -> tuple[int, ...]:
    return tuple(array.reshape(-1).tolist())


def _text(name: str, array: Any) -> str:
    return _decode(name, _scalar(name, array))


def _texts(name: str, array: Any) -> tuple[str, ...]:
    return tuple(_decode(name, item) for item in array.reshape(-1))


def _decode(name: str, value: bytes | str) -> str:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name}: must be UTF-8, but {error.reason} at byte {error.start}") from error


def _json(name: str, source: Any) -> Any:
    text = source if isinstance(source, str) else _text(name, source)
    try:
        value = json.loads(text)
        # A lone surrogate is valid JSON but no text: the tokenizer would fail on it far from here.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name}: holds a lone surrogate, which is no character") from error
    except RecursionError as error:
        raise InvalidRequestError(f"{name}: is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequestError(f"{name}: not valid JSON: {error}") from error
    return value


def _json_object(name: str, source: Any) -> dict[str, Any]:
    value = _json(name, source)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name}: must be a JSON object, got {type(value).__name__}")
    return value


def _json_objects(name: str, source: Any) -> tuple[dict[str, Any], ...]:
    value = _json(name, source)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidRequestError(f"{name}: must be a JSON list of objects, got {str(value)[:100]}")
    return tuple(value)
