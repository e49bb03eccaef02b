# SPDX-License-Identifier: Apache-2.0
"""The staircase verify(rows) that the router prices draft rows with."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import tandem_kernels as kernels

from tandem_backend.benchmarks.environment import provenance
from tandem_backend.benchmarks.passes import PassTimer, bushy_tree
from tandem_backend.model.decoder import Decoder

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def measure_verify_curve(checkpoint: Path, repeats: int, num_threads: int) -> dict[str, Any]:
    """The table that EngineConfig.verify_curve names. Raises CheckpointError.

    Times never fall with more rows: where they do, it is noise, and a router that believed it would draft for it.
    """
    kernels.set_num_threads(num_threads)
    timer = PassTimer(Decoder(checkpoint), max(ROWS))
    measured = timer.median_ms({n: bushy_tree(n) for n in ROWS}, repeats)
    rising = accumulate((measured[n] for n in ROWS), max)
    return {
        "benchmark": "verify-curve",
        **provenance(num_threads),
        "checkpoint": checkpoint.name,
        "context_len": timer.context_len,
        "repeats": repeats,
        "rows": [{"rows": n, "milliseconds": ms} for n, ms in zip(ROWS, rising, strict=True)],
    }
