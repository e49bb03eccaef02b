# SPDX-License-Identifier: Apache-2.0
"""A drafter that raises costs speed, never a text."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from engine.engine_driver import EngineDriver, plain_config
from tandem_backend.engine.drafters.base import CommittedRows, DraftContext, Proposal


class RaisingDrafter:
    name = "raising"

    def __init__(self, method: str) -> None:
        self.method, self.calls = method, 0

    def begin(self, key: int) -> None:
        pass

    def end(self, key: int) -> None:
        pass

    def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        return [Proposal() for _ in contexts] if self.method != "propose" else self._fail()

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        if self.method == "observe":
            self._fail()

    def _fail(self) -> list[Proposal]:
        self.calls += 1
        raise RuntimeError("out of ideas")


