# SPDX-License-Identifier: Apache-2.0
"""How the prompts that are being read share a round's rows."""

from collections.abc import Sequence

OLDEST_SHARE = 4  # the oldest prompt gets one row in so many


def share_rows(num_pending: Sequence[int], priorities: Sequence[int], budget: int) -> list[int]:
    """Rows for each prompt, oldest first; together min(budget, all that is pending).

    The oldest gets a quarter of the budget whatever else waits, so each prompt is read to its end some time. The rest
    goes to the shortest of the most urgent ones: a short question is answered while a long document is being read.
    Among equals that is the order in which they came.
    """
    rows = [0] * len(num_pending)
    order = sorted(range(len(rows)), key=lambda i: (priorities[i], num_pending[i], i))
    oldest = next((i for i, pending in enumerate(num_pending) if pending), None)
    if oldest is None:
        return rows
    rows[oldest] = min(num_pending[oldest], -(-budget // OLDEST_SHARE))
    left = budget - rows[oldest]
    for i in order:
        added = min(num_pending[i] - rows[i], left)
        rows[i] += added
        left -= added
    return rows
