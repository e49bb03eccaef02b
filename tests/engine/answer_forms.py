# SPDX-License-Identifier: Apache-2.0
"""Requests whose answers have a form: one of each kind of grammar, tool choice and reasoning limit."""

import json
from typing import Any

from tandem_backend.types import Grammar, GrammarKind, Prompt, Request, SamplingParams, ToolChoice, ToolMode

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "module": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["function", "class", "module"]},
        "stars": {"type": "integer", "minimum": 0, "maximum": 5},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "module", "kind", "stars", "tags"],
    "additionalProperties": False,
}
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "evaluate",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "maxLength": 12}, "exact": {"type": "boolean"}},
                "required": ["expression", "exact"],
            },
        },
    },
)
THINK = {"enable_thinking": True}


def grammar(kind: GrammarKind, source: str) -> Grammar:
    return Grammar(kind=kind, source=source, field="structured_outputs")


def json_schema(schema: Any) -> Grammar:
    return grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def ask(text: str, *, tools: Any = None, kwargs: Any = None, **params: Any) -> Request:
    """A request of a chat; its request_id is for the caller to set."""
    prompt = Prompt(messages=({"role": "user", "content": text},), tools=tools, template_kwargs=kwargs or {})
    return Request(request_id="", prompt=prompt, params=SamplingParams(**{"max_tokens": 72, **params}))


FORMS: dict[str, Request] = {
    "schema": ask("Describe json.dumps as JSON.", grammar=json_schema(SCHEMA)),
    "schema, sampled": ask("Describe zip as JSON.", grammar=json_schema(SCHEMA), temperature=1.0, seed=7),
    "schema, penalties": ask("Describe map as JSON.", grammar=json_schema(SCHEMA), repetition_penalty=1.3),
    "object": ask("Describe os.getcwd as JSON.", grammar=json_schema({"type": "object"}), max_tokens=48),
    "regex": ask("When was it?", grammar=grammar(GrammarKind.REGEX, r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]")),
    "choice": ask("Is zip a function?", grammar=grammar(GrammarKind.CHOICE, '["yes", "no", "perhaps not"]')),
    "ebnf": ask("Add.", grammar=grammar(GrammarKind.GRAMMAR, 'root ::= num " + " num " = " num\nnum ::= [0-9]{1,3}')),
    "lark": ask("Greet.", grammar=grammar(GrammarKind.GRAMMAR, 'start: "Hello, " NAME "!"\nNAME: /[A-Z][a-z]{2,9}/')),
    "call": ask(
        "What is the weather in Rome?", tools=TOOLS, tool_choice=ToolChoice(mode=ToolMode.REQUIRED, parallel=False)
    ),
    "calls": ask("What is 3 + 4?", tools=TOOLS, tool_choice=ToolChoice(mode=ToolMode.REQUIRED)),
    "named call": ask("What is 5 * 6?", tools=TOOLS, tool_choice=ToolChoice(mode=ToolMode.NAMED, name="evaluate")),
    "free call": ask("What is the weather in Oslo?", tools=TOOLS, tool_choice=ToolChoice()),
    "budget": ask("What does zip() do?", kwargs=THINK, max_reasoning_tokens=9),
    "no budget": ask("What does map() do?", kwargs=THINK, max_reasoning_tokens=0),
    "stall": ask("What does any() do?", kwargs=THINK, reasoning_stall_tokens=8, logit_bias=((301, 60.0),)),
    "schema after reasoning": ask(
        "Describe json.loads as JSON.", kwargs=THINK, max_reasoning_tokens=12, grammar=json_schema(SCHEMA)
    ),
}
