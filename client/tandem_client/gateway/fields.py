# SPDX-License-Identifier: Apache-2.0
"""The one table of request fields: what each endpoint honours, accepts without effect, or refuses by name.

Validation, the OpenAPI description and the README's table are made from it. Ranges are the backend's to judge.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, WrapValidator, create_model
from pydantic_core import PydanticCustomError

from tandem_client.gateway.errors import ApiError, invalid

CHAT, COMPLETIONS, RESPONSES = "chat", "completions", "responses"
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES)
_C, _P, _R, _CP, _CR, _CPR = (
    (CHAT,),
    (COMPLETIONS,),
    (RESPONSES,),
    (CHAT, COMPLETIONS),
    (CHAT, RESPONSES),
    ENDPOINTS,
)


def _either(allowed: str) -> WrapValidator:
    """Says all that is allowed; pydantic's first complaint about a union is that the value is no text."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("either", "must be {allowed}", {"allowed": allowed}) from None

    return WrapValidator(check)


Flag = Annotated[bool, Strict()]
Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]  # an integer counts as one
Object = dict[str, Any]
Text = str
Texts = list[str]
TokenIds = list[Integer]
Messages = Annotated[list[Object], Field(min_length=1)]
Prompt = Annotated[
    str | Texts | TokenIds | list[TokenIds], _either("text, a list of texts, token ids, or a list of lists of them")
]
OneOrMany = Annotated[str | Texts, _either("text or a list of texts")]
Items = Annotated[str | list[Object], _either("text or a list of objects")]
Choice = Annotated[str | Object, _either("text or an object")]


class Rule(StrEnum):
    """What the gateway does with a field."""

    HONOURED = "honoured"
    NO_EFFECT = "accepted, no effect"  # by what the field means, none of it could show in an answer
    REFUSED = "refused"  # 400, but for null and the values that ask for nothing


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    endpoints: tuple[str, ...]
    rule: Rule
    type: Any
    note: str = ""
    accepts: tuple[Any, ...] = ()  # of a refused field: the values that ask for nothing
    forwarded: bool = False  # goes to the backend's sampling_parameters as it is
    is_extension: bool = False


def _honoured(name: str, endpoints: tuple[str, ...], kind: Any, note: str = "", *, forwarded: bool = False) -> Row:
    return Row(name, endpoints, Rule.HONOURED, kind, note, forwarded=forwarded)


def _sampling(name: str, endpoints: tuple[str, ...], kind: Any, note: str = "") -> Row:
    return _honoured(name, endpoints, kind, note, forwarded=True)


def _no_effect(name: str, endpoints: tuple[str, ...], kind: Any, note: str) -> Row:
    return Row(name, endpoints, Rule.NO_EFFECT, kind, note)


def _refused(name: str, endpoints: tuple[str, ...], note: str, *accepts: Any) -> Row:
    return Row(name, endpoints, Rule.REFUSED, Any, note, accepts)


def _extension(name: str, endpoints: tuple[str, ...], kind: Any, note: str = "", *, forwarded: bool = True) -> Row:
    return Row(name, endpoints, Rule.HONOURED, kind, note, forwarded=forwarded, is_extension=True)


