# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of decoding: names, types, ranges and neutral values, as one table for pydantic."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic.functional_validators import AfterValidator
from pydantic_core import PydanticCustomError

from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import SamplingParams

MAX_STOP_STRINGS = 16
NO_DRAFTER = "none"


def _no_bool(value: Any) -> Any:
    """Python counts True as 1; a client that sends it for a number made a mistake."""
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "must be a number")
    return value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _list_from_text(value: Any) -> Any:
    """Flat request parameters can't hold lists, so a list may come as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("not_json", "must be a list of integers, as JSON if it is text") from error


def _only(*allowed: float | bool) -> AfterValidator:
    """Accept the values that change nothing. A client that sends its defaults is served, one that means it is told."""

    def check(value: Any) -> Any:
        if value not in allowed:
            text = " or ".join(str(item).lower() if isinstance(item, bool) else f"{item:g}" for item in allowed)
            raise PydanticCustomError("unsupported", "only {allowed} is supported at present", {"allowed": text})
        return value

    return AfterValidator(check)


def _greedy(value: float, info: ValidationInfo) -> float:
    """Any temperature is greedy under top_k 1, which is validated before."""
    if value != 0 and info.data.get("top_k") != 1:
        raise PydanticCustomError("unsupported", "only 0 (greedy decoding) is supported")
    return value


def _absent(value: Any) -> Any:
    raise PydanticCustomError("unsupported", "is not supported at present, leave it out")


Integer = Annotated[int, BeforeValidator(_no_bool)]
Number = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
StopStrings = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_many), Field(max_length=MAX_STOP_STRINGS)
]
TokenIds = Annotated[tuple[Annotated[Integer, Field(ge=0)], ...], BeforeValidator(_list_from_text)]
Unsupported = Annotated[Any, BeforeValidator(_absent)]


class SamplingFields(BaseModel):
    """Names follow vLLM's SamplingParams; numbers and bools may be text, since many clients send text only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    min_tokens: Annotated[Integer, Field(ge=0)] = 0
    stop: StopStrings = ()
    stop_words: StopStrings | None = None  # TensorRT-LLM's name, wins over stop
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    drafter: Annotated[str, Field(min_length=1)] | None = None
    draft: bool | None = None  # false is short for drafter "none"
    num_draft_tokens: Annotated[Integer, Field(ge=0)] | None = None
    seed: Integer | None = None  # greedy decoding draws nothing, so any seed is right

    top_k: Annotated[Integer, _only(0, -1, 1)] = 0
    temperature: Annotated[Number, AfterValidator(_greedy)] = 0.0
    top_p: Annotated[Number, _only(1)] = 1.0
    min_p: Annotated[Number, _only(0)] = 0.0
    presence_penalty: Annotated[Number, _only(0)] = 0.0
    frequency_penalty: Annotated[Number, _only(0)] = 0.0
    repetition_penalty: Annotated[Number, _only(1)] = 1.0
    length_penalty: Annotated[Number, _only(1)] = 1.0
    n: Annotated[Integer, _only(1)] = 1
    best_of: Annotated[Integer, _only(1)] = 1
    beam_width: Annotated[Integer, _only(1)] = 1
    use_beam_search: Annotated[bool, _only(False)] = False
    logprobs: Annotated[Integer, _only(0, 1)] = 0  # the chosen tokens' come with return_logprobs
    skip_special_tokens: Annotated[bool, _only(True)] = True
    prompt_logprobs: Unsupported = None
    logit_bias: Unsupported = None
    bad_words: Unsupported = None
    allowed_token_ids: Unsupported = None
    guided_decoding: Unsupported = None
    guided_decoding_guide: Unsupported = None
    guided_decoding_guide_type: Unsupported = None
    structured_outputs: Unsupported = None
    response_format: Unsupported = None

    @model_validator(mode="after")
    def _min_within_max(self) -> "SamplingFields":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens: must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _draft_agrees_with_drafter(self) -> "SamplingFields":
        if None not in (self.draft, self.drafter) and self.draft == (self.drafter == NO_DRAFTER):
            switch = "on" if self.draft else "off"
            raise InvalidRequestError(f"draft: is {switch}, but drafter is {self.drafter!r}; send one of the two")
        return self


def unknown_names(values: Mapping[str, Any]) -> list[str]:
    return [name for name in values if name not in SamplingFields.model_fields]


def parse_sampling(values: Mapping[str, Any]) -> SamplingParams:
    """Check `values` (known names only; None means absent) and build the engine's parameters.

    Raises InvalidRequestError naming each wrong field, what is allowed and what was sent.
    """
    try:
        fields = SamplingFields.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise InvalidRequestError("; ".join(_explain(item) for item in error.errors())) from error
    return SamplingParams(
        max_tokens=fields.max_tokens,
        min_tokens=fields.min_tokens,
        stop=fields.stop if fields.stop_words is None else fields.stop_words,
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=fields.ignore_eos,
        include_stop=fields.include_stop_str_in_output,
        drafter=NO_DRAFTER if fields.draft is False else fields.drafter,
        num_draft_tokens=fields.num_draft_tokens,
    )


def _explain(item: Any) -> str:
    name, *rest = item["loc"]
    where = name + "".join(f"[{part}]" for part in rest if isinstance(part, int))
    return f"{where}: {item['msg']}, got {repr(item['input'])[:100]}"
