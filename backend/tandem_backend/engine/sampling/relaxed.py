# SPDX-License-Identifier: Apache-2.0
"""Relaxed acceptance: takes a draft that is likely enough, though the target chose another token. For measurement only.

It breaks the promise: the text depends on what was drafted. So it is off unless the engine's configuration allows it.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from tandem_backend.types import SamplingParams


def relax(distribution: Tensor, choice: int, token_ids: Sequence[int], params: SamplingParams) -> int:
    """The token to take at a node with drafted children; `choice` unless a child is likely enough.

    distribution: [vocab] float32, logits after penalties, masks and filters; token_ids: of the children. A child is
    taken if it is among the relax_rank likeliest tokens and has at least relax_tau times the largest probability; of
    several the likeliest.
    """
    assert params.relax_tau is not None, "only requests that relax come here"
    if choice in token_ids:
        return choice
    best = max(token_ids, key=lambda token_id: float(distribution[token_id]))
    rank = 1 + int((distribution > distribution[best]).sum())
    is_near = float(distribution[best]) >= float(distribution.max()) + math.log(params.relax_tau)
    return best if is_near and rank <= params.relax_rank else choice
