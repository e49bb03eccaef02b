# SPDX-License-Identifier: Apache-2.0
"""Decoding in this process: the engine with every logits row on the path recorded."""

import hashlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from tandem_backend.config import MIB, EngineConfig
from tandem_backend.engine import Engine, PreparedRequest
from tandem_backend.engine.drafters.base import Drafter
from tandem_backend.errors import InternalError, InvalidRequestError
from tandem_backend.model.config import load_model_config
from tandem_backend.model.state import KV_BLOCK, block_bytes
from tandem_backend.types import Request, SamplingParams, StepOutput, TopLogprobs
from tandem_backend.verification.comparison import Trace, float_bits
from tandem_backend.verification.explanation import explain_rows
from tandem_backend.verification.gate import PLAIN, Tick
from tandem_backend.verification.prompts import NamedPrompt

ANCHOR_GRID = 64  # tokens; prompts here are short


class RowRecorder:
    """The engine's `record_logits`. Keeps a digest of every row, and each request's first unexpected row itself."""

    def __init__(self) -> None:
        self.begin({})

    def begin(self, expected: Mapping[str, Sequence[bytes]]) -> None:
        """Forget all; `expected` are digests by request. A row past the end of its request's digests is unexpected."""
        self._expected = expected
        self.digests: dict[str, list[bytes]] = defaultdict(list)
        self.unexpected: dict[str, tuple[int, Tensor]] = {}

    def __call__(self, request_id: str, output: int, row: Tensor) -> None:
        digest = hashlib.blake2b(row.contiguous().numpy().data, digest_size=16).digest()
        self.digests[request_id].append(digest)
        expected = self._expected.get(request_id)
        if expected is None or request_id in self.unexpected or digest in expected[output : output + 1]:
            return
        self.unexpected[request_id] = (output, row.clone())


class EngineTarget:
    """An engine that decodes prompts under any drafter set it was given and any number of parallel requests."""

    def __init__(
        self,
        config: EngineConfig,
        prompts: Sequence[NamedPrompt],
        max_tokens: int,
        extra_drafters: Mapping[str, Drafter] | None = None,
    ) -> None:
        """Raises ConfigError or CheckpointError."""
        self._prompts, self._max_tokens = prompts, max_tokens
        self._recorder = RowRecorder()
        self._config, self._extra_drafters = config, extra_drafters
        self._engine = self._open_engine()

    def _open_engine(self) -> Engine:
        return Engine(self._config, extra_drafters=self._extra_drafters, record_logits=self._recorder)

    def decode(self, drafter: str, parallel: int, reference: Sequence[Trace], tick: Tick) -> list[Trace]:
        """See `gate.Target`. An empty `reference`: nothing to compare with yet. Raises TandemError."""
        requests = [self._prepare(i, drafter, self._max_tokens) for i in range(max(parallel, len(self._prompts)))]
        expected = {
            prepared.request.request_id: reference[i % len(reference)].row_bits
            for i, prepared in enumerate(requests)
            if reference
        }
        return self._run(requests, parallel, expected, tick)

    def explain(self, index: int, output: int, expected: Trace, got: Trace) -> str:
        """See `gate.Target`. Decodes the prompt plainly once more, for the row that only a digest was kept of."""
        at, row = self._recorder.unexpected.get(str(index), (output, None))
        assert at == output or row is None, "the recorder keeps the first unexpected row"
        plain = EngineTarget(plain_config(self._engine.config.checkpoint), self._prompts, self._max_tokens)
        expected_row = plain.row(index % len(self._prompts), output, expected)
        if row is None and output < len(got.token_ids):
            row = expected_row  # same bits, another token
        return explain_rows(output, expected, got, expected_row, row)

    def row(self, prompt: int, output: int, expected: Trace) -> Tensor | None:
        """The row of plain decoding at output token `output`; None where it ends before.

        Raises InternalError where plain decoding does not repeat itself.
        """
        if output >= len(expected.token_ids):
            return None
        request = self._prepare(prompt, PLAIN, output + 1)
        request_id = request.request.request_id
        self._run([request], 1, {request_id: expected.row_bits[:output]}, lambda done, total: None)
        at, row = self._recorder.unexpected[request_id]
        if self._recorder.digests[request_id] != expected.row_bits[: output + 1]:
            raise InternalError(f"plain decoding does not repeat itself: other bits at output token {at}")
        return row

    def _run(
        self, requests: Sequence[PreparedRequest], parallel: int, expected: Mapping[str, Sequence[bytes]], tick: Tick
    ) -> list[Trace]:
        self._recorder.begin(expected)
        traces = {p.request.request_id: Trace(prompt_ids=p.prompt_ids) for p in requests}
        texts = {request_id: hashlib.blake2b(digest_size=16) for request_id in traces}
        waiting, live = deque(requests), set[str]()
        while waiting or live:
            while waiting and len(live) < parallel:
                prepared = waiting.popleft()
                self._engine.add(prepared)
                live.add(prepared.request.request_id)
            for output in self._engine.step():
                trace = traces[output.request_id]
                if output.error is not None:
                    raise output.error
                if output.token_ids:
                    trace.add_round(output.token_ids)
                trace.logprob_bits += _logprob_bits(output)
                texts[output.request_id].update(_ending(output))
                if output.is_last:
                    assert output.stats is not None, "a request that ran has statistics"
                    trace.num_draft_tokens = output.stats.num_draft_tokens
                    trace.num_cached_tokens = output.stats.num_cached_tokens
                    trace.row_bits = self._recorder.digests[output.request_id]
                    trace.ending = texts[output.request_id].digest()
                    live.remove(output.request_id)
                    tick(len(requests) - len(waiting) - len(live), len(requests))
        return list(traces.values())

    def _params(self, named: NamedPrompt, drafter: str, max_tokens: int) -> SamplingParams:
        least = min(named.params.min_tokens, max_tokens)
        return replace(named.params, max_tokens=max_tokens, min_tokens=least, drafter=drafter)

    def _prepare(self, index: int, drafter: str, max_tokens: int) -> PreparedRequest:
        named = self._prompts[index % len(self._prompts)]
        params = self._params(named, drafter, max_tokens)
        try:
            return self._engine.prepare(Request(request_id=str(index), prompt=named.prompt, params=params))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompt {named.name!r}: {error}") from error


