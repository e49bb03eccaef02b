# SPDX-License-Identifier: Apache-2.0
"""AnswerForms: what a request's answer must look like, as one constraint, and how it is read."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_backend.engine.grammar import GrammarCompiler, GrammarState
from tandem_backend.engine.grammar.compile import DEFAULT_WHITESPACE
from tandem_backend.engine.reasoning.constraint import ReasoningConstraint
from tandem_backend.engine.reasoning.stall import StallDetector
from tandem_backend.engine.reasoning.tags import find_tags, opens_reasoning
from tandem_backend.engine.sampling import Constraint
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.engine.tools import Tool, ToolFormat, read_tools, tool_format
from tandem_backend.engine.tools.grammar import object_schema, tool_grammar
from tandem_backend.engine.tools.parser import CLOSE, OPEN
from tandem_backend.errors import InvalidRequestError
from tandem_backend.model.config import ModelConfig
from tandem_backend.types import Grammar, GrammarKind, Request, ToolChoice, ToolMode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a request's answer is to be read."""

    in_reasoning: bool = False  # the prompt ends within a reasoning block
    tool_format: ToolFormat | None = None  # how calls are written, where the answer is to be searched for them


class AnswerForms:
    """Thread-safe; holds what the checkpoint's tokenizer and chat template say."""

    def __init__(self, tokenizer: Tokenizer | None, model: ModelConfig) -> None:
        self._tokenizer, self._eos_ids = tokenizer, tuple(model.eos_token_ids)
        if tokenizer is None:
            return
        self._compiler = _compiler(tokenizer, model)
        self._reasoning = find_tags(tokenizer)
        self._tool_format = tool_format(tokenizer.chat_template)
        vocabulary = tokenizer.vocabulary()
        self._tags_are_tokens = all(
            tag in vocabulary and self._compiler is not None and self._compiler.is_special(vocabulary[tag])
            for tag in (OPEN, CLOSE)
        )

    def form(self, request: Request, prompt_ids: Sequence[int]) -> AnswerForm:
        """Raises InvalidRequestError where the request needs calls and the template has no format that we know."""
        if self._tokenizer is None:
            return AnswerForm()
        return AnswerForm(opens_reasoning(self._tokenizer, prompt_ids), self._find_tool_format(request))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none without a tokenizer."""
        if self._tokenizer is None:
            return b""
        if self._compiler is not None:
            return self._compiler.token_bytes(token_id)
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def _find_tool_format(self, request: Request) -> ToolFormat | None:
        choice, tools = request.params.tool_choice, request.prompt.tools
        if choice is None or not tools:
            return None
        if self._tool_format is None and choice.mode is not ToolMode.AUTO:
            raise InvalidRequestError(
                f"tool_choice: only auto and none are possible, this checkpoint's chat template has no known format of "
                f"tool calls ({', '.join(ToolFormat)})"
            )
        if self._tool_format is not None:
            read_tools(tools)
        return self._tool_format

    def constraint(self, request: Request, form: AnswerForm) -> Constraint | None:
        """The state before the first output token; None where any token may come at any time.

        Raises InvalidRequestError naming the field and what is not supported.
        """
        grammar, params = self._grammar(request), request.params
        if params.max_reasoning_tokens is None and params.reasoning_stall_tokens is None:
            may_think = form.in_reasoning or request.prompt.template_kwargs.get("enable_thinking") is True
            if grammar is None or not may_think or self._reasoning is None:
                return grammar
        if self._tokenizer is None or self._reasoning is None:
            field = "max_reasoning_tokens" if params.max_reasoning_tokens is not None else "reasoning_stall_tokens"
            raise InvalidRequestError(f"{field}: the checkpoint's tokenizer has no <think> and </think> tokens")
        stall = params.reasoning_stall_tokens
        return ReasoningConstraint(
            tags=self._reasoning,
            max_tokens=params.max_reasoning_tokens,
            stall=StallDetector(stall) if stall is not None else None,
            grammar=grammar,
            in_block=form.in_reasoning,
            may_open=request.prompt.template_kwargs.get("enable_thinking") is True and not form.in_reasoning,
            eos_ids=self._eos_ids,
        )

    def _grammar(self, request: Request) -> GrammarState | None:
        grammar, choice = request.params.grammar, request.params.tool_choice
        must_call = choice is not None and choice.mode is not ToolMode.AUTO
        if grammar is not None and must_call:
            raise InvalidRequestError(f"tool_choice: required or named leaves no room for {grammar.field}")
        if grammar is not None and self._tokenizer is None:
            raise InvalidRequestError(f"{grammar.field}: the checkpoint has no tokenizer")
        if choice is not None and must_call:
            grammar = self._call_grammar(choice, read_tools(request.prompt.tools or ()))
        return self._compile(grammar) if grammar is not None else None

    def _compile(self, grammar: Grammar) -> GrammarState:
        if self._compiler is None:
            raise InvalidRequestError(f"{grammar.field}: grammars can't be enforced with this checkpoint's tokenizer")
        return self._compiler.compile(grammar)

    def _call_grammar(self, choice: ToolChoice, tools: Sequence[Tool]) -> Grammar:
        if choice.mode is ToolMode.NAMED:
            named = [tool for tool in tools if tool.name == choice.name]
            if not named:
                names = ", ".join(tool.name for tool in tools) or "none"
                raise InvalidRequestError(f"tool_choice: no tool {choice.name!r} among the request's tools: {names}")
            tools = named
        if not tools or self._tokenizer is None:
            raise InvalidRequestError("tool_choice: needs messages and tools, got none")
        assert self._tool_format is not None, "tool_format() refused"
        for tool in tools:  # so that an error names the tool
            self._compile(
                Grammar(
                    kind=GrammarKind.JSON_SCHEMA,
                    source=json.dumps(object_schema(tool)),
                    field=f"tools: the parameters of {tool.name!r}",
                )
            )
        source = tool_grammar(
            self._tool_format,
            tools,
            parallel=choice.parallel and choice.mode is ToolMode.REQUIRED,
            tags_are_tokens=self._tags_are_tokens,
            whitespace_pattern=DEFAULT_WHITESPACE,
        )
        return Grammar(kind=GrammarKind.GRAMMAR, source=source, field="tools")


def _compiler(tokenizer: Tokenizer, model: ModelConfig) -> GrammarCompiler | None:
    """None for a tokenizer that llguidance can't take: the model is served without grammars then."""
    try:
        return GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
    except Exception as error:
        logger.warning("grammars are refused: llguidance does not take the checkpoint's tokenizer: %s", error)
        return None
