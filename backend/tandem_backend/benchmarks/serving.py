# SPDX-License-Identifier: Apache-2.0
"""What serving costs: the same requests through gRPC of a Triton server and by the same engine in this process."""

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import psutil
from tandem_client import AsyncTandemClient, TandemClientError

from tandem_backend.benchmarks.engine_runs import TextsDifferError
from tandem_backend.benchmarks.table import table
from tandem_backend.config import EngineConfig
from tandem_backend.engine import Engine
from tandem_backend.errors import TandemError
from tandem_backend.types import Request, SamplingParams
from tandem_backend.verification.prompts import NamedPrompt

PAIRS = {1: 3, 8: 1}  # by number of streams, a repeat: a single stream's run is short, and its time says less

Say = Callable[[str], None]


@dataclass(slots=True)
class _Side:
    """Requests that ran together, from the first one sent to the last one's end."""

    token_ids: list[tuple[int, ...]] = field(default_factory=list)
    elapsed_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)  # by request, from the first one sent
    num_responses: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)  # of all threads, by process

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


class RunningServer(Protocol):
    """A Triton server process."""

    grpc_url: str

    @property
    def pid(self) -> int: ...


class ServingBench:
    """An engine in this process, configured as the server's, and a client of the server; they take turns."""

    def __init__(
        self,
        config: EngineConfig,
        server: RunningServer,
        prompts: Sequence[NamedPrompt],
        max_tokens: int,
        drafter: str | None,
    ) -> None:
        self._engine = Engine(config)
        self._url = server.grpc_url
        process = psutil.Process(server.pid)
        self._processes = {"client": [psutil.Process()], "server": [process], "stub": process.children(recursive=True)}
        self._prompts, self._max_tokens, self._drafter = prompts, max_tokens, drafter
        self._ids = count()

    def run(self, repeats: int, say: Say) -> list[dict[str, Any]]:
        """Figures by number of streams, medians over pairs. Raises TextsDifferError, and TandemError of a request."""
        return [self._measure(streams, repeats * pairs, say) for streams, pairs in PAIRS.items()]

    def _measure(self, streams: int, num_pairs: int, say: Say) -> dict[str, Any]:
        pairs = []
        for number in range(num_pairs + 1):
            say(f"{streams} streams: {f'{number} of {num_pairs}' if number else 'warming up'}")
            prompts = [self._prompts[(max(number - 1, 0) * streams + i) % len(self._prompts)] for i in range(streams)]
            sides = (self._in_process, self._through_grpc)
            runs = {side: self._timed(side, prompts) for side in (sides if number % 2 == 0 else reversed(sides))}
            engine, grpc = (runs[side] for side in sides)
            if engine.token_ids != grpc.token_ids:
                raise TextsDifferError(
                    "gRPC gave other tokens than the engine; figures of different texts mean nothing"
                )
            if number:
                pairs.append((engine, grpc))
        return {
            "streams": streams,
            "engine_tokens_per_s": statistics.median(engine.tokens_per_s for engine, _ in pairs),
            "grpc_tokens_per_s": statistics.median(grpc.tokens_per_s for _, grpc in pairs),
            # A pair runs back to back, so a slow spell of the machine hits both of its sides.
            "ratio": statistics.median(grpc.tokens_per_s / engine.tokens_per_s for engine, grpc in pairs),
            "engine_first_token_ms": _first_token_ms([engine for engine, _ in pairs]),
            "grpc_first_token_ms": _first_token_ms([grpc for _, grpc in pairs]),
            "tokens_per_response": sum(g.num_tokens for _, g in pairs) / sum(g.num_responses for _, g in pairs),
            # Where gRPC's time goes: unlike the rates, hardly changed by what else runs on the machine.
            "engine_cpu_ms_per_token": _cpu_ms_per_token([engine for engine, _ in pairs], "client"),
            "grpc_cpu_ms_per_token": {
                name: _cpu_ms_per_token([grpc for _, grpc in pairs], name) for name in self._processes
            },
        }

    def _timed(self, side: Callable[[Sequence[NamedPrompt]], _Side], prompts: Sequence[NamedPrompt]) -> _Side:
        before = self._cpu_s()
        run = side(prompts)
        run.cpu_s = {name: seconds - before[name] for name, seconds in self._cpu_s().items()}
        return run

    def _cpu_s(self) -> dict[str, float]:
        times = {name: [each.cpu_times() for each in group] for name, group in self._processes.items()}
        return {name: sum(each.user + each.system for each in group) for name, group in times.items()}

    def _in_process(self, prompts: Sequence[NamedPrompt]) -> _Side:
        params = SamplingParams(max_tokens=self._max_tokens, ignore_eos=True, drafter=self._drafter)
        requests = [Request(request_id=str(next(self._ids)), prompt=each.prompt, params=params) for each in prompts]
        token_ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
        side = _Side()
        begun = time.perf_counter()
        for request in requests:
            self._engine.add(self._engine.prepare(request))
        while self._engine.has_work():
            for output in self._engine.step():
                if output.error is not None:
                    raise output.error
                if output.token_ids and not token_ids[output.request_id]:
                    side.first_token_s.append(time.perf_counter() - begun)
                token_ids[output.request_id].extend(output.token_ids)
        side.elapsed_s = time.perf_counter() - begun
        side.token_ids = [tuple(ids) for ids in token_ids.values()]
        return side

    def _through_grpc(self, prompts: Sequence[NamedPrompt]) -> _Side:
        try:
            return asyncio.run(self._ask_all(prompts))
        except TandemClientError as error:
            raise TandemError(f"{self._url}: {error}") from error

    async def _ask_all(self, prompts: Sequence[NamedPrompt]) -> _Side:
        side = _Side()
        async with AsyncTandemClient(self._url) as client:
            await client.complete(input_ids=[0], max_tokens=1)  # connects
            begun = time.perf_counter()
            side.token_ids = await asyncio.gather(*(self._ask(client, named, side, begun) for named in prompts))
            side.elapsed_s = time.perf_counter() - begun
        return side

    async def _ask(self, client: AsyncTandemClient, named: NamedPrompt, side: _Side, begun: float) -> tuple[int, ...]:
        prompt = named.prompt
        token_ids: list[int] = []
        sampling = {"ignore_eos": True} | ({"drafter": self._drafter} if self._drafter is not None else {})
        async for chunk in client.generate(
            prompt.text,
            messages=prompt.messages,
            input_ids=prompt.token_ids,
            tools=prompt.tools,
            max_tokens=self._max_tokens,
            sampling=sampling,
        ):
            if chunk.token_ids and not token_ids:
                side.first_token_s.append(time.perf_counter() - begun)
            token_ids += chunk.token_ids
            side.num_responses += 1
        return tuple(token_ids)


def _first_token_ms(runs: Sequence[_Side]) -> float:
    return 1e3 * statistics.median(seconds for run in runs for seconds in run.first_token_s)


def _cpu_ms_per_token(runs: Sequence[_Side], process: str) -> float:
    return 1e3 * sum(run.cpu_s[process] for run in runs) / sum(run.num_tokens for run in runs)


def render_serving(result: Mapping[str, Any]) -> str:
    columns = {
        "engine tokens/s": "engine_tokens_per_s",
        "gRPC tokens/s": "grpc_tokens_per_s",
        "ratio": "ratio",
        "engine first token, ms": "engine_first_token_ms",
        "gRPC": "grpc_first_token_ms",
        "tokens a response": "tokens_per_response",
    }
    rates = [[str(row["streams"]), *(row[key] for key in columns.values())] for row in result["rows"]]
    speed = table(["streams", *columns], rates)
    headings = ["CPU ms a token", "engine alone", "stub (engine)", "server", "client"]
    costs = [
        [f"{row['streams']} streams", row["engine_cpu_ms_per_token"]]
        + [row["grpc_cpu_ms_per_token"][name] for name in ("stub", "server", "client")]
        for row in result["rows"]
    ]
    return f"{speed}\n\n{table(headings, costs)}"
