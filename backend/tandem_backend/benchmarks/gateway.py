# SPDX-License-Identifier: Apache-2.0
"""What the gateway costs: the same streams through `tandem gateway` and straight over gRPC, of one Triton server."""

import asyncio
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from tandem_client import AsyncTandemClient

from tandem_backend.benchmarks.engine_runs import TextsDifferError
from tandem_backend.benchmarks.table import table
from tandem_backend.errors import TandemError
from tandem_backend.verification.prompts import NamedPrompt

START_TIMEOUT_S = 30.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """A running `tandem gateway`."""

    host: str
    port: int
    pid: int


@contextmanager
def running_gateway(grpc_url: str) -> Iterator[GatewayProcess]:
    """Start a gateway on a free port, and end it. Raises TandemError where it does not start."""
    run = "from tandem_client.cli import main; main()"
    # The same prompts come again and again: all answers are to be greedy.
    command = [sys.executable, "-c", run, "gateway", "--port", "0", "--backend-url", grpc_url, "--no-regenerate"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    killer = threading.Timer(START_TIMEOUT_S, process.kill)
    killer.start()
    try:
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line)
            if found := re.search(r"http://([\d.]+):(\d+)", line):
                break
        else:
            raise TandemError(f"the gateway did not start: {''.join(told)[-500:]}")
        killer.cancel()
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield GatewayProcess(found[1], int(found[2]), process.pid)
    finally:
        killer.cancel()
        process.terminate()
        process.wait()


@dataclass(frozen=True, slots=True)
class _Run:
    """Streams that ran together, from the first request sent to the last one's end."""

    texts: tuple[str, ...]
    num_tokens: int
    elapsed_s: float
    gateway_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


class GatewayBench:
    """`streams` requests at once, by either way in turns; this process is the client of both."""

    def __init__(
        self, grpc_url: str, gateway: GatewayProcess, prompts: Sequence[NamedPrompt], max_tokens: int, streams: int
    ) -> None:
        self._grpc_url, self._gateway = grpc_url, gateway
        self._process = psutil.Process(gateway.pid)
        self._prompts = [named.prompt for named in prompts if named.prompt.token_ids is None]
        self._max_tokens, self._streams = max_tokens, streams

    def run(self, repeats: int, say: Say) -> dict[str, Any]:
        """Medians over repeats. Raises TextsDifferError where the two ways give different texts."""
        pairs = []
        for repeat in range(repeats + 1):
            say(f"{self._streams} streams: {f'repeat {repeat} of {repeats}' if repeat else 'warming up'}")
            first = max(repeat - 1, 0) * self._streams
            prompts = [self._prompts[(first + i) % len(self._prompts)] for i in range(self._streams)]
            ways = (self._by_grpc, self._by_http)
            runs = {way: self._timed(way, prompts) for way in (ways if repeat % 2 == 0 else reversed(ways))}
            direct, gateway = (runs[way] for way in ways)
            if direct.texts != gateway.texts:
                raise TextsDifferError(
                    "the gateway gave other texts than gRPC; figures of different texts mean nothing"
                )
            if repeat:
                pairs.append((direct, gateway))
        return {
            "streams": self._streams,
            "grpc_tokens_per_s": statistics.median(direct.tokens_per_s for direct, _ in pairs),
            "gateway_tokens_per_s": statistics.median(gateway.tokens_per_s for _, gateway in pairs),
            # A pair runs back to back, so a slow spell of the machine hits both.
            "ratio": statistics.median(gateway.tokens_per_s / direct.tokens_per_s for direct, gateway in pairs),
            "gateway_cpu_ms_per_token": 1e3
            * sum(gateway.gateway_cpu_s for _, gateway in pairs)
            / sum(gateway.num_tokens for _, gateway in pairs),
        }

    def _timed(self, way: Callable[[Any], Awaitable[tuple[str, int]]], prompts: Sequence[Any]) -> _Run:
        async def ask_all() -> list[tuple[str, int]]:
            return await asyncio.gather(*map(way, prompts))

        before, begun = self._cpu_s(), time.perf_counter()
        answers = asyncio.run(ask_all())
        elapsed_s = time.perf_counter() - begun
        texts, counts = zip(*answers, strict=True)
        return _Run(texts, sum(counts), elapsed_s, self._cpu_s() - before)

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    async def _by_grpc(self, prompt: Any) -> tuple[str, int]:
        options: dict[str, Any] = {"max_tokens": self._max_tokens, "sampling": {"ignore_eos": True}}
        if prompt.messages is not None:
            options |= {"reasoning_format": "field", "tool_choice": "none" if prompt.tools else None}  # the gateway's
        async with AsyncTandemClient(self._grpc_url) as client:
            answer = await client.complete(prompt.text, messages=prompt.messages, tools=prompt.tools, **options)
        return answer.text, answer.usage.num_output_tokens

    async def _by_http(self, prompt: Any) -> tuple[str, int]:
        """A client of plain sockets, so that what is measured is the gateway."""
        path = "completions" if prompt.text is not None else "chat/completions"
        asked = {"prompt": prompt.text} if prompt.text is not None else {"messages": list(prompt.messages)}
        tools = {"tools": list(prompt.tools), "tool_choice": "none"} if prompt.tools else {}
        options = {"stream_options": {"include_usage": True}, "max_tokens": self._max_tokens, "ignore_eos": True}
        body = json.dumps({"model": "tandem", "stream": True, **options, **asked, **tools}).encode()
        reader, writer = await asyncio.open_connection(self._gateway.host, self._gateway.port)
        headers = {
            "Host": "gateway",
            "Content-Length": len(body),
            "Connection": "close",
            "X-Tandem-Regenerate": 0,  # prompts come again, and each time for the same answer
        }
        head = [f"POST /v1/{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        writer.write("\r\n".join(head).encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise TandemError(f"gateway: {status.decode()} {(await reader.read()).decode()[-500:]}")
        text, num_tokens = "", 0
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise TandemError(f"gateway: {event['error']['message']}")
            for choice in event["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
        writer.close()
        if not num_tokens:  # usage comes last
            raise TandemError("gateway: a stream ended early")
        return text, num_tokens


def render_gateway(result: Mapping[str, Any]) -> str:
    headings = ["streams", "gRPC tokens/s", "gateway tokens/s", "ratio", "gateway's CPU ms a token"]
    columns = ("grpc_tokens_per_s", "gateway_tokens_per_s", "ratio", "gateway_cpu_ms_per_token")
    return table(headings, [[str(row["streams"]), *(row[name] for name in columns)] for row in result["rows"]])
