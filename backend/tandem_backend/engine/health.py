# SPDX-License-Identifier: Apache-2.0
"""Health: whether an engine that failed is worth going on with."""

from dataclasses import dataclass


@dataclass(slots=True)
class Health:
    """Counts failures in a row. One may be bad luck; `max_failed_rounds` of them and only a reload helps."""

    max_failed_rounds: int
    num_failed: int = 0  # since the last round that went well

    @property
    def is_broken(self) -> bool:
        """Stays so: a broken engine runs no round that could go well."""
        return self.num_failed >= self.max_failed_rounds

    def failed(self) -> None:
        self.num_failed += 1

    def went_well(self) -> None:
        if not self.is_broken:
            self.num_failed = 0
