# SPDX-License-Identifier: Apache-2.0
"""Speculation beside plain decoding of the same prompts by the same engine, and four sequences beside one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tandem_backend.benchmarks.engine_runs import (
    ALL_PROMPT_ROWS,
    Run,
    TextsDifferError,
    bench_config,
    run_in_turns,
    run_together,
)
from tandem_backend.engine import Engine, PreparedRequest
from tandem_backend.engine.drafting import NO_DRAFTER
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import Request, SamplingParams
from tandem_backend.verification.prompts import NamedPrompt

NUM_JOINT = 4
MIN_TOKENS = 8  # the rate of a shorter text is noise

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class JointRepeat:
    """The same tokens, decoded one text after the other and in joint rounds.

    Joint rounds last until the first text ends, and later tokens are drafted better than early ones: so each text's run
    alone counts up to where the joint rounds came.
    """

    alone: list[Run]
    together: list[Run]


@dataclass(slots=True)
class DecodeFigures:
    """Everything measured, by prompt index: pairs of a plain and a speculative run."""

    pairs: dict[int, list[tuple[Run, Run]]] = field(default_factory=dict)
    joint: list[JointRepeat] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # names of prompts with texts below MIN_TOKENS


class DecodeBench:
    """An engine with drafters; a request that names "none" decodes plainly. Raises TandemError."""

    def __init__(
        self,
        checkpoint: Path,
        prompts: Sequence[NamedPrompt],
        drafters: str,
        max_tokens: int,
        num_threads: int,
        say: Say,
    ) -> None:
        self.prompts, self.drafters, self.max_tokens, self.say = prompts, drafters, max_tokens, say
        config = bench_config(checkpoint, drafters.split("+"), num_threads, NUM_JOINT)
        # All prompts of a group in its first round: a short text must not end before the others have begun.
        self.engine = Engine(config.model_copy(update={"max_prefill_rows": ALL_PROMPT_ROWS}))
        self._texts: dict[int, tuple[int, ...]] = {}
        self._ids = count()

    def run(self, repeats: int) -> DecodeFigures:
        """Raises TextsDifferError as soon as a text is not plain decoding's."""
        figures = DecodeFigures()
        for i, named in enumerate(self.prompts):
            self.say(f"warming up: prompt {i + 1} of {len(self.prompts)}")
            plain, _ = self._pair(i, is_plain_first=True)
            if len(plain.token_ids[0]) < MIN_TOKENS:
                figures.left_out.append(named.name)
            else:
                figures.pairs[i] = []
        if not figures.pairs:
            raise InvalidRequestError(f"prompts: no text has {MIN_TOKENS} tokens; nothing to measure")
        for repeat in range(repeats):
            for i, pairs in figures.pairs.items():
                self.say(f"repeat {repeat + 1} of {repeats}: prompt {i + 1} of {len(self.prompts)}")
                pairs.append(self._pair(i, is_plain_first=(repeat + i) % 2 == 0))
        groups = self._joint_groups(figures.pairs)
        for repeat in range(repeats):
            self.say(f"joint rounds: repeat {repeat + 1} of {repeats}")
            figures.joint.append(self._joint_repeat(groups, is_alone_first=repeat % 2 == 0))
        return figures

    def _pair(self, index: int, *, is_plain_first: bool) -> tuple[Run, Run]:
        order = (NO_DRAFTER, self.drafters) if is_plain_first else (self.drafters, NO_DRAFTER)
        runs = dict(zip(order, run_in_turns(self.engine, [self._prepare(index, d) for d in order]), strict=True))
        for drafter, run in runs.items():
            self._check_text(index, run.token_ids[0], f"{drafter}, 1 in parallel")
        return runs[NO_DRAFTER], runs[self.drafters]

    def _joint_groups(self, pairs: Mapping[int, object]) -> list[list[int]]:
        """Texts of like lengths together, because a group is timed until its first text ends; a rest is left out."""
        order = sorted(pairs, key=lambda i: -len(self._texts[i]))
        size = max(NUM_JOINT, len(order) // NUM_JOINT * NUM_JOINT)
        filled = [order[i % len(order)] for i in range(size)]
        return [filled[i : i + NUM_JOINT] for i in range(0, size, NUM_JOINT)]

    def _joint_repeat(self, groups: Sequence[Sequence[int]], *, is_alone_first: bool) -> JointRepeat:
        measured = JointRepeat([], [])
        for group in groups:
            order = [*([index] for index in group), group] if is_alone_first else [group, *([i] for i in group)]
            runs = [self._decode(indices, self.drafters) for indices in order]
            together = runs.pop() if is_alone_first else runs.pop(0)
            counts = together.tokens_by_id.values()
            measured.alone.extend(run.first_tokens(count) for run, count in zip(runs, counts, strict=True))
            measured.together.append(together)
        return measured

    def _decode(self, indices: Sequence[int], drafter: str) -> Run:
        """Decode prompts together; their texts are held to those of the first time, which were decoded plainly."""
        requests = [self._prepare(index, drafter) for index in indices]
        run = run_together(self.engine, requests)
        for i, token_ids in zip(indices, run.token_ids, strict=True):
            self._check_text(i, token_ids, f"{drafter}, {len(indices)} in parallel")
        return run

    def _prepare(self, index: int, drafter: str) -> PreparedRequest:
        named = self.prompts[index]
        params = SamplingParams(max_tokens=self.max_tokens, drafter=drafter)
        try:
            return self.engine.prepare(Request(request_id=str(next(self._ids)), prompt=named.prompt, params=params))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompt {named.name!r}: {error}") from error

    def _check_text(self, index: int, token_ids: tuple[int, ...], side: str) -> None:
        expected = self._texts.setdefault(index, token_ids)
        if token_ids != expected:
            same = zip(expected, token_ids, strict=False)
            at = next((n for n, (a, b) in enumerate(same) if a != b), min(len(expected), len(token_ids)))
            raise TextsDifferError(
                f"prompt {self.prompts[index].name!r}: with {side} the text differs from plain decoding's at output "
                f"token {at} (tandem verify tells more); figures of different texts mean nothing"
            )
