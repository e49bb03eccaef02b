# SPDX-License-Identifier: Apache-2.0
"""Sends requests at a concurrency or at a rate, and notes when each chunk of each answer came."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Unpack

from tandem_client.errors import ConnectionFailedError, RequestTimeoutError, ServerError, TandemClientError
from tandem_client.payload import GenerateOptions
from tandem_client.types import Chunk


@dataclass(frozen=True, slots=True)
class Level:
    """How requests come: so many at any time, or so many a second whether or not earlier ones are answered."""

    concurrency: int | None = None
    rate_per_s: float | None = None

    @property
    def label(self) -> str:
        return str(self.concurrency) if self.rate_per_s is None else f"{self.rate_per_s:g}/s"


@dataclass(slots=True)
class Record:
    """One request as the client saw it; times are seconds of time.perf_counter()."""

    sent_s: float
    ended_s: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens
    error: str | None = None  # what kind: a status such as UNAVAILABLE, CONNECTION, TIMEOUT or INCOMPLETE

    @property
    def num_tokens(self) -> int:
        return sum(number for _, number in self.chunks)


class GeneratesChunks(Protocol):
    """AsyncTandemClient as far as it is used here."""

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncIterator[Chunk]: ...


@dataclass(slots=True)
class LoadRun:
    """The requests of one level that count."""

    level: Level
    records: list[Record]
    elapsed_s: float  # from the first one sent to the last one's end


# A text prompt, or None where the options have messages or input_ids.
LoadRequest = tuple[str | None, GenerateOptions]


class LoadRunner:
    """Sends `requests` in turn, from the first again when they are used up. One event loop drives it."""

    def __init__(self, client: GeneratesChunks, requests: Sequence[LoadRequest], seed: int = 0) -> None:
        self._client = client
        self._requests = requests
        self._seed = seed
        self._num_sent = 0

    async def run(self, level: Level, num_requests: int, num_warmup: int) -> LoadRun:
        """Send `num_warmup` requests that don't count, then `num_requests` that do."""
        if num_warmup:
            await self._send_all(level, num_warmup)
        return await self._send_all(level, num_requests)

    async def _send_all(self, level: Level, num_requests: int) -> LoadRun:
        records: list[Record] = []
        begun = time.perf_counter()
        if level.rate_per_s is None:
            assert level.concurrency is not None
            left = iter(range(num_requests))

            async def send_in_turn() -> None:
                for _ in left:
                    await self._send(records, time.perf_counter())

            await asyncio.gather(*(send_in_turn() for _ in range(level.concurrency)))
        else:
            # Poisson arrivals: independent users; the same ones at every run.
            gaps = random.Random(self._seed)
            async with asyncio.TaskGroup() as group:
                due_s = time.perf_counter()
                for _ in range(num_requests):
                    await asyncio.sleep(max(due_s - time.perf_counter(), 0))
                    group.create_task(self._send(records, due_s))
                    due_s += gaps.expovariate(level.rate_per_s)
        return LoadRun(level, records, time.perf_counter() - begun)

    async def _send(self, records: list[Record], due_s: float) -> None:
        """A request counts from when it was due: a client that lags must not make the server look faster."""
        prompt, options = self._requests[self._num_sent % len(self._requests)]
        self._num_sent += 1
        record = Record(due_s)
        records.append(record)
        try:
            async for chunk in self._client.generate(prompt, **options):
                if chunk.token_ids:
                    record.chunks.append((time.perf_counter(), len(chunk.token_ids)))
        except TandemClientError as error:
            record.error = _kind(error)
        record.ended_s = time.perf_counter()


def _kind(error: TandemClientError) -> str:
    if isinstance(error, ServerError):
        return error.code
    if isinstance(error, ConnectionFailedError):
        return "CONNECTION"
    return "TIMEOUT" if isinstance(error, RequestTimeoutError) else "INCOMPLETE"
