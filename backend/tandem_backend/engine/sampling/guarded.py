# SPDX-License-Identifier: Apache-2.0
"""GuardedConstraint: a constraint that raises ends its own request, not the round that all requests share."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

from torch import Tensor

from tandem_backend.engine.sampling.constraint import Constraint

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Fault:
    """What the first call that raised said; one a request, shared by all forks of its constraint."""

    error: Exception | None = None


@dataclass(slots=True)
class GuardedConstraint:
    """A `Constraint` over another one. After a fault nothing of that is called again, and nothing may come next.

    Whoever runs the round looks at `fault` and ends the request.
    """

    state: Constraint
    fault: Fault = field(default_factory=Fault)

    def fork(self) -> Self:
        return type(self)(self._call(self.state.fork, self.state), self.fault)

    def advance(self, token_id: int) -> bool:
        return self._call(lambda: self.state.advance(token_id), False)

    def fill_mask(self, mask: Tensor) -> None:
        self._call(lambda: self.state.fill_mask(mask), None)
        if self.fault.error is not None:
            mask.zero_()

    def settle(self, token_id: int) -> int | None:
        return self._call(lambda: self.state.settle(token_id), None)

    def forced(self) -> Sequence[int]:
        return self._call(self.state.forced, ())

    def is_finished(self) -> bool:
        return self._call(self.state.is_finished, False)

    def _call(self, method: Callable[[], T], otherwise: T) -> T:
        if self.fault.error is not None:
            return otherwise
        try:
            return method()
        except Exception as error:
            logger.exception("a request's constraint failed")
            self.fault.error = error
            return otherwise
