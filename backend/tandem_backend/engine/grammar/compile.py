# SPDX-License-Identifier: Apache-2.0
"""GrammarCompiler: from what a request asks of its answer's form to a state at the answer's first token.

llguidance was chosen over xgrammar because every JSON Schema that it takes it enforces, and it names what it does not
support; scripts/compare_grammar_libraries.py prints the comparison.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from tandem_backend.engine.grammar.state import GrammarState
from tandem_backend.engine.grammar.trial import GrammarTrial
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import Grammar, GrammarKind

# A space, or a line break with its indentation, as JSON writers do. A small model that may write any never stops.
DEFAULT_WHITESPACE = r" |\n {0,32}|\n\t{0,16}"
NUM_CACHED = 64
MAX_CHARACTERS = 1 << 17  # of a grammar: others wait while it is converted, which no bound on CPU time covers
# A state of the lexer takes 1 to 2 kB, and requests of one grammar share them.
MAX_LEXER_STATES = 50_000
# Of the parser, for a mask: an ambiguous grammar may ask for any number, and all streams wait while the mask is filled.
MAX_STEP_ITEMS = 10_000


class GrammarCompiler:
    """Thread-safe. Keeps the grammars that were used last, so that a schema is compiled once for many requests."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: the model's, which masks have; eos_token_ids may come where the grammar is complete."""
        self._vocab_size = vocab_size
        tokenizer_json = tokenizer.to_json()
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._trial = GrammarTrial(tokenizer_json, vocab_size, eos_token_ids, MAX_LEXER_STATES)
        self._limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, step_max_items=MAX_STEP_ITEMS, verbose_errors=False
        )
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, GrammarState] = OrderedDict()

    def compile(self, grammar: Grammar) -> GrammarState:
        """A state of its own for the caller. Raises InvalidRequestError naming the field and what is not supported."""
        with self._lock:
            state = self._compiled.get(grammar)
            if state is not None:
                self._compiled.move_to_end(grammar)
                return state.fork()
        state = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = state
            while len(self._compiled) > NUM_CACHED:
                self._compiled.popitem(last=False)
        return state.fork()

    def is_special(self, token_id: int) -> bool:
        """Whether grammars may name the token, as `<tool_call>`; its letters do not stand for it then."""
        return self._tokenizer.is_special_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for; a special token for its name."""
        text: bytes = self._tokenizer.decode_bytes([token_id])
        return text

    def _compile(self, grammar: Grammar) -> GrammarState:
        if len(grammar.source) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"{grammar.field}: must have at most {MAX_CHARACTERS} characters, has {len(grammar.source)}"
            )
        try:
            source = _to_llguidance(grammar)
        # llguidance's converter raises bare Exceptions; whatever it is, it is about this source.
        except Exception as error:
            raise InvalidRequestError(f"{grammar.field}: {error}") from error
        refusal = self._trial.refusal(source)
        if refusal is not None:
            raise InvalidRequestError(f"{grammar.field}: {refusal}")
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequestError(f"{grammar.field}: {_explain(matcher.get_error())}")
        return GrammarState(matcher, self._vocab_size)


def _to_llguidance(grammar: Grammar) -> str:
    """llguidance's own form. Raises what the conversion raises."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        pattern = DEFAULT_WHITESPACE if grammar.whitespace_pattern is None else grammar.whitespace_pattern
        schema = json.loads(grammar.source)
        if schema is not True and not isinstance(schema, dict):
            raise ValueError(f"a JSON Schema must be an object, got {grammar.source[:100]}")
        return LLMatcher.grammar_from_json_schema(
            {} if schema is True else schema, overrides={"whitespace_pattern": pattern}
        )
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind is GrammarKind.CHOICE:
        choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.source))
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    return LLMatcher.grammar_from_lark(any_to_lark(grammar.source))


def _explain(message: str) -> str:
    """llguidance's message as a client should read it, on one line."""
    unsupported = re.match(r"Unimplemented keys: (\[.*?\])", message)
    if unsupported is not None:
        return f"JSON Schema keywords that are not supported: {', '.join(json.loads(unsupported[1]))}"
    if message.startswith("oneOf constraints are not supported"):
        return "oneOf is supported where its branches can't overlap; send anyOf"
    outside = re.match(r"Resource '(.*?)' is not present", message)
    if outside is not None:
        return f"$ref is supported within the schema only, got {outside[1]}"
    message = message.split("<backtrace>")[0]
    return " ".join(message.removesuffix("<non-verbose/>").split())[:500]
