# SPDX-License-Identifier: Apache-2.0
"""A sweep as a picture: throughput, and what users wait for, by load. Needs the extra `tandem-client[plot]`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem_client.load.figures import PERCENTILES


def check_matplotlib() -> None:
    """Raises ImportError saying how to get it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("matplotlib is missing: pip install 'tandem-client[plot]'") from error


def plot(levels: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Write a PNG with one point a level."""
    from matplotlib.figure import Figure  # not pyplot, which wants a display

    figure = Figure(figsize=(13, 4), layout="constrained")
    throughput, first, between = figure.subplots(1, 3)
    places = range(len(levels))
    throughput.plot(places, [level["tokens_per_s"] for level in levels], "o-", color="black", label="tokens/s")
    throughput.set_title("throughput, tokens/s")
    for axes, key, name in (
        (first, "ttft_ms", "time to first token, ms"),
        (between, "inter_token_ms", "inter-token, ms"),
    ):
        for percentile in PERCENTILES:
            values = [level[key][f"p{percentile}"] for level in levels]
            axes.plot(
                places, [float("nan") if value is None else value for value in values], "o-", label=f"p{percentile}"
            )
        axes.set_title(name)
        axes.legend()
    unit = "requests at a time" if levels[0]["rate_per_s"] is None else "requests/s"
    for axes in (throughput, first, between):
        axes.set_xticks(places, [level["level"] for level in levels])
        axes.set_xlabel(unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)
