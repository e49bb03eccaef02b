# SPDX-License-Identifier: Apache-2.0
"""What requests ask of their answers' form: every name for it, and which field an error names."""

import json
from typing import Any

import pytest
from fakes.pb_utils import InferenceRequest
from tandem_backend.errors import InvalidRequestError
from tandem_backend.serving.request import Parsed, parse_request
from tandem_backend.types import Grammar, GrammarKind, Request, ToolChoice, ToolMode

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
NAMED_SCHEMA = {"name": "n", "schema": SCHEMA}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def guide(kind: str, source: str) -> dict[str, str]:
    return {"guided_decoding_guide_type": kind, "guided_decoding_guide": source}


def parse(sampling: dict[str, Any], **values: Any) -> Parsed:
    values = values or {"text_input": "x"}
    return parse_request(InferenceRequest.of(sampling_parameters=json.dumps(sampling), **values), "1")


def request(sampling: dict[str, Any], **values: Any) -> Request:
    found = parse(sampling, **values).request
    assert found is not None
    return found


def chat(sampling: dict[str, Any], *, tools: Any = TOOLS, **values: Any) -> Request:
    messages = json.dumps([{"role": "user", "content": "?"}])
    return request(sampling, messages=messages, **({"tools": json.dumps(tools)} if tools else {}), **values)


@pytest.mark.parametrize(
    ("sampling", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED_SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["é", "b"]}}, "choice", '["é", "b"]'),
        ({"structured_outputs": {"grammar": "start: /a/", "regex": None}}, "grammar", "start: /a/"),
        ({"structured_outputs": json.dumps({"regex": "a+"})}, "regex", "a+"),
        ({"guided_decoding": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_choice": '["a"]'}, "choice", '["a"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"guided_decoding_guide_type": "json"}, "json_schema", '{"type": "object"}'),
        (guide("json_schema", json.dumps(SCHEMA)), "json_schema", SCHEMA),
        (guide("regex", "a+"), "regex", "a+"),
        (guide("ebnf_grammar", 'root ::= "a"'), "grammar", 'root ::= "a"'),
    ],
)
def test_every_name_of_a_grammar(sampling: dict[str, Any], kind: str, source: Any) -> None:
    grammar = request(sampling).params.grammar
    assert grammar is not None
    assert grammar.field in sampling
    assert grammar.kind == kind
    expected = json.dumps(source) if isinstance(source, dict) else source  # properties keep their order
    assert grammar.source == expected


def test_tensors_name_a_grammar_too() -> None:
    values = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}
    grammar = request({}, text_input="x", **values).params.grammar
    assert grammar == Grammar(kind=GrammarKind.REGEX, source="a+", field="guided_decoding_guide")


def test_white_space() -> None:
    def pattern(**form: Any) -> str | None:
        grammar = request({"structured_outputs": {"json": SCHEMA, **form}}).params.grammar
        assert grammar is not None
        return grammar.whitespace_pattern

    assert pattern() is None
    assert pattern(disable_any_whitespace=True) == ""
    assert pattern(whitespace_pattern=" ?", disable_any_whitespace=False) == " ?"


def test_no_grammar() -> None:
    assert request({}).params.grammar is None
    assert request({"response_format": {"type": "text"}, "structured_outputs": None}).params.grammar is None


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"response_format": "json"}, "response_format: not valid JSON"),
        ({"response_format": 5}, "response_format: must be a JSON object, got 5"),
        ({"response_format": {"type": "xml"}}, "response_format: type must be .*, got 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format: json_schema must be an object"),
        ({"structured_outputs": {}}, "structured_outputs: exactly one of .*, got 0"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs: exactly one of .*, got 2"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs: 'structural_tag' is not supported"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "'disable_additional_properties'",
        ),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": 1}}, "whitespace_pattern must be"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs: regex must be text"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs: grammar must be text and not empty"),
        ({"guided_choice": []}, "guided_choice: choice must be a list of texts"),
        ({"guided_choice": ["a", ""]}, "guided_choice: choice must be a list of texts"),
        ({"guided_json": "{"}, "guided_json: not valid JSON"),
        ({"guided_json": "[" * 100_000}, "guided_json: not valid JSON"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice: an answer has one form, and guided_regex asks"),
        ({"guided_decoding_guide_type": "structural_tag"}, "guided_decoding_guide_type: must be one of"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide: is needed"),
        ({"tool_choice": "required"}, "tool_choice: needs messages and tools"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort: .*'none', 'minimal'"),
        ({"reasoning_format": "xml"}, "reasoning_format: .*'tags', 'field' or 'both'"),
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens: .*greater than or equal to 0"),
        ({"reasoning_stall_tokens": 7}, "reasoning_stall_tokens: .*greater than or equal to 8"),
        ({"parallel_tool_calls": "perhaps"}, "parallel_tool_calls: "),
    ],
)
def test_what_is_wrong_is_refused_by_name(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(sampling)


def test_a_deeply_nested_schema_is_refused() -> None:
    """Whether the parser, the writer or the grammar library is the first that can't follow."""
    for depth in (500, 900, 5000, 100_000):
        text = '{"items": ' * depth + "{}" + "}" * depth
        sampling = '{"structured_outputs": {"json": ' + text + "}}"
        request = InferenceRequest.of(text_input="x", sampling_parameters=sampling)
        try:
            parsed = parse_request(request, "1").request
        except InvalidRequestError:
            continue
        assert parsed is not None
        assert parsed.params.grammar is not None


def test_tool_choices() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for value, choice in (
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("required", ToolChoice(mode=ToolMode.REQUIRED)),
        (named, ToolChoice(mode=ToolMode.NAMED, name="f")),
        (json.dumps(named), ToolChoice(mode=ToolMode.NAMED, name="f")),
    ):
        found = chat({"tool_choice": value} if value else {})
        assert found.params.tool_choice == choice
        assert found.prompt.tools == tuple(TOOLS)
    assert chat({"tool_choice": "required", "parallel_tool_calls": "false"}).params.tool_choice == ToolChoice(
        mode=ToolMode.REQUIRED, parallel=False
    )
    for value in ("sometimes", {"type": "function"}, 5):
        with pytest.raises(InvalidRequestError, match="tool_choice: must be none, auto, required or"):
            chat({"tool_choice": value})


def test_none_keeps_the_tools_from_the_template() -> None:
    found = chat({"tool_choice": "none"})
    assert (found.params.tool_choice, found.prompt.tools) == (None, None)
    assert chat({}, tools=None).params.tool_choice is None


def test_reasoning_limits() -> None:
    found = chat({"reasoning_effort": "low"})
    assert found.params.max_reasoning_tokens == 256
    assert found.prompt.template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    found = chat({"reasoning_effort": "none"}, enable_thinking=True)
    assert found.params.max_reasoning_tokens == 0
    assert found.prompt.template_kwargs["enable_thinking"] is True
    found = chat({"reasoning_effort": "high", "max_reasoning_tokens": "7", "reasoning_stall_tokens": 64})
    assert (found.params.max_reasoning_tokens, found.params.reasoning_stall_tokens) == (7, 64)
    assert request({"reasoning_effort": "medium"}).prompt.template_kwargs == {}
    assert parse({"reasoning_format": "both"}).options.reasoning_format == "both"
