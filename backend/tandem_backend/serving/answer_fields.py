# SPDX-License-Identifier: Apache-2.0
"""What a request asks of its answer's form: grammar, tools, reasoning, by vLLM's, OpenAI's and TensorRT-LLM's names."""

import json
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem_backend.errors import InvalidRequestError
from tandem_backend.serving.sampling import Integer, validated
from tandem_backend.types import Grammar, GrammarKind, Prompt, SamplingParams, ToolChoice, ToolMode

KINDS = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.GRAMMAR,
}
# Of structured_outputs; what stands for None changes nothing and is let pass.
SWITCHES = ("json_object", "whitespace_pattern", "disable_any_whitespace")
NEUTRAL = {"disable_fallback": (True, False), "disable_additional_properties": (False,)}
GUIDE_TYPES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar", "choice": "choice"}
EFFORTS: Mapping[str, int | None] = {"none": 0, "minimal": 64, "low": 256, "medium": 1024, "high": None}
MIN_STALL, MAX_STALL = 8, 1024


class ReasoningFormat(StrEnum):
    """Where a reasoning block goes: into the text as it is written, into an output of its own, or both."""

    TAGS = "tags"
    FIELD = "field"
    BOTH = "both"


class AnswerFields(BaseModel):
    """Objects and lists may be JSON text, since many clients send text only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    response_format: Any = None  # OpenAI
    structured_outputs: Any = None  # vLLM
    guided_decoding: Any = None  # vLLM, earlier
    guided_json: Any = None  # vLLM, earlier still
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_guide_type: Any = None  # TensorRT-LLM
    guided_decoding_guide: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_format: ReasoningFormat = ReasoningFormat.TAGS
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    max_reasoning_tokens: Annotated[Integer, Field(ge=0)] | None = None
    reasoning_stall_tokens: Annotated[Integer, Field(ge=MIN_STALL, le=MAX_STALL)] | None = None

    def apply(self, params: SamplingParams, prompt: Prompt) -> tuple[SamplingParams, Prompt]:
        """The parameters and the prompt with what the fields ask for. Raises InvalidRequestError naming the field."""
        choice, tools = read_tool_choice(self.tool_choice, prompt, parallel=self.parallel_tool_calls)
        kwargs, budget = dict(prompt.template_kwargs), self.max_reasoning_tokens
        if self.reasoning_effort is not None:
            budget = EFFORTS[self.reasoning_effort] if budget is None else budget
            if prompt.messages is not None:
                kwargs.setdefault("enable_thinking", self.reasoning_effort != "none")
                kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        params = replace(
            params,
            grammar=read_grammar(self),
            tool_choice=choice,
            max_reasoning_tokens=budget,
            reasoning_stall_tokens=self.reasoning_stall_tokens,
        )
        return params, replace(prompt, tools=tools, template_kwargs=kwargs)


def take_answer_fields(values: dict[str, Any]) -> AnswerFields:
    """Take the fields out of `values`. Raises InvalidRequestError naming the field."""
    return validated(AnswerFields, {name: values.pop(name) for name in AnswerFields.model_fields if name in values})


def read_grammar(fields: AnswerFields) -> Grammar | None:
    """The one grammar that the fields ask for. Raises InvalidRequestError where they are wrong or ask for two."""
    found = [
        _from_response_format(fields.response_format),
        _from_object("structured_outputs", fields.structured_outputs),
        _from_object("guided_decoding", fields.guided_decoding),
        _from_guide(fields.guided_decoding_guide_type, fields.guided_decoding_guide),
        *(_of_kind(f"guided_{kind}", kind, getattr(fields, f"guided_{kind}")) for kind in KINDS),
    ]
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise InvalidRequestError(f"{grammars[1].field}: an answer has one form, and {grammars[0].field} asks for one")
    return grammars[0] if grammars else None


def _from_response_format(value: Any) -> Grammar | None:
    if value is None:
        return None
    form = _object("response_format", value)
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _of_kind("response_format", "json", {"type": "object"})
    if kind != "json_schema":
        raise InvalidRequestError(f"response_format: type must be text, json_object or json_schema, got {kind!r}")
    inner = form.get("json_schema")
    if not isinstance(inner, dict) or inner.get("schema") is None:
        raise InvalidRequestError("response_format: json_schema must be an object with the schema as `schema`")
    return _of_kind("response_format", "json", inner["schema"])


def _from_object(field: str, value: Any) -> Grammar | None:
    if value is None:
        return None
    form = {key: item for key, item in _object(field, value).items() if item is not None}
    for key, item in form.items():
        if key not in (*KINDS, *SWITCHES) and item not in NEUTRAL.get(key, ()):
            raise InvalidRequestError(
                f"{field}: {key!r} is not supported; allowed are {', '.join([*KINDS, *SWITCHES])}"
            )
    if form.get("json_object") is True:
        form.setdefault("json", {"type": "object"})
    kinds = [kind for kind in KINDS if kind in form]
    if len(kinds) != 1:
        raise InvalidRequestError(f"{field}: exactly one of {', '.join(KINDS)} or json_object, got {len(kinds)}")
    pattern = "" if form.get("disable_any_whitespace") is True else form.get("whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise InvalidRequestError(f"{field}: whitespace_pattern must be a regular expression, got {pattern!r}")
    return _of_kind(field, kinds[0], form[kinds[0]], pattern)


def _from_guide(kind: Any, guide: Any) -> Grammar | None:
    if kind is None and guide is None:
        return None
    if kind == "json":
        return _of_kind("guided_decoding_guide_type", "json", {"type": "object"})
    if not isinstance(kind, str) or kind not in GUIDE_TYPES:
        allowed = ", ".join(["json", *GUIDE_TYPES])
        raise InvalidRequestError(f"guided_decoding_guide_type: must be one of {allowed}, got {kind!r}")
    if guide is None:
        raise InvalidRequestError(f"guided_decoding_guide: is needed with guided_decoding_guide_type {kind!r}")
    return _of_kind("guided_decoding_guide", GUIDE_TYPES[kind], guide)


def _of_kind(field: str, kind: str, value: Any, whitespace_pattern: str | None = None) -> Grammar | None:
    if value is None:
        return None
    if kind == "json":
        schema = _json(field, value) if isinstance(value, str) else value
        try:
            source = json.dumps(schema, ensure_ascii=False)
        except RecursionError as error:
            raise InvalidRequestError(f"{field}: is nested too deeply") from error
    elif kind == "choice":
        choices = _json(field, value) if isinstance(value, str) else value
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise InvalidRequestError(f"{field}: choice must be a list of texts, none empty, got {str(value)[:100]}")
        source = json.dumps(choices, ensure_ascii=False)
    elif not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{field}: {kind} must be text and not empty, got {str(value)[:100]!r}")
    else:
        source = value
    return Grammar(kind=KINDS[kind], source=source, field=field, whitespace_pattern=whitespace_pattern)


def read_tool_choice(
    value: Any, prompt: Prompt, *, parallel: bool
) -> tuple[ToolChoice | None, tuple[Mapping[str, Any], ...] | None]:
    """The choice, and the tools that the template shall show: none where the answer may call none."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _json("tool_choice", value)
    if value in (None, "auto"):
        return (ToolChoice(parallel=parallel) if prompt.tools else None), prompt.tools
    if value == "none":
        return None, None
    if not prompt.tools:
        raise InvalidRequestError("tool_choice: needs messages and tools, got none")
    if value == "required":
        return ToolChoice(mode=ToolMode.REQUIRED, parallel=parallel), prompt.tools
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            'tool_choice: must be none, auto, required or {"type": "function", "function": {"name": ...}}, '
            f"got {str(value)[:100]!r}"
        )
    return ToolChoice(mode=ToolMode.NAMED, name=name, parallel=parallel), prompt.tools


def _json(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field}: not valid JSON: {error}") from error


def _object(field: str, value: Any) -> dict[str, Any]:
    form = _json(field, value) if isinstance(value, str) else value
    if not isinstance(form, dict):
        raise InvalidRequestError(f"{field}: must be a JSON object, got {str(value)[:100]}")
    return form
