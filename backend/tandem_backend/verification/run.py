# SPDX-License-Identifier: Apache-2.0
"""Runs the gate: plain decoding first, then all combinations, in this process or on a server."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tandem_client import TandemClient

from tandem_backend.config import MIB
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.model.config import load_model_config
from tandem_backend.verification.cached_targets import (
    DISK,
    SESSION,
    WARM,
    DiskTarget,
    SessionTarget,
    WarmTarget,
    turns_of,
)
from tandem_backend.verification.comparison import Trace
from tandem_backend.verification.engine_target import EngineTarget, draft_config, plain_config
from tandem_backend.verification.gate import COLD, PLAIN, Difference, Line, Plan, Target, verify
from tandem_backend.verification.prompts import NamedPrompt
from tandem_backend.verification.report import Progress
from tandem_backend.verification.server_target import ServerTarget

CACHE_BYTES = 512 * MIB  # so that nothing goes during a run of some hundred prompts
TEST_DRAFTERS = ("wrong", "half", "oracle")
MODEL_DRAFTERS = ("lookup", "mtp")

KINDS = {COLD: EngineTarget, WARM: WarmTarget, DISK: DiskTarget}

Results = Iterator[tuple[Line, Difference | None]]


def verify_engine(
    checkpoint: Path, prompts: Sequence[NamedPrompt], max_tokens: int, plan: Plan, progress: Progress
) -> Results:
    """Results as they come. Raises TandemError."""
    plain = EngineTarget(plain_config(checkpoint), prompts, max_tokens)
    reference = _decode_plainly(plain, progress)
    references = dict.fromkeys(plan.caches, reference)
    sessions: list[NamedPrompt] = []
    if SESSION in plan.caches:
        sessions = turns_of(prompts, reference)
        turns = _decode_plainly(EngineTarget(plain_config(checkpoint), sessions, max_tokens), progress)
        references[SESSION] = turns
    known = [trace for traces in references.values() for trace in traces]
    num_tokens = max_tokens + max(len(trace.prompt_ids) for trace in known)
    names = {name for names in plan.drafters for name in names.split("+")} - {PLAIN}
    outputs: dict[tuple[int, ...], list[list[int]]] = {}
    for trace in known:
        outputs.setdefault(trace.prompt_ids, []).append(trace.token_ids)
    firsts = {prompt_ids: found[0] for prompt_ids, found in outputs.items()}
    vocab_size = load_model_config(checkpoint).vocab_size
    scripted = {name: ScriptedDrafter(name, firsts, vocab_size, outputs) for name in TEST_DRAFTERS if name in names}

    def open_target(chunk: int | None, cache: str) -> Target:
        assert chunk is not None, "an engine of this process has a chunk size"
        config = draft_config(
            checkpoint,
            sorted(names - scripted.keys()),
            chunk=chunk,
            parallel=max(plan.parallel),
            num_tokens=num_tokens,
            prefix_cache_bytes=0 if cache == COLD else CACHE_BYTES,
        )
        if cache == SESSION:
            return SessionTarget(config, sessions, max_tokens, scripted)
        return KINDS[cache](config, prompts, max_tokens, scripted)

    return _run(plan, references, open_target, progress)


def verify_server(
    client: TandemClient, prompts: Sequence[NamedPrompt], max_tokens: int, plan: Plan, progress: Progress
) -> Results:
    """The same over a server. Raises TandemError."""
    target = ServerTarget(client, prompts, max_tokens)
    reference = _decode_plainly(target, progress)
    return _run(plan, dict.fromkeys(plan.caches, reference), lambda chunk, cache: target, progress)


def _decode_plainly(target: Target, progress: Progress) -> list[Trace]:
    reference = target.decode(PLAIN, 1, (), progress.ticker(lambda: "plain decoding"))
    num_tokens = sum(len(trace.token_ids) for trace in reference)
    progress.say(f"plain decoding: {len(reference)} prompts, {num_tokens} tokens")
    return reference


def _run(
    plan: Plan,
    references: Mapping[str, Sequence[Trace]],
    open_target: Callable[[int | None, str], Target],
    progress: Progress,
) -> Results:
    done = 0
    tick = progress.ticker(lambda: f"combination {done + 1} of {plan.num_combinations}")
    for result in verify(plan, references, open_target, tick):
        done += 1
        yield result
