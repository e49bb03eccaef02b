# SPDX-License-Identifier: Apache-2.0
"""A drafter that raises costs speed, never a text."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_driver import EngineDriver, Plain, engine_config, num_different
from tandem_backend.engine.drafters.base import CommittedRows, DraftContext, Proposal
from tandem_backend.types import Prompt, Request, SamplingParams


class RaisingDrafter:
    name = "raising"

    def __init__(self, method: str) -> None:
        self.method, self.num_raised = method, 0

    def begin(self, key: int) -> None:
        pass

    def end(self, key: int) -> None:
        pass

    def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        self._raise_in("propose")
        return [Proposal() for _ in contexts]

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        self._raise_in("observe")

    def _raise_in(self, method: str) -> None:
        if method == self.method:
            self.num_raised += 1
            raise RuntimeError("out of ideas")


@pytest.mark.parametrize("method", ["propose", "observe"])
def test_a_raising_drafter_is_left_out_and_no_request_suffers(
    method: str, hybrid: Path, plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = RaisingDrafter(method)
    driver = EngineDriver(engine_config(hybrid, drafters=("lookup",)), {"raising": drafter})
    prompt = (3, 5, 7, 3, 5)
    for n, names in enumerate(["raising+lookup", "lookup", "raising"]):
        params = SamplingParams(max_tokens=12, ignore_eos=True, drafter=names)
        driver.add(Request(request_id=str(n), prompt=Prompt(token_ids=prompt), params=params))
    driver.finish()
    reference = plain.run(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    assert [num_different(result, reference) for result in driver.results.values()] == [0, 0, 0]
    assert drafter.num_raised == 1
    assert "drafter 'raising' failed" in caplog.text
