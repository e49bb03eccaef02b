# SPDX-License-Identifier: Apache-2.0
"""Targets whose requests meet state that earlier ones left: prompts asked before, turns of sequences, a restart."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tandem_backend.config import EngineConfig
from tandem_backend.engine import PreparedRequest
from tandem_backend.engine.drafters.base import Drafter
from tandem_backend.types import Prompt, Request
from tandem_backend.verification.comparison import Trace
from tandem_backend.verification.engine_target import EngineTarget
from tandem_backend.verification.gate import Tick
from tandem_backend.verification.prompts import NamedPrompt

WARM, SESSION, DISK = "warm", "session", "disk"
FOLLOW_UP = 16  # tokens that a second turn adds
TURNS = ("first turn", "second turn", "sent again", "edited")


class WarmTarget(EngineTarget):
    """Asks every prompt once before it is compared, with the same drafters: some need state of their own to resume."""

    def decode(self, drafter: str, parallel: int, reference: Sequence[Trace], tick: Tick) -> list[Trace]:
        """See `gate.Target`."""
        super().decode(drafter, parallel, reference, tick)
        return super().decode(drafter, parallel, reference, tick)


class DiskTarget(EngineTarget):
    """Asks every prompt in an engine that is shut down then, and compares what its successor answers."""

    def __init__(
        self,
        config: EngineConfig,
        prompts: Sequence[NamedPrompt],
        max_tokens: int,
        extra_drafters: Mapping[str, Drafter] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        config = config.model_copy(update={"disk_cache": Path(self._folder.name)})
        super().__init__(config, prompts, max_tokens, extra_drafters)

    def decode(self, drafter: str, parallel: int, reference: Sequence[Trace], tick: Tick) -> list[Trace]:
        """See `gate.Target`."""
        super().decode(drafter, parallel, reference, tick)
        self._engine.close()
        self._engine = self._open_engine()
        return super().decode(drafter, parallel, reference, tick)


def turns_of(prompts: Sequence[NamedPrompt], reference: Sequence[Trace]) -> list[NamedPrompt]:
    """All that a SessionTarget asks, each with all tokens before its answer: TURNS of every prompt.

    The second turn adds the end of the next prompt; an edited conversation does so in the middle of the first answer.
    """
    turns = []
    for i, (named, first) in enumerate(zip(prompts, reference, strict=True)):
        follow_up = reference[(i + 1) % len(reference)].prompt_ids[-FOLLOW_UP:]
        answered = (*first.prompt_ids, *first.token_ids, *follow_up)
        edited = (*first.prompt_ids, *first.token_ids[: len(first.token_ids) // 2], *follow_up)
        for turn, token_ids in zip(TURNS, (first.prompt_ids, answered, answered, edited), strict=True):
            # Kept tokens have no logprobs: a turn is not told those of the turns before.
            params = replace(named.params, prompt_logprobs=None)
            turns.append(NamedPrompt(f"{named.name}, {turn}", Prompt(token_ids=token_ids), params))
    return turns


class SessionTarget(EngineTarget):
    """Prompts as `turns_of` gives them: the first two turns in a sequence, the others by themselves after it."""

    def decode(self, drafter: str, parallel: int, reference: Sequence[Trace], tick: Tick) -> list[Trace]:
        """See `gate.Target`."""
        count = len(self._prompts) * -(-parallel * len(TURNS) // len(self._prompts))
        prepared = [self._prepare_turn(i, drafter, reference) for i in range(count)]
        expected = {str(i): reference[i % len(reference)].row_bits for i in range(count)}
        # Turn by turn over all conversations, so that what is sent again meets a sequence that has ended.
        order = sorted(range(count), key=lambda i: i % len(TURNS))
        traces = self._run([prepared[i] for i in order], parallel, expected, tick)
        by_index = dict(zip(order, traces, strict=True))
        return [by_index[i] for i in range(count)]

    def _prepare_turn(self, index: int, drafter: str, reference: Sequence[Trace]) -> PreparedRequest:
        conversation, turn = divmod(index, len(TURNS))
        whole = reference[index % len(reference)].prompt_ids
        if turn >= 2:
            return self._prepare(index, drafter, self._max_tokens)
        first = reference[(index - turn) % len(reference)]
        kept = len(first.prompt_ids) + len(first.token_ids) if turn else 0
        request = Request(
            request_id=str(index),
            prompt=Prompt(token_ids=whole[kept:]),
            params=self._params(self._prompts[index % len(self._prompts)], drafter, self._max_tokens),
            sequence_id=conversation + 1,
            sequence_start=turn == 0,
            sequence_end=turn == 1,
        )
        return self._engine.prepare(request)
