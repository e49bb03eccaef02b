# SPDX-License-Identifier: Apache-2.0
"""What a soak sent and what became of it."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tandem_client import ServerError


class Wrong(AssertionError):
    """An answer that is not what the request gets alone."""


class Ledger:
    """Every request ends as exactly one of: done, left, refused, lost, wrong. Any thread may book."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ends: Counter[tuple[str, str]] = Counter()  # (kind, end) -> how often
        self.problems: list[str] = []
        self._reloads: list[tuple[float, float]] = []  # when a model was away, in time.monotonic()

    @contextmanager
    def request(self, kind: str) -> Iterator[None]:
        """Books how the block ended. A refusal is in order only beside a reload."""
        begun_s = time.monotonic()
        try:
            yield
        except Wrong as error:
            self._book(kind, "wrong", str(error))
        except ServerError as error:
            beside_reload = self._beside_reload(begun_s)
            self._book(kind, "refused", None if beside_reload else f"refused without a reload: {error}")
        except Exception as error:  # no answer, a broken connection, an end that is missing
            self._book(kind, "lost", f"{type(error).__name__}: {error}")
        else:
            self._book(kind, "done")

    @contextmanager
    def reload(self) -> Iterator[None]:
        begun_s = time.monotonic()
        with self._lock:
            self._reloads.append((begun_s, float("inf")))
        yield
        with self._lock:
            self._reloads[-1] = (begun_s, time.monotonic())

    def total(self, end: str) -> int:
        with self._lock:
            return sum(number for (_, each), number in self.ends.items() if each == end)

    def table(self) -> str:
        with self._lock:
            lines = [f"  {kind:12} {end:8} {number:6}" for (kind, end), number in sorted(self.ends.items())]
        return "\n".join(lines)

    def _book(self, kind: str, end: str, problem: str | None = None) -> None:
        with self._lock:
            self.ends[(kind, end)] += 1
            if problem is not None:
                self.problems.append(f"{kind}: {problem}")

    def _beside_reload(self, begun_s: float) -> bool:
        """Whether a model was away while the request ran. Sessions of the instance before are unknown to the next."""
        with self._lock:
            return any(until_s >= begun_s for _, until_s in self._reloads)