def _logprob_bits(output: StepOutput) -> list[bytes]:
    tops: Sequence[TopLogprobs] = output.top_logprobs or [()] * len(output.logprobs)
    return [float_bits(value) + _top_bits(top) for value, top in zip(output.logprobs, tops, strict=True)]


def _top_bits(top: TopLogprobs) -> bytes:
    return b"".join(token_id.to_bytes(4) + float_bits(value) for token_id, value in top)


def _ending(output: StepOutput) -> bytes:
    """What of an output is the same however the tokens fell into rounds, once all outputs stand together."""
    prompt = [entry and float_bits(entry.logprob) + _top_bits(entry.top) for entry in output.prompt_logprobs]
    return repr(prompt).encode() * bool(prompt) + output.text.encode() + str(output.finish_reason or "").encode()


def plain_config(checkpoint: Path) -> EngineConfig:
    """One request, one row a pass, nothing drafted: what everything else is held to."""
    return EngineConfig(
        checkpoint=checkpoint,
        drafters=(),
        self_test_rows=0,
        max_active=1,
        max_prefill_rows=1,
        joint_prefill_rows=1,
        prefix_cache_bytes=0,
    )


def draft_config(
    checkpoint: Path, drafters: Sequence[str], *, chunk: int, parallel: int, num_tokens: int, prefix_cache_bytes: int
) -> EngineConfig:
    """Every proposed node is verified, and `parallel` requests of up to `num_tokens` tokens fit beside what is cached.

    The self-test at load is left out: it is a small part of what follows.
    """
    blocks = 2 * parallel * -(-num_tokens // KV_BLOCK)  # twice: a drafter's own KV takes a layer's share at most
    return EngineConfig(
        checkpoint=checkpoint,
        drafters=tuple(drafters),
        router="always",
        row_budget=max(32, 2 * parallel),
        self_test_rows=0,
        max_active=parallel,
        max_sessions=max(parallel, 64),
        prefix_cache_bytes=prefix_cache_bytes,
        anchor_grid=ANCHOR_GRID,
        max_prefill_rows=chunk,
        joint_prefill_rows=chunk,
        kv_cache_bytes=max(MIB, blocks * block_bytes(load_model_config(checkpoint)) + prefix_cache_bytes),
    )
