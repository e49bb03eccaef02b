# SPDX-License-Identifier: Apache-2.0
"""Figures of a load run: percentiles of what users wait for, tokens a second, errors."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tandem_client.load.runner import LoadRun, Record

PERCENTILES = (50, 90, 99)


def figures(run: LoadRun) -> dict[str, Any]:
    """One level as a JSON object. Percentiles are of requests that were answered, None where there was none.

    ttft_ms: from sending a request to its first token. inter_token_ms: between tokens; those of one response share the
    time since the response before, so its sum is the time after the first token. request_ms: to the answer's end.
    """
    answered = [record for record in run.records if record.error is None and record.chunks]
    errors = Counter(record.error for record in run.records if record.error is not None)
    num_tokens = sum(record.num_tokens for record in answered)
    return {
        "level": run.level.label,
        "concurrency": run.level.concurrency,
        "rate_per_s": run.level.rate_per_s,
        "num_requests": len(run.records),
        "num_errors": sum(errors.values()),
        "errors": dict(sorted(errors.items())),
        "elapsed_s": run.elapsed_s,
        "requests_per_s": len(answered) / run.elapsed_s,
        "num_tokens": num_tokens,
        "tokens_per_s": num_tokens / run.elapsed_s,
        "ttft_ms": percentiles([1e3 * (record.chunks[0][0] - record.sent_s) for record in answered]),
        "inter_token_ms": percentiles([gap for record in answered for gap in inter_token_ms(record)]),
        "request_ms": percentiles([1e3 * (record.ended_s - record.sent_s) for record in answered]),
    }


def inter_token_ms(record: Record) -> list[float]:
    """One value for every token after the first response's."""
    return [
        1e3 * (now - before) / number for (before, _), (now, number) in pairwise(record.chunks) for _ in range(number)
    ]


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 by linear interpolation, and the mean."""
    if not values:
        return {**{f"p{p}": None for p in PERCENTILES}, "mean": None}
    found = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    return {**named, "mean": float(np.mean(values))}


HEADINGS = (
    *("load", "requests", "errors", "tokens/s", "requests/s"),
    *(f"TTFT p{p} ms" for p in PERCENTILES),
    *(f"inter-token p{p} ms" for p in PERCENTILES),
)


def render(levels: Sequence[dict[str, Any]]) -> str:
    """The table of all levels."""
    rows = [list(HEADINGS)]
    for level in levels:
        numbers = [level["tokens_per_s"], level["requests_per_s"]]
        numbers += [level[name][f"p{p}"] for name in ("ttft_ms", "inter_token_ms") for p in PERCENTILES]
        counts = [level["level"], str(level["num_requests"]), str(level["num_errors"])]
        rows.append([*counts, *("-" if number is None else f"{number:.2f}" for number in numbers)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for level in levels:
        for kind, number in level["errors"].items():
            lines.append(f"load {level['level']}: {number} x {kind}")
    return "\n".join(lines)