TABLE: tuple[Row, ...] = (
    _honoured("model", _CPR, Text, "a name of `/v1/models`"),
    _honoured("messages", _C, Messages, "text parts only; `developer` is `system`"),
    _honoured("prompt", _P, Prompt, "text, token ids, or up to 16 of either"),
    _honoured("input", _R, Items, "text, messages, function calls and their outputs"),
    _honoured("instructions", _R, Text, "a system message before the input"),
    _honoured("max_tokens", _CP, Integer, "older name of `max_completion_tokens` in chats"),
    _honoured("max_completion_tokens", _C, Integer),
    _honoured("max_output_tokens", _R, Integer),
    _sampling("temperature", _CPR, Number, "0, the default, is greedy"),
    _sampling("top_p", _CPR, Number),
    _sampling("presence_penalty", _CP, Number),
    _sampling("frequency_penalty", _CP, Number),
    _sampling("logit_bias", _CP, dict[str, Number], "by token id"),
    _sampling("seed", _CP, Integer, "draws the same answer again; the answer's `tandem.seed` tells it"),
    _sampling("n", _CP, Integer, "answer k is drawn with `seed` + k"),
    _sampling("stop", _CP, OneOrMany),
    _honoured("logprobs", _C, Flag, "of the model's own distribution, before temperature and penalties"),
    _honoured("top_logprobs", _CR, Integer, "in chats with `logprobs`; in responses with `include`"),
    Row("logprobs", _P, Rule.HONOURED, Integer, "0 to 20"),
    _honoured("echo", _P, Flag, "of text prompts, and not with `logprobs`"),
    _honoured("stream", _CPR, Flag),
    _honoured("stream_options", _CPR, Object, "`include_usage`; `include_obfuscation` has no effect"),
    _sampling("response_format", _C, Object, "`text`, `json_object`, `json_schema`; always strict"),
    _honoured("text", _R, Object, "`format` as `response_format`; `verbosity` only `medium`"),
    _honoured("tools", _CR, list[Object], "of type `function`"),
    _honoured("tool_choice", _CR, Choice, "`none`, `auto`, `required` or one function"),
    _sampling("parallel_tool_calls", _CR, Flag),
    _sampling("reasoning_effort", _C, Text, "`none`, `minimal`, `low`, `medium`, `high`"),
    _honoured("reasoning", _R, Object, "`effort`; `summary` is refused but for `auto`: the reasoning itself is told"),
    _honoured("include", _R, Texts, "`message.output_text.logprobs`; `reasoning.encrypted_content` has no effect"),
    _no_effect("user", _CPR, Text, "names an end user"),
    _no_effect("safety_identifier", _CR, Text, "names an end user"),
    _no_effect("metadata", _CR, Object, "the client's notes; `/v1/responses` sends them back"),
    _no_effect("prompt_cache_key", _CR, Text, "a hint; prefixes are found without it, within a key's own cache"),
    _no_effect("prompt_cache_retention", _CR, Text, "a hint"),
    _no_effect("prompt_cache_options", _CR, Object, "hints"),
    _no_effect("prediction", _C, Object, "speed only; drafters guess by themselves"),
    _no_effect("store", _C, Flag, "for OpenAI's own products"),
    _refused("service_tier", _CR, "there is one", "auto", "default"),
    _refused("verbosity", _C, "the model knows no such thing", "medium"),
    _refused("modalities", _C, "text only", ["text"]),
    _refused("audio", _C, "text only"),
    _refused("moderation", _CR, "nothing is moderated"),
    _refused("web_search_options", _C, "no hosted tools"),
    _refused("functions", _C, "send `tools`"),
    _refused("function_call", _C, "send `tool_choice`"),
    _refused("suffix", _P, "the model does not fill in the middle", ""),
    _refused("best_of", _P, "no search over answers", 1),
    _refused("background", _R, "answers are not kept", False),
    _refused("background_options", _R, "answers are not kept"),
    _refused("store", _R, "answers are not kept", False),
    _refused("previous_response_id", _R, "answers are not kept; send the conversation as `input`"),
    _refused("conversation", _R, "conversations are not kept; send them as `input`"),
    _refused("context_management", _R, "nothing is left out of a conversation"),
    _refused("truncation", _R, "nothing is left out of a conversation", "disabled"),
    _refused("max_tool_calls", _R, "counts calls of hosted tools, and there are none"),
    _refused("prompt", _R, "no stored prompts"),
    _refused("image", _R, "text only"),
    _refused("access_programs", _R, "there are none"),
    _extension("seed", _R, Integer),
    _extension("stop", _R, OneOrMany),
    _extension("top_k", _CPR, Integer),
    _extension("min_p", _CPR, Number),
    _extension("typical_p", _CPR, Number),
    _extension("repetition_penalty", _CPR, Number),
    _extension("no_repeat_ngram_size", _CPR, Integer),
    _extension("min_tokens", _CPR, Integer),
    _extension("ignore_eos", _CPR, Flag),
    _extension("stop_token_ids", _CPR, TokenIds),
    _extension("allowed_token_ids", _CPR, TokenIds),
    _extension("bad_words", _CPR, OneOrMany),
    _extension("structured_outputs", _CPR, Object, "`json`, `regex`, `choice` or `grammar`"),
    _extension("reasoning_format", _CR, Text, "`field`, the default: `reasoning_content`; `tags`; `both`"),
    _extension("max_reasoning_tokens", _CPR, Integer),
    _extension("reasoning_stall_tokens", _CPR, Integer),
    _extension("chat_template_kwargs", _CR, Object, "variables of the chat template", forwarded=False),
    _extension("drafter", _CPR, Text, "changes the speed, never the text"),
    _extension("num_draft_tokens", _CPR, Integer, "changes the speed, never the text"),
    _extension("logprobs_mode", _CPR, Text, "`raw` or `processed`"),
    _extension("timeout_ms", _CPR, Integer, "then the answer ends with what it has"),
    _extension("priority", _CPR, Integer, "1 (first) to 9 (last)"),
    _extension(
        "cache_salt", _CPR, Text, "only requests of the same salt, and key, share cached prefixes", forwarded=False
    ),
    _extension("return_token_ids", _CPR, Flag, "each choice has its `token_ids`", forwarded=False),
    _extension("return_draft_trees", _C, Flag, "who proposed each token: `tandem.draft_trees`", forwarded=False),
)


