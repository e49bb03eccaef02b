# SPDX-License-Identifier: Apache-2.0
"""A recorder that replays by running again: captured passes with their fixed memory and padding, without a GPU."""

from collections.abc import Callable

import torch
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.graphs import GraphLimits, GraphPasses
from tandem_backend.model.state import ModelState
from torch import Tensor


class Rerun:
    """Counts replays."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay

    def wait(self) -> None:
        pass

    def host_ints(self, count: int) -> Tensor:
        return torch.full((count,), 2**30, dtype=torch.int32)

    def num_bytes(self) -> int:
        return 0


def rerun_passes(decoder: Decoder, state: ModelState) -> GraphPasses:
    """Captured passes of up to 128 rows and any context of the decoder's."""
    return GraphPasses(decoder, state, GraphLimits(128, decoder.config.max_position, max_seconds=60), Rerun())
