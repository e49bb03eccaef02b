# SPDX-License-Identifier: Apache-2.0
"""Tool calls are read from the stream: the same calls however the text is cut, and nothing of the text is lost."""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tandem_backend.engine.reasoning.splitter import ReasoningSplitter
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.engine.tools import ToolFormat, make_parser, read_tools, tool_format
from tandem_backend.engine.tools.values import json_types, typed_value

TOOLS = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "order",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "dish": {"type": "string"},
                        "count": {"type": "integer"},
                        "price": {"type": "number"},
                        "hot": {"type": "boolean"},
                        "note": {"type": ["string", "null"]},
                        "extras": {"type": "array", "items": {"type": "string"}},
                        "address": {"$ref": "#/$defs/address"},
                        "anything": {},
                    },
                    "$defs": {"address": {"type": "object"}},
                },
            },
        },
        {"name": "stop"},
    ]
)

Calls = list[tuple[str, Any]]
HERMES: list[tuple[str, str, Calls]] = [
    ("just text", "just text", []),
    ("trailing space \n", "trailing space \n", []),
    ("a < b <tool", "a < b <tool", []),
    (
        'Sure.\n<tool_call>\n{"name": "order", "arguments": {"dish": "soup", "count": 2}}\n</tool_call>',
        "Sure.",
        [("order", {"dish": "soup", "count": 2})],
    ),
    (
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "order", "arguments": '
        '{"dish": "a } ] \\" </tool_call> {", "extras": [[], {"x": ["y"]}]}}\n</tool_call>\n',
        "",
        [("stop", {}), ("order", {"dish": 'a } ] " </tool_call> {', "extras": [[], {"x": ["y"]}]})],
    ),
    ('<tool_call>{"arguments": {"count": 1}, "id": 7, "name": "order"}</tool_call>', "", [("order", {"count": 1})]),
    ('<tool_call>{"name": "order", "arguments": "{\\"count\\": 3}"}</tool_call>', "", [("order", {"count": 3})]),
    ('<tool_call>{"name": "caf\\u00e9", "parameters": null}</tool_call>x', "x", [("café", None)]),
    ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ('<tool_call>{"arguments": {"dish": "so', '<tool_call>{"arguments": {"dish": "so', []),
    (
        '<tool_call><tool_call>{"name": "stop", "arguments": {}}</tool_call>',
        "<tool_call>",
        [("stop", {})],
    ),
]
XML: list[tuple[str, str, Calls]] = [
    ("just text", "just text", []),
    (
        "Sure.\n<tool_call>\n<function=order>\n<parameter=dish>\n5\n</parameter>\n<parameter=count>\n5\n</parameter>\n"
        "<parameter=price>\n2\n</parameter>\n<parameter=hot>\nTrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"
        "</function>\n</tool_call>",
        "Sure.",
        [("order", {"dish": "5", "count": 5, "price": 2, "hot": True, "note": None})],
    ),
    (
        '<tool_call>\n<function=order>\n<parameter=dish>\n two\n"lines" <b>\n\n</parameter>\n<parameter=extras>\n'
        '["a", "b"]\n</parameter>\n<parameter=address>\n{\'street\': "x"}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        "",
        [("order", {"dish": ' two\n"lines" <b>\n', "extras": ["a", "b"], "address": {"street": "x"}}), ("stop", {})],
    ),
    (
        "<function=order><parameter=dish>x</parameter><parameter=unknown>7</parameter></function>after",
        "after",
        [("order", {"dish": "x", "unknown": "7"})],
    ),
    (
        "<tool_call>\n<function=order>\n<parameter=count>\nmany\n</parameter>\n<parameter=anything>\n[1]\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("order", {"count": "many", "anything": [1]})],
    ),
    ("<tool_call>\nno function\n</tool_call>", "<tool_call>\nno function\n</tool_call>", []),
]
CASES = [(ToolFormat.HERMES, *case) for case in HERMES] + [(ToolFormat.QWEN_XML, *case) for case in XML]


