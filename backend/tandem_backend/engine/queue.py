# SPDX-License-Identifier: Apache-2.0
"""RequestQueue: who waits, who may start next, and who has waited for too long."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tandem_backend.config import EngineConfig
from tandem_backend.engine.sequence import PreparedRequest, Session
from tandem_backend.errors import UnavailableError

MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue, with the session it belongs to."""

    prepared: PreparedRequest
    session: Session | None


@dataclass(slots=True)
class RequestQueue:
    """Requests in the order in which they came.

    `first` picks by rank, the time since which a request could run, shifted by its priority: a request is treated as if
    it had come `priority_aging_s` later for each step of its priority. So nobody waits for ever, whatever comes after.
    A turn ranks by the end of the turn before it: a sequence that sends many turns at once holds up no other.
    """

    config: EngineConfig
    mean_duration_s: float = 0.0  # of requests, from start to end
    _items: list[Waiting] = field(default_factory=list)
    _next_due_s: float = math.inf  # nothing is overdue before

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(tuple(self._items))

    def check_room(self, num_running: int, num_new: int = 1) -> None:
        """Raises UnavailableError with a hint when to retry where so many further requests are not taken."""
        if len(self._items) + num_running + num_new > self.config.max_active + self.config.max_queued:
            raise UnavailableError(
                f"the queue is full ({len(self._items)} waiting, {num_running} running)",
                retry_after_s=self.retry_after_s(num_running),
            )

    def retry_after_s(self, num_running: int) -> int:
        """Seconds until a running request is likely to end and leave its place."""
        return min(max(math.ceil(self.mean_duration_s / max(num_running, 1)), 1), MAX_RETRY_AFTER_S)

    def push(self, item: Waiting) -> None:
        if item.session is not None:
            item.session.num_waiting += 1
        self._items.append(item)
        self._next_due_s = min(self._next_due_s, self._due_s(item))

    def remove(self, item: Waiting) -> None:
        if item.session is not None:
            item.session.num_waiting -= 1
        self._items.remove(item)

    def find(self, request_id: str) -> Waiting | None:
        return next((item for item in self._items if item.prepared.request.request_id == request_id), None)

    def take_turns(self, session: Session) -> list[Waiting]:
        """Take out all that wait on a session."""
        taken = [item for item in self._items if item.session is session]
        for item in taken:
            self.remove(item)
        return taken

    def first(self, read: Collection[str] = ()) -> Waiting | None:
        """Who may start next; turns of one session wait for each other.

        read: the requests whose prompt is being computed for one of their choices: the others wait for its state.
        """
        best, best_rank, seen = None, math.inf, set()
        for item in self._items:
            session, rank = item.session, self._rank_s(item)
            if item.prepared.choice_of in read:
                continue
            if session is not None:
                if session.running is not None or id(session) in seen:
                    continue
                seen.add(id(session))
            if rank < best_rank:
                best, best_rank = item, rank
        return best

    def take_overdue(self, now_s: float) -> list[Waiting]:
        """Take out the requests that must not wait any longer: by their own deadline or queue_timeout_s."""
        if now_s < self._next_due_s:
            return []
        overdue = [item for item in self._items if self._due_s(item) <= now_s]
        for item in overdue:
            self.remove(item)
        self._next_due_s = min(map(self._due_s, self._items), default=math.inf)
        return overdue

    def learn_duration(self, duration_s: float) -> None:
        """Take note of how long a request ran."""
        weight = 0.1 if self.mean_duration_s else 1.0
        self.mean_duration_s += weight * (duration_s - self.mean_duration_s)

    def _rank_s(self, item: Waiting) -> float:
        since_s = item.prepared.arrival_s
        if item.session is not None:
            since_s = max(since_s, item.session.last_used_s)
        return since_s + self.config.priority_aging_s * item.prepared.request.priority

    def _due_s(self, item: Waiting) -> float:
        longest_s = self.config.queue_timeout_s or math.inf
        if item.prepared.is_later_choice:
            longest_s = math.inf  # it waits for its turn in a request that is being served
        return min(item.prepared.deadline_s, item.prepared.arrival_s + longest_s)
