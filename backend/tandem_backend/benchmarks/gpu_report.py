# SPDX-License-Identifier: Apache-2.0
"""The table and the picture of `tandem bench gpu`."""

from pathlib import Path
from typing import Any

from tandem_backend.benchmarks.table import table


def render_gpu(result: dict[str, Any]) -> str:
    """Everything measured, as text."""
    round_, memory = result["round"], result["memory"]
    lines = [
        f"{result['model']} on {result['device']}: {result['step_bytes'] / 1e9:.2f} GB of weights a step, copy "
        f"{result['copy_gb_s']:.0f} GB/s, floor {result['floor_ms']:.3f} ms",
        "",
        table(
            ["rows", "forward ms", "share of floor", "commit ms", "cuBLAS and SDPA ms", "price"],
            [
                [str(s["rows"]), f"{s['forward_ms']:.3f}", s["share"], f"{s['commit_ms']:.3f}",
                 f"{s['library_ms']:.3f}", f"{s['price']:.3f}"]
                for s in result["steps"]
            ],
        ),
        "",
        table(
            ["prefill", "tokens/s", "ms"],
            [[str(p["tokens"]), round(p["tokens_s"]), p["ms"]] for p in result["prefill"]],
        ),
        "",
        table(
            ["context", "rows", "forward ms"],
            [[str(c["context"]), c["rows"], f"{c['forward_ms']:.3f}"] for c in result["contexts"]],
        ),
        "",
        table(
            ["attention, context", "rows", "us a layer"],
            [[str(a["context"]), a["rows"], f"{a['us']:.1f}"] for a in result["attention"]],
        ),
        "",
        f"a round of plain decoding with the host's work: {round_['round_ms']:.3f} ms, "
        f"{round_['ratio']:.3f} x its graphs",
        "memory: " + ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in memory.items()),
        f"loaded in {result['load_s']:.1f} s, {result['self_test_rows']} rows of the self-test bit-equal",
    ]  # fmt: skip
    return "\n".join(lines)


def draw_gpu(result: dict[str, Any], file: Path) -> None:
    """Milliseconds of a step by rows, ours beside the library's and the floor. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [step["rows"] for step in result["steps"]]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.plot(rows, [step["forward_ms"] for step in result["steps"]], marker="o", label="exact")
    axes.plot(rows, [step["library_ms"] for step in result["steps"]], marker="s", label="cuBLAS and SDPA")
    axes.axhline(result["floor_ms"], linestyle="--", color="gray", label="reading the weights at the copy rate")
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(n) for n in rows])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of a step")
    axes.set_ylabel("ms")
    axes.set_title(f"{result['model']} on {result['device']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