def read(form: ToolFormat, pieces: Sequence[str]) -> tuple[str, Calls]:
    """Content and calls of a text that comes in pieces."""
    parser = make_parser(form, TOOLS)
    content, names, arguments = "", [], []
    for parsed in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert delta.index == len(names)
                names.append(delta.name)
                arguments.append("")
            assert delta.index == len(names) - 1
            arguments[-1] += delta.arguments
    assert parser.num_calls == len(names)
    return content, [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


def cuts(text: str) -> Iterator[list[str]]:
    """Whole, letter by letter, cut in two anywhere, and into random pieces."""
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    rng = random.Random(text)
    for _ in range(30):
        places = sorted(rng.sample(range(len(text) + 1), min(5, len(text))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_the_same_however_the_text_is_cut(form: ToolFormat, text: str, content: str, calls: Calls) -> None:
    for pieces in cuts(text):
        assert read(form, pieces) == (content, calls), pieces


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_come_token_by_token(bundled: Path, form: ToolFormat, text: str, content: str, calls: Calls) -> None:
    tokenizer = Tokenizer(bundled)
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]
    assert read(form, [*pieces, stream.flush()]) == (content, calls)


def test_arguments_are_streamed_as_they_come() -> None:
    """Each letter of a text argument goes out with its own piece."""
    for form, opening, closing in (
        (ToolFormat.HERMES, '<tool_call>{"name": "order", "arguments": {"dish": "', '"}}</tool_call>'),
        (ToolFormat.QWEN_XML, "<tool_call><function=order><parameter=dish>", "</parameter></function></tool_call>"),
    ):
        parser = make_parser(form, TOOLS)
        parser.push(opening)
        for letter in "a long dish":
            assert [delta.arguments for delta in parser.push(letter).calls] == [letter]
        rest = "".join(delta.arguments for delta in parser.push(closing).calls)
        assert rest == '"}'


def test_a_call_that_is_cut_off_keeps_what_came() -> None:
    parser = make_parser(ToolFormat.HERMES, TOOLS)
    deltas = parser.push('<tool_call>{"name": "order", "arguments": {"dish": "so').calls + parser.finish().calls
    assert [(delta.name, delta.arguments) for delta in deltas] == [("order", ""), (None, '{"dish": "so')]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {"type": "number"}, 5),
        ("1e3", {"type": "number"}, 1000.0),
        ("NaN", {"type": "number"}, "NaN"),
        ("TRUE", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("text", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "text"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ("{'a', 'b'}", {"type": "object"}, "{'a', 'b'}"),
        ('{"a": 1}', {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}}, {"a": 1}),
        ("7", {"enum": [7, 8]}, 7),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"const": 7}, 7),
        ("7", None, "7"),
        ('"quoted"', {}, "quoted"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
    ],
)
def test_values_have_the_schemas_type(text: str, schema: Any, value: Any) -> None:
    found = typed_value(text, schema)
    assert (found, type(found)) == (value, type(value))


def test_types_of_schemas() -> None:
    assert json_types({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}) == {"integer"}
    assert "string" in json_types({"$ref": "https://elsewhere"})
    assert "string" in json_types({"$ref": "#"})
    assert json_types({"type": "number"}) == {"integer", "number"}


def test_the_format_is_the_templates(bundled: Path) -> None:
    assert tool_format(Tokenizer(bundled).chat_template) is ToolFormat.HERMES
    assert tool_format("<tool_call>\n<function=example_function_name>") is ToolFormat.QWEN_XML
    assert tool_format("{{ messages }}") is tool_format(None) is None


REASONING = [
    (False, "plain answer", "", "plain answer"),
    (False, " <b>no</b> ", "", " <b>no</b> "),
    (False, "<think>\nhm\n</think>\n\nanswer", "hm", "answer"),
    (True, "hm, </th no\n\nmore\n</think>\n\nanswer </think> x", "hm, </th no\n\nmore", "answer </think> x"),
    (True, "\n</think>\n\nanswer", "", "answer"),
    (True, "never closed \n", "never closed", ""),
    (False, "<thin", "", "<thin"),
    (False, "answer <think>x</think>", "", "answer <think>x</think>"),
]


@pytest.mark.parametrize(("in_block", "text", "reasoning", "answer"), REASONING)
def test_reasoning_is_split_however_the_text_is_cut(in_block: bool, text: str, reasoning: str, answer: str) -> None:
    for pieces in cuts(text):
        splitter = ReasoningSplitter(in_block=in_block)
        splits = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
        assert "".join(split.reasoning for split in splits) == reasoning
        assert "".join(split.answer for split in splits) == answer
        assert "".join(split.markup + split.answer for split in splits) == text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 3},
        {"type": {"a": 1}},
        {"type": [["string"], None]},
        {"allOf": 5},
        {"allOf": {"type": "string"}},
        {"anyOf": "x"},
        {"enum": 1},
        {"$ref": 7},
        {"$ref": "#/$defs/none"},
    ],
)
def test_a_schema_that_is_none_types_nothing(schema: dict[str, Any]) -> None:
    assert typed_value("12", schema) == 12


def test_references_that_branch_are_followed_once() -> None:
    """Looked at along every path, these would be 50 to the power of 20."""
    names = [f"d{n}" for n in range(21)]
    defs: dict[str, Any] = {a: {"anyOf": [{"$ref": f"#/$defs/{b}"}] * 50} for a, b in pairwise(names)}
    schema = {"$defs": defs | {"d20": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    assert typed_value("12", schema) == 12
    assert typed_value("x", {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "$ref": "#/$defs/a"}) == "x"
