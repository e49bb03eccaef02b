# SPDX-License-Identifier: Apache-2.0
"""Passes of a decoder over its state: launched op by op, or (graphs.py) replayed as captured at load."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem_backend.model.batch import RowBatch
from tandem_backend.model.decoder import Decoder, ForwardResult
from tandem_backend.model.state import ModelState

Paths = Sequence[Sequence[int]]  # by sequence: local row indices that it keeps of a pass, root first, maybe empty


def nothing() -> None:
    """For a caller with no work to do while a pass runs."""


class Passes(Protocol):
    """How a decoder runs its passes. The bits are the same whichever way."""

    def forward(self, batch: RowBatch, meanwhile: Callable[[], None] = nothing) -> ForwardResult:
        """A finished pass. `meanwhile` is called once, while the device works where it works on its own.

        The result's logits and hidden states are valid until the next pass.
        """

    def commit(
        self, result: ForwardResult, batch: RowBatch, paths: Paths, offsets: Sequence[int] | None = None
    ) -> None:
        """Write what each sequence keeps of the last pass. A device may still be writing on return.

        A path may be committed in parts: `offsets` says how many of each sequence's rows were committed before.
        """

    def num_bytes(self) -> int:
        """Device memory that running passes so takes beyond weights and state."""

    def row_costs(self) -> list[tuple[int, float]]:
        """Row counts, ascending, and the milliseconds of such a pass, where that was measured; else empty."""


@dataclass(frozen=True, slots=True)
class LaunchedPasses:
    """Every op is launched when its turn comes."""

    decoder: Decoder
    state: ModelState

    def forward(self, batch: RowBatch, meanwhile: Callable[[], None] = nothing) -> ForwardResult:
        meanwhile()
        return self.decoder.forward(batch, self.state)

    def commit(
        self, result: ForwardResult, batch: RowBatch, paths: Paths, offsets: Sequence[int] | None = None
    ) -> None:
        self.decoder.commit(result, batch, paths, self.state, offsets)

    def num_bytes(self) -> int:
        return 0

    def row_costs(self) -> list[tuple[int, float]]:
        return []
