# SPDX-License-Identifier: Apache-2.0
"""What `tandem bench decode` prints: by prompt, by kind of prompt, the parts of a round, joint rounds."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tandem_backend.benchmarks.decode import NUM_JOINT, DecodeFigures, JointRepeat
from tandem_backend.benchmarks.engine_runs import Run
from tandem_backend.benchmarks.table import table
from tandem_backend.engine.times import PARTS
from tandem_backend.types import acceptance_len

NO_STORES = (
    "none: drafters forget a text with its request; what stays warm is the router's knowledge of costs and of how "
    "often scores are right"
)


def decode_result(figures: DecodeFigures, names: Sequence[str], kinds: Mapping[str, str]) -> dict[str, Any]:
    """The figures as a JSON object; rates in tokens/s after the first token, medians over repeats."""
    prompts = [_prompt(names[i], kinds[names[i]], pairs) for i, pairs in figures.pairs.items()]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt["kind"], []).append(prompt)
    if len(by_kind) > 1:
        by_kind["all"] = prompts
    sides = zip(*(pair for pairs in figures.pairs.values() for pair in pairs), strict=True)
    return {
        "stores": NO_STORES,
        "left_out": figures.left_out,
        "prompts": prompts,
        "kinds": [_kind(kind, members) for kind, members in by_kind.items()],
        "rounds": {side: _round(runs) for side, runs in zip(("plain", "speculative"), sides, strict=True)},
        "joint": _joint(figures.joint),
    }


def _prompt(name: str, kind: str, pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    plain, speculative = zip(*pairs, strict=True)
    return {
        "id": name,
        "kind": kind,
        "num_tokens": len(plain[0].token_ids[0]),
        "plain_tokens_per_s": statistics.median(run.tokens_per_s for run in plain),
        "speculative_tokens_per_s": statistics.median(run.tokens_per_s for run in speculative),
        # A pair runs in turns, so a slow spell of the machine hits both of its sides.
        "speedup": statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in pairs),
        **_round(speculative),
    }


def _round(runs: Sequence[Run]) -> dict[str, float]:
    """Means over all rounds of the runs, which had one sequence each."""
    num_rounds = sum(run.times.num_rounds for run in runs)
    parts = {f"{part}_ms": sum(getattr(run.times, f"{part}_ms") for run in runs) / num_rounds for part in PARTS}
    round_ms = sum(parts.values())
    return {
        "acceptance_len": acceptance_len(sum(run.num_tokens for run in runs), num_rounds),
        "rows": sum(run.times.num_rows for run in runs) / num_rounds,
        "round_ms": round_ms,
        **parts,
        "host_share": parts["host_ms"] / round_ms,
    }


def _kind(kind: str, prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def median(key: str) -> float:
        return statistics.median(float(prompt[key]) for prompt in prompts)

    return {
        "kind": kind,
        "num_prompts": len(prompts),
        "plain_tokens_per_s": median("plain_tokens_per_s"),
        "speculative_tokens_per_s": median("speculative_tokens_per_s"),
        "acceptance_len": median("acceptance_len"),
        "median_speedup": median("speedup"),
        "min_speedup": min(prompt["speedup"] for prompt in prompts),
    }


def _joint(repeats: Sequence[JointRepeat]) -> dict[str, Any]:
    def rate(runs: Sequence[Run]) -> float:
        return sum(run.num_tokens for run in runs) / sum(run.decode_s for run in runs)

    return {
        "num_sequences": NUM_JOINT,
        "one_tokens_per_s": statistics.median(rate(repeat.alone) for repeat in repeats),
        "joint_tokens_per_s": statistics.median(rate(repeat.together) for repeat in repeats),
        "ratio": statistics.median(rate(repeat.together) / rate(repeat.alone) for repeat in repeats),
    }


def render_decode(result: Mapping[str, Any]) -> str:
    joint = result["joint"]
    notes = [f"stores that could raise figures: {result['stores']}"]
    if result["left_out"]:
        notes.insert(0, f"left out, their texts are too short: {', '.join(result['left_out'])}")
    prompt_keys = ("id", "num_tokens", "plain_tokens_per_s", "speculative_tokens_per_s", "speedup", "acceptance_len")
    part_keys = ("round_ms", *(f"{part}_ms" for part in PARTS))
    kind_keys = tuple(result["kinds"][0])
    sides = [{"side": side, **values} for side, values in result["rounds"].items()]
    return "\n\n".join(
        [
            _table(result["prompts"], (*prompt_keys, *part_keys)),
            _table(result["kinds"], kind_keys),
            _table(sides, ("side", "acceptance_len", "rows", *part_keys, "host_share")),
            f"{joint['num_sequences']} sequences in joint rounds: {joint['joint_tokens_per_s']:.1f} tokens/s in all, "
            f"one alone {joint['one_tokens_per_s']:.1f}: {joint['ratio']:.2f}x",
            *notes,
        ]
    )


def _table(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    headings = [
        key.replace("_tokens_per_s", " tok/s").replace("num_", "").replace("_len", "").replace("_", " ") for key in keys
    ]
    return table(headings, [[row[key] for key in keys] for row in rows])
