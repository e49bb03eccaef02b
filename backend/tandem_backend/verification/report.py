# SPDX-License-Identifier: Apache-2.0
"""The gate's results for people (a table, progress) and for programs (JSON)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tandem_backend.verification.gate import Difference, Line, Plan, Tick
from tandem_backend.verification.prompts import NamedPrompt

TICK_S = 5.0
# heading, width; text columns are the first and the fourth
_COLUMNS = (
    ("drafters", -14),
    ("parallel", 8),
    ("chunk", 6),
    ("cache", -7),
    ("prompts", 7),
    ("tokens", 8),
    ("differing tokens", 16),
    ("differing rows", 14),
    ("acceptance", 10),
    ("draft rows", 10),
    ("cached", 8),
    ("seconds", 8),
)


@dataclass(slots=True)
class Progress:
    """Lines with the time since the start; those of a ticker come every TICK_S seconds at most."""

    say_line: Callable[[str], None]
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def say(self, text: str) -> None:
        self.say_line(f"[{self.elapsed_s:7.1f} s] {text}")

    def ticker(self, label: Callable[[], str]) -> Tick:
        """Says how many requests are done; `label` is asked each time."""
        last = time.monotonic()

        def tick(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= TICK_S:
                last = time.monotonic()
                self.say(f"{label()}: {done} of {total} requests")

        return tick


def table_header() -> str:
    return _row([heading for heading, _ in _COLUMNS])


def table_line(line: Line) -> str:
    chunk = "-" if line.chunk is None else str(line.chunk)
    counts = (line.num_prompts, line.num_tokens, line.num_differing_tokens, line.num_differing_rows)
    rest = [
        f"{line.acceptance_len:.2f}",
        str(line.num_draft_rows),
        str(line.num_cached_tokens),
        f"{line.elapsed_s:.1f}",
    ]
    return _row([line.drafters, str(line.parallel), chunk, line.cache, *map(str, counts), *rest])


def _row(cells: Sequence[str]) -> str:
    padded = [
        cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True)
    ]
    return "  ".join(padded).rstrip()


def difference_text(line: Line, difference: Difference, prompts: Sequence[NamedPrompt]) -> str:
    """Which combination, prompt and token, and both logits."""
    name = prompts[difference.trace % len(prompts)].name
    return f"{line.name}: prompt {name!r}, output token {difference.output}\n{difference.explanation}"


def json_result(
    plan: Plan, results: Sequence[tuple[Line, Difference | None]], prompts: Sequence[NamedPrompt], elapsed_s: float
) -> dict[str, Any]:
    """All lines, their totals and the first difference; to be written as JSON."""
    lines = [line for line, _ in results]
    first = next(((line, difference) for line, difference in results if difference is not None), None)
    return {
        "plan": asdict(plan),
        "num_reference_prompts": len(prompts),
        "combinations": [
            {**asdict(line), "never_drafted": line.never_drafted, "never_resumed": line.never_resumed} for line in lines
        ],
        "totals": {
            "num_combinations": len(lines),
            "num_prompts": sum(line.num_prompts for line in lines),
            "num_tokens": sum(line.num_tokens for line in lines),
            "num_differing_tokens": sum(line.num_differing_tokens for line in lines),
            "num_differing_rows": sum(line.num_differing_rows for line in lines),
            "num_draft_rows": sum(line.num_draft_rows for line in lines),
            "num_never_resumed": sum(line.never_resumed for line in lines),
            "num_never_drafted": sum(line.never_drafted for line in lines),
            "elapsed_s": elapsed_s,
        },
        "first_difference": None if first is None else difference_text(first[0], first[1], prompts),
    }
