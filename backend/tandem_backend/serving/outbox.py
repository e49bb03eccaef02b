# SPDX-License-Identifier: Apache-2.0
"""What the engine thread leaves for the sender thread: outputs by request, joined while they wait, and calls."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tandem_backend.types import StepOutput, join_outputs

MAX_SENDER_SHARE = 0.007  # of a core, for the responses of all streams together
MAX_STRETCH = 5.0  # of the interval, however many streams there are


@dataclass(slots=True)
class _Waiting:
    """One request's outputs that are not sent, and from when on the next may be."""

    is_streaming: bool
    due_s: float = 0.0  # time.monotonic()
    outputs: list[StepOutput] = field(default_factory=list)

    @property
    def ready_s(self) -> float:
        if not self.outputs:
            return math.inf
        if self.outputs[-1].is_last:
            return 0.0
        return self.due_s if self.is_streaming else math.inf


class Outbox:
    """Keeps the sender's work off the engine thread: put() and call() never wait for it, however far it is behind.

    A response costs the server about as much as a pass of a small model over one row. So a stream's responses are at
    least `interval_s` apart, the first and the last excepted, and hold all that came meanwhile; the sender sleeps until
    one is due. They are further apart, up to MAX_STRETCH times, where sending the responses of all streams would take
    the sender more than MAX_SENDER_SHARE of a core. A request that doesn't stream is handed over as a whole.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: dict[str, _Waiting] = {}
        self._calls: list[Callable[[], None]] = []
        self._closed = False
        self._wakes_s = 0.0  # when the sender looks again by itself; 0: it isn't asleep
        self._cost_s = 0.0  # of the sender's time for a response, a running mean
        self._taken = (0, 0.0)  # how many outputs were taken last, and the sender thread's time then

    def open(self, request_id: str, *, is_streaming: bool) -> None:
        """A request will have outputs; all others' are dropped."""
        with self._changed:
            self._waiting[request_id] = _Waiting(is_streaming)

    def put(self, outputs: Iterable[StepOutput]) -> None:
        """Leave a round's outputs; after a request's last one the rest is dropped."""
        with self._changed:
            ready_s = math.inf
            for output in outputs:
                waiting = self._waiting.get(output.request_id)
                if waiting is None or (waiting.outputs and waiting.outputs[-1].is_last):
                    continue
                waiting.outputs.append(output)
                ready_s = min(ready_s, waiting.ready_s)
            if ready_s < self._wakes_s:
                self._changed.notify()

    def call(self, function: Callable[[], None]) -> None:
        """Let the sender call `function`."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify()

    def close(self) -> None:
        """Hand over what is left, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, until_s: float) -> tuple[list[StepOutput], list[Callable[[], None]]] | None:
        """The outputs that are due, one a request and before an error another, and the calls; None after the end.

        Waits for them until `until_s` (time.monotonic()). One thread, the sender, calls this.
        """
        self._learn_cost()
        with self._changed:
            while not self._calls and not self._closed:
                ready_s = min((waiting.ready_s for waiting in self._waiting.values()), default=math.inf)
                self._wakes_s = min(ready_s, until_s)
                delay_s = self._wakes_s - time.monotonic()
                if delay_s <= 0:
                    break
                self._changed.wait(delay_s)
            self._wakes_s = 0.0
            outputs, calls = self._take_ready(), self._calls
            self._calls = []
            self._taken = (0 if calls else len(outputs), time.thread_time())  # a call is no response
            return None if self._closed and not outputs and not calls else (outputs, calls)

    def _learn_cost(self) -> None:
        num_outputs, begun_s = self._taken
        if num_outputs:
            spent_s = (time.thread_time() - begun_s) / num_outputs
            self._cost_s += 0.1 * (spent_s - self._cost_s)

    def _due_after_s(self) -> float:
        num_streams = sum(waiting.is_streaming for waiting in self._waiting.values())
        wanted_s = num_streams * self._cost_s / MAX_SENDER_SHARE
        return min(max(self._interval_s, wanted_s), MAX_STRETCH * self._interval_s)

    def _take_ready(self) -> list[StepOutput]:
        now = time.monotonic()
        due_s = now + self._due_after_s()
        taken = []
        for request_id, waiting in list(self._waiting.items()):
            if waiting.ready_s > now and not (self._closed and waiting.outputs):
                continue
            taken += join(waiting.outputs)
            if taken[-1].is_last:
                del self._waiting[request_id]
            else:
                waiting.outputs, waiting.due_s = [], due_s
        return taken


def join(outputs: Sequence[StepOutput]) -> list[StepOutput]:
    """One output for all; an error, which takes the place of an output, stays by itself."""
    given = [output for output in outputs if output.error is None]
    if len(given) > 1:
        given = [join_outputs(given)]
    return given + [output for output in outputs if output.error is not None]
