# SPDX-License-Identifier: Apache-2.0
"""Decoding on a running Triton server through gRPC: token ids and the bits of their log-probabilities."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tandem_client import TandemClient, TandemClientError

from tandem_backend.errors import TandemError
from tandem_backend.verification.comparison import Trace, float_bits, show_bits
from tandem_backend.verification.gate import Tick
from tandem_backend.verification.prompts import NamedPrompt
from tandem_backend.verification.sampling import served_options

DEFAULT = "default"  # the drafters the server uses for a request that names none


class ServerTarget:
    """Each request is a stream of its own; `parallel` threads keep that many open."""

    def __init__(self, client: TandemClient, prompts: Sequence[NamedPrompt], max_tokens: int) -> None:
        self._client, self._prompts, self._max_tokens = client, prompts, max_tokens

    def decode(self, drafter: str, parallel: int, reference: Sequence[Trace], tick: Tick) -> list[Trace]:
        """See `gate.Target`. Raises TandemError naming the prompt that the server failed on."""
        prompts = [self._prompts[i % len(self._prompts)] for i in range(max(parallel, len(self._prompts)))]
        with ThreadPoolExecutor(parallel) as threads:
            running = [threads.submit(self._decode_one, prompt, drafter) for prompt in prompts]
            try:
                for done, future in enumerate(as_completed(running), start=1):
                    future.result()
                    tick(done, len(running))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in running]

    def explain(self, index: int, output: int, expected: Trace, got: Trace) -> str:
        """See `gate.Target`; a server gives the chosen token's log-probability, not the row."""
        return f"  {_side('plain', output, expected)}\n  {_side('here', output, got)}"

    def _decode_one(self, named: NamedPrompt, drafter: str) -> Trace:
        prompt, trace, text = named.prompt, Trace(), ""
        chunks = self._client.generate(
            prompt.text,
            messages=prompt.messages,
            input_ids=prompt.token_ids,
            tools=prompt.tools,
            max_tokens=self._max_tokens,
            logprobs=True,
            sampling=served_options(named.params) | ({} if drafter == DEFAULT else {"drafter": drafter}),
        )
        try:
            for chunk in chunks:
                if chunk.token_ids:
                    trace.add_round(chunk.token_ids)
                trace.row_bits += [float_bits(value) for value in chunk.logprobs or ()]
                trace.logprob_bits += [repr(top).encode() for top in chunk.top_logprobs or ()]
                text += chunk.text
                if chunk.finish_reason is not None:
                    trace.ending = f"{text}{chunk.finish_reason}".encode()
                if chunk.usage is not None:
                    trace.num_draft_tokens = chunk.usage.num_draft_tokens
                    trace.num_cached_tokens = chunk.usage.num_cached_tokens
        except TandemClientError as error:
            raise TandemError(f"prompt {named.name!r}, drafter {drafter!r}: {error}") from error
        return trace


def _side(name: str, output: int, trace: Trace) -> str:
    if output >= len(trace.token_ids):
        return f"{name + ':':<6} ended after {len(trace.token_ids)} tokens"
    return f"{name + ':':<6} token {trace.token_ids[output]}, log-probability {show_bits(trace.row_bits[output])}"
