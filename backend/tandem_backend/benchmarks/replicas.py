# SPDX-License-Identifier: Apache-2.0
"""What a second replica brings: the same requests through one proxy before one replica and through one before two."""

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from tandem_client import AsyncTandemClient, TandemClientError

from tandem_backend.benchmarks.engine_runs import TextsDifferError
from tandem_backend.benchmarks.table import table
from tandem_backend.errors import TandemError
from tandem_backend.verification.prompts import NamedPrompt

Say = Callable[[str], None]


class Proxy(Protocol):
    """A proxy before some replicas; both as "HOST:PORT"."""

    grpc_url: str

    def num_requests(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class _Run:
    token_ids: list[tuple[int, ...]]
    elapsed_s: float
    shares: list[int]  # requests of each replica

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.elapsed_s


class ReplicaBench:
    """`streams` requests at a time go through each proxy in turns; nothing is cached from run to run."""

    def __init__(self, proxies: Sequence[Proxy], prompts: Sequence[NamedPrompt], max_tokens: int, streams: int) -> None:
        self._proxies, self._prompts = proxies, prompts
        self._max_tokens, self._streams = max_tokens, streams
        self._salts = count()

    def run(self, repeats: int, say: Say) -> list[dict[str, Any]]:
        """Figures by proxy, medians over repeats. Raises TextsDifferError, and TandemError of a request."""
        rounds = []
        for repeat in range(repeats + 1):
            say(f"repeat {repeat} of {repeats}" if repeat else "warming up")
            runs = [self._measure(proxy) for proxy in self._proxies]
            if any(run.token_ids != runs[0].token_ids for run in runs):
                raise TextsDifferError("the replicas gave different tokens; figures of different texts mean nothing")
            if repeat:
                rounds.append(runs)
        return [
            {
                "replicas": len(by_proxy[0].shares),
                "tokens_per_s": statistics.median(run.tokens_per_s for run in by_proxy),
                "ratio": statistics.median(
                    run.tokens_per_s / first.tokens_per_s for run, (first, *_) in zip(by_proxy, rounds, strict=True)
                ),
                "largest_share": max(max(run.shares) / sum(run.shares) for run in by_proxy),
            }
            for by_proxy in zip(*rounds, strict=True)
        ]

    def _measure(self, proxy: Proxy) -> _Run:
        before = proxy.num_requests()
        try:
            token_ids, elapsed_s = asyncio.run(self._ask_all(proxy.grpc_url))
        except TandemClientError as error:
            raise TandemError(f"{proxy.grpc_url}: {error}") from error
        return _Run(token_ids, elapsed_s, [number - before[url] for url, number in proxy.num_requests().items()])

    async def _ask_all(self, url: str) -> tuple[list[tuple[int, ...]], float]:
        places, salt = asyncio.Semaphore(self._streams), f"run {next(self._salts)}"
        async with AsyncTandemClient(url) as client:
            begun = time.perf_counter()
            answers = [self._ask(client, named, salt, places) for named in self._prompts]
            return list(await asyncio.gather(*answers)), time.perf_counter() - begun

    async def _ask(
        self, client: AsyncTandemClient, named: NamedPrompt, salt: str, places: asyncio.Semaphore
    ) -> tuple[int, ...]:
        prompt = named.prompt
        async with places:
            answer = await client.complete(
                prompt.text,
                messages=prompt.messages,
                input_ids=prompt.token_ids,
                tools=prompt.tools,
                max_tokens=self._max_tokens,
                sampling={"ignore_eos": True, "cache_salt": salt},
            )
        return answer.token_ids


def render_replicas(result: Mapping[str, Any]) -> str:
    headings = ["replicas", "tokens/s", "over one", "largest share of requests"]
    keys = ("tokens_per_s", "ratio", "largest_share")
    return table(headings, [[str(row["replicas"]), *(row[key] for key in keys)] for row in result["rows"]])
