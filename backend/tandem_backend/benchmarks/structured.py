# SPDX-License-Identifier: Apache-2.0
"""The price of a JSON Schema: answers with one beside free answers to the same prompts, plain and with drafters."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tandem_backend.benchmarks.decode import Say
from tandem_backend.benchmarks.engine_runs import Run, TextsDifferError, bench_config, run_together
from tandem_backend.benchmarks.environment import num_usable_cores, provenance
from tandem_backend.benchmarks.table import table
from tandem_backend.engine import Engine
from tandem_backend.engine.drafting import NO_DRAFTER
from tandem_backend.engine.proposal_tree import FORCED
from tandem_backend.types import Grammar, GrammarKind, Prompt, Request, SamplingParams

NAMES = ("json.dumps", "os.getcwd", "zip", "re.sub", "math.sqrt", "str.split", "random.choice", "time.sleep")
SCHEMA = (
    '{"type": "object", "properties": {"qualified_name": {"type": "string", "maxLength": 24}, "module_name": {"type": '
    '"string", "maxLength": 16}, "kind_of_object": {"enum": ["function", "method", "class", "module"]}, '
    '"is_builtin": {"type": "boolean"}, "short_description": {"type": "string", "maxLength": 60}, "parameter_names": '
    '{"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3}}, "required": ["qualified_name", '
    '"module_name", "kind_of_object", "is_builtin", "short_description", "parameter_names"], "additionalProperties": '
    "false}"
)
GRAMMAR = Grammar(kind=GrammarKind.JSON_SCHEMA, source=SCHEMA, field="schema")


@dataclass(frozen=True, slots=True)
class Side:
    """One way to answer all prompts."""

    grammar: Grammar | None
    drafter: str

    @property
    def name(self) -> str:
        return f"{'schema' if self.grammar else 'free text'}, {self.drafter}"


class StructuredBench:
    """One engine; each prompt is answered alone, the sides in turns. Raises TandemError."""

    def __init__(self, checkpoint: Path, max_tokens: int, say: Say) -> None:
        self.checkpoint, self.max_tokens, self.say = checkpoint, max_tokens, say
        self.engine = Engine(bench_config(checkpoint, ("auto",), num_usable_cores(), 1))
        drafters = (NO_DRAFTER, "+".join(self.engine.rounds.drafting.default))
        self.sides = [Side(grammar, d) for grammar in (None, GRAMMAR) for d in drafters]
        self.sides.append(Side(GRAMMAR, FORCED))
        self._texts: dict[tuple[int, bool], tuple[int, ...]] = {}
        self._ids = count()

    def run(self, repeats: int) -> dict[str, Any]:
        """Tokens/s after the first token, of all prompts together; medians over repeats. Raises TextsDifferError."""
        runs: dict[Side, list[list[Run]]] = {side: [] for side in self.sides}
        for repeat in range(repeats + 1):
            self.say("warming up" if repeat == 0 else f"repeat {repeat} of {repeats}")
            for side in self.sides[repeat % 2 :] + self.sides[: repeat % 2]:
                answers = [self._answer(i, side) for i in range(len(NAMES))]
                if repeat:
                    runs[side].append(answers)
        rows = [_row(side, repeated) for side, repeated in runs.items()]
        rates = {side: row["tokens_per_s"] for side, row in zip(runs, rows, strict=True)}
        plain, drafted = self.sides[:2]
        return {
            "benchmark": "structured",
            **provenance(num_usable_cores()),
            "checkpoint": self.checkpoint.name,
            "max_tokens": self.max_tokens,
            "repeats": repeats,
            "rows": rows,
            "schema_over_free_plain": rates[self.sides[2]] / rates[plain],
            "schema_over_free_drafted": rates[self.sides[3]] / rates[drafted],
            "forced_over_plain_schema": rates[self.sides[4]] / rates[self.sides[2]],
        }

    def _answer(self, index: int, side: Side) -> Run:
        params = SamplingParams(max_tokens=self.max_tokens, grammar=side.grammar, drafter=side.drafter)
        prompt = Prompt(
            messages=({"role": "user", "content": f"What does {NAMES[index]} do? Explain its parameters."},)
        )
        request = Request(request_id=str(next(self._ids)), prompt=prompt, params=params)
        run = run_together(self.engine, [self.engine.prepare(request)])
        expected = self._texts.setdefault((index, side.grammar is not None), run.token_ids[0])
        if run.token_ids[0] != expected:
            raise TextsDifferError(f"{NAMES[index]!r}: with {side.name} the text differs; its speed means nothing")
        return run


def _row(side: Side, repeated: Sequence[Sequence[Run]]) -> dict[str, Any]:
    rates = [sum(run.num_tokens for run in runs) / sum(run.decode_s for run in runs) for runs in repeated]
    num_tokens = sum(run.num_tokens for run in repeated[0])
    return {
        "side": side.name,
        "num_tokens": num_tokens,
        "tokens_per_round": num_tokens / sum(run.times.num_rounds for run in repeated[0]),
        "tokens_per_s": statistics.median(rates),
    }


def render_structured(result: dict[str, Any]) -> str:
    rows = [[row["side"], row["num_tokens"], row["tokens_per_round"], row["tokens_per_s"]] for row in result["rows"]]
    return "\n".join(
        [
            table(["answers", "tokens", "tokens a round", "tokens/s"], rows),
            f"schema over free text, plain: {result['schema_over_free_plain']:.2f}x; "
            f"with drafters: {result['schema_over_free_drafted']:.2f}x; "
            f"schema, forced tokens drafted over plain: {result['forced_over_plain_schema']:.2f}x",
        ]
    )