def rows(endpoint: str) -> dict[str, Row]:
    """The table of one endpoint, by name."""
    return {row.name: row for row in TABLE if endpoint in row.endpoints}


def _only(row: Row) -> AfterValidator:
    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(one) and value == one for one in row.accepts):
            raise PydanticCustomError("refused", "is not supported: {note}", {"note": row.note})
        return value

    return AfterValidator(check)


def _annotation(row: Row) -> Any:
    text = f"{row.rule}{': ' if row.note else ''}{row.note}"
    if row.rule is Rule.REFUSED:
        extra: Any = {"enum": [None, *row.accepts]}
        return Annotated[Any, _only(row), Field(description=text, json_schema_extra=extra)]
    return Annotated[row.type | None, Field(description=text)]


def _model(endpoint: str) -> type[BaseModel]:
    required = {CHAT: ("model", "messages"), COMPLETIONS: ("model", "prompt"), RESPONSES: ("model", "input")}[endpoint]
    fields: dict[str, Any] = {
        name: (row.type, ...) if name in required else (_annotation(row), None) for name, row in rows(endpoint).items()
    }
    config = ConfigDict(extra="forbid", hide_input_in_errors=True)
    return create_model(f"{endpoint.capitalize()}Request", __config__=config, **fields)


MODELS: Mapping[str, type[BaseModel]] = {endpoint: _model(endpoint) for endpoint in ENDPOINTS}
_ROWS = {endpoint: rows(endpoint) for endpoint in ENDPOINTS}


def read_fields(endpoint: str, body: Any) -> dict[str, Any]:
    """The fields that `body` sends, null ones left out. Raises ApiError 400 naming the first wrong one."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        model = MODELS[endpoint].model_validate(body)
    except ValidationError as error:
        raise _explained(endpoint, error.errors(include_url=False)[0]) from None
    return {name: value for name in body if (value := getattr(model, name)) is not None}


def forwarded(endpoint: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the backend reads under the same name."""
    table = _ROWS[endpoint]
    return {name: value for name, value in values.items() if table[name].forwarded}


def _explained(endpoint: str, wrong: Any) -> ApiError:
    name, *rest = wrong["loc"]
    param = str(name)[:100] + "".join(f"[{part}]" for part in rest if isinstance(part, int))
    if wrong["type"] == "extra_forbidden":
        known = any(row.name == name for row in TABLE)
        reason = "is not a field of this endpoint" if known else "is not a field of this API"
        return invalid(param, reason, "unknown_parameter")
    if wrong["type"] == "missing":
        return invalid(param, "is required", "missing_required_parameter")
    code = "unsupported_parameter" if wrong["type"] == "refused" else "invalid_type"
    got = repr(wrong.get("input"))[:100]
    return invalid(param, f"{wrong['msg']}, got {got}", code)
