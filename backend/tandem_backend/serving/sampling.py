# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of decoding: names, types, ranges and neutral values, as one table for pydantic."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import AfterValidator
from pydantic_core import PydanticCustomError

from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import SamplingParams

MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 256
MAX_WORD_CHARACTERS = 256  # of a bad word or a stop string: others wait while a request is read
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_TOKEN_IDS = 1 << 20  # more than any vocabulary has
LEAST_SHARE = 1e-6  # far below any token's, and far above where float32 ends
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.001, 100.0
MAX_EXPLAINED = 8  # wrong values that an error names
NO_DRAFTER = "none"

Fields = TypeVar("Fields", bound=BaseModel)


def _no_bool(value: Any) -> Any:
    """Python counts True as 1; a client that sends it for a number made a mistake."""
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "must be a number")
    return value


def _no_bools(values: Any) -> Any:
    """All at once: a call for each of a vocabulary's ids would hold up every stream for a second."""
    if bool in set(map(type, values)):
        raise PydanticCustomError("not_numbers", "must be a list of integers, without true and false")
    return values


def _one_or_many(value: Any) -> Any:
    if not isinstance(value, str | list | tuple):
        raise PydanticCustomError("not_texts", "must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _from_text(allowed: str, kinds: tuple[type, ...]) -> BeforeValidator:
    """Flat request parameters can't hold lists and objects, so these may come as JSON text."""

    def read(value: Any) -> Any:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, kinds):
            raise PydanticCustomError("not_json", "must be {allowed}, as JSON if it is text", {"allowed": allowed})
        return found

    return BeforeValidator(read)


def _at_most(count: int) -> BeforeValidator:
    """Look at the number first: explaining each of 100,000 wrong items would hold up every stream for seconds."""

    def check(value: Any) -> Any:
        if isinstance(value, list | tuple | dict) and len(value) > count:
            raise PydanticCustomError("too_many", "must have at most {count} items", {"count": count})
        return value

    return BeforeValidator(check)


def _only(*allowed: float | bool) -> AfterValidator:
    """Accept the values that change nothing. A client that sends its defaults is served, one that means it is told."""

    def check(value: Any) -> Any:
        if value not in allowed:
            text = " or ".join(str(item).lower() if isinstance(item, bool) else f"{item:g}" for item in allowed)
            raise PydanticCustomError("unsupported", "only {allowed} is supported at present", {"allowed": text})
        return value

    return AfterValidator(check)


def _temperature(value: float) -> float:
    if value != 0 and not LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
        raise PydanticCustomError(
            "range",
            "must be 0 (greedy) or {least} to {most}",
            {"least": f"{LEAST_TEMPERATURE:g}", "most": f"{MOST_TEMPERATURE:g}"},
        )
    return value


Integer = Annotated[int, BeforeValidator(_no_bool)]
Number = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARACTERS)]
StopStrings = Annotated[tuple[Word, ...], _at_most(MAX_STOP_STRINGS), BeforeValidator(_one_or_many)]
TokenIds = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    Field(fail_fast=True),
    BeforeValidator(_no_bools),
    _at_most(MAX_TOKEN_IDS),
    _from_text("a list of integers", (list, tuple)),
]
Biases = Annotated[
    dict[Annotated[int, Field(ge=0)], Annotated[Number, Field(ge=-100, le=100)]],
    _at_most(MAX_BIASES),
    _from_text("an object of biases by token id", (dict,)),
]
BadWords = Annotated[tuple[Word, ...], _at_most(MAX_BAD_WORDS), BeforeValidator(_one_or_many)]
Share = Annotated[Number, Field(ge=LEAST_SHARE, le=1)]


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
    seed: Annotated[Integer, Field(ge=0, lt=2**64)] | None = None  # greedy decoding draws nothing, so any is right

    temperature: Annotated[Number, AfterValidator(_temperature)] = 0.0
    top_k: Annotated[Integer, Field(ge=-1, lt=2**31)] = 0  # 0 and -1: all
    top_p: Share = 1.0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    typical_p: Share = 1.0
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] = 1.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    no_repeat_ngram_size: Annotated[Integer, Field(ge=0, le=64)] = 0
    logit_bias: Biases = Field(default_factory=dict)
    bad_words: BadWords = ()
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] = 0  # the likeliest tokens beside the chosen one
    logprobs_mode: Literal["raw", "processed"] = "raw"
    prompt_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    acceptance: Literal["exact", "rejection"] = "exact"
    relax_tau: Share | None = None
    relax_rank: Annotated[Integer, Field(ge=1, le=100)] = 5
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1

    length_penalty: Annotated[Number, _only(1)] = 1.0
    best_of: Annotated[Integer, _only(1)] = 1
    beam_width: Annotated[Integer, _only(1)] = 1
    use_beam_search: Annotated[bool, _only(False)] = False
    skip_special_tokens: Annotated[bool, _only(True)] = True

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
    """Check `values` (known names only) and build the engine's parameters. Raises as `validated` does."""
    fields = validated(SamplingFields, values)
    return SamplingParams(
        max_tokens=fields.max_tokens,
        min_tokens=fields.min_tokens,
        stop=fields.stop if fields.stop_words is None else fields.stop_words,
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=fields.ignore_eos,
        include_stop=fields.include_stop_str_in_output,
        drafter=NO_DRAFTER if fields.draft is False else fields.drafter,
        num_draft_tokens=fields.num_draft_tokens,
        temperature=0.0 if fields.top_k == 1 else fields.temperature,  # one token left is the largest logit
        top_k=max(fields.top_k, 0),
        top_p=fields.top_p,
        min_p=fields.min_p,
        typical_p=fields.typical_p,
        seed=fields.seed,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        no_repeat_ngram_size=fields.no_repeat_ngram_size,
        logit_bias=tuple(sorted(fields.logit_bias.items())),
        bad_words=fields.bad_words,
        allowed_token_ids=fields.allowed_token_ids,
        num_logprobs=fields.logprobs,
        logprobs_mode=fields.logprobs_mode,
        prompt_logprobs=fields.prompt_logprobs,
        acceptance=fields.acceptance,
        relax_tau=fields.relax_tau,
        relax_rank=fields.relax_rank,
        num_choices=fields.n,
    )


def validated(model: type[Fields], values: Mapping[str, Any]) -> Fields:
    """`values` as a `model`; None means absent.

    Raises InvalidRequestError naming each wrong field, what is allowed and what was sent.
    """
    try:
        return model.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
        more = f"; and {len(wrong) - MAX_EXPLAINED} more" if len(wrong) > MAX_EXPLAINED else ""
        raise InvalidRequestError("; ".join(map(_explain, wrong[:MAX_EXPLAINED])) + more) from error


def _explain(item: Any) -> str:
    name, *rest = item["loc"]
    where = name + "".join(f"[{part}]" for part in rest if part != "[key]")
    return f"{where[:200]}: {item['msg']}, got {repr(item['input'])[:100]}"
