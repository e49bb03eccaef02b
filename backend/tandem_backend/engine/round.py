# SPDX-License-Identifier: Apache-2.0
"""One round: propose, cut, forward, accept, commit. The algorithm of the engine on one page."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from tandem_backend.engine.cache.prefix_cache import PrefixCache
from tandem_backend.engine.cache.taking import AnchorTaker
from tandem_backend.engine.choose import NO_TOKEN, Choice, choose
from tandem_backend.engine.draft_tree import Accepted, DraftTree, accept, anchor_tree
from tandem_backend.engine.drafters.base import CommittedRows
from tandem_backend.engine.drafting import Drafting
from tandem_backend.engine.proposal_tree import FORCED
from tandem_backend.engine.scheduler import ScheduledRows
from tandem_backend.engine.sequence import Generation
from tandem_backend.engine.sequence import Sequence as EngineSequence
from tandem_backend.engine.times import RoundTimes, Stopwatch
from tandem_backend.errors import InternalError, InvalidRequestError, TandemError
from tandem_backend.model.batch import RowBatch, SequenceRows, build_batch
from tandem_backend.model.decoder import ForwardResult
from tandem_backend.model.passes import Passes
from tandem_backend.model.state import ModelState
from tandem_backend.types import EngineCounters, StepOutput

RecordLogits = Callable[[str, int, Tensor], None]  # request id, index of the output token, the row that chose it


@dataclass(frozen=True, slots=True)
class Step:
    """What a round did to one request: the rows to commit and the output, if it has one."""

    path: Sequence[int]
    accepted: Accepted | None  # the walk through the draft tree; None: a prompt chunk
    output: StepOutput | None
    gap_s: float | None = None  # since the request's tokens before these


@dataclass(slots=True)
class RoundRunner:
    """The model's passes, its state and its drafters; knows nothing of queues and sessions."""

    passes: Passes
    state: ModelState
    drafting: Drafting
    cache: PrefixCache
    record_logits: RecordLogits | None = None
    times: RoundTimes = field(default_factory=RoundTimes)
    counters: EngineCounters = field(default_factory=EngineCounters)
    anchors: AnchorTaker = field(init=False)

    def __post_init__(self) -> None:
        self.anchors = AnchorTaker(self.passes, self.state, self.drafting, self.cache)
        self.counters.drafter_tokens.update(dict.fromkeys([*self.drafting.drafters, FORCED], (0, 0)))

    def run(self, scheduled: Sequence[ScheduledRows]) -> list[Step]:
        """One pass over the rows of all scheduled requests; their sequences come out longer."""
        watch, spent = Stopwatch(), RoundTimes(num_rounds=1)
        drafted = self.drafting.propose(scheduled)
        spent.draft_ms = watch.lap_ms()
        batch = build_batch([_batch_rows(*item) for item in zip(scheduled, drafted.trees, strict=True)])
        spent.num_rows = batch.num_rows
        spent.host_ms = watch.lap_ms()
        result = self.passes.forward(batch)
        spent.verify_ms = watch.lap_ms()
        choices = choose(result.logits, scheduled, drafted.trees, result.best)
        steps = [_accept(*item) for item in zip(scheduled, drafted.trees, choices, strict=True)]
        spent.accept_ms = watch.lap_ms()
        taken = self.anchors.commit(result, batch, scheduled, [step.path for step in steps])
        spent.commit_ms = watch.lap_ms()
        self._observe(scheduled, steps, batch, result)
        self.anchors.keep(taken)
        self.drafting.learn(drafted, scheduled, [step.accepted for step in steps], spent)
        spent.host_ms += watch.lap_ms()
        self.times.add(spent)
        self._count(drafted.trees, steps, spent)
        return steps

    def leave(self, sequence: EngineSequence) -> None:
        """A sequence is going: what it computed may serve others."""
        if sequence.is_sound:
            self.anchors.keep_end(sequence)
        self.drafting.end(sequence.slot)

    def _count(self, trees: Sequence[DraftTree | None], steps: Sequence[Step], spent: RoundTimes) -> None:
        counters = self.counters
        counters.num_rounds += 1
        counters.round_rows.observe(spent.num_rows)
        counters.round_sequences.observe(len(steps))
        counters.round_s.observe(spent.total_ms / 1e3)
        for tree, step in zip(trees, steps, strict=True):
            num_tokens = len(step.output.token_ids) if step.output is not None else 0
            counters.num_output_tokens += num_tokens
            if step.gap_s is not None and num_tokens:
                counters.inter_token_s.observe(step.gap_s / num_tokens, num_tokens)
            if tree is not None:
                counters.acceptance_len.observe(len(step.path))
                _count_drafts(counters.drafter_tokens, tree, step.path)

    def _observe(
        self, scheduled: Sequence[ScheduledRows], steps: Sequence[Step], batch: RowBatch, result: ForwardResult
    ) -> None:
        """Show the drafters what was committed, and the recorder which logits chose each token."""
        observing = [i for i, rows in enumerate(scheduled) if self.drafting.observes(rows.generation)]
        if observing:
            committed = []
            for i, hidden in zip(observing, _kept_hidden(result, batch, steps, observing), strict=True):
                sequence = scheduled[i].generation.sequence
                end = sequence.num_computed
                start = end - len(steps[i].path)
                next_ids = sequence.token_ids[start + 1 : end + 1]
                committed.append(CommittedRows(sequence.slot, start, hidden, next_ids, sequence.block_table))
            self.drafting.observe([scheduled[i] for i in observing], committed)
        if self.record_logits is not None:
            self._record_all(scheduled, steps, batch, result.logits)

    def _record_all(
        self, scheduled: Sequence[ScheduledRows], steps: Sequence[Step], batch: RowBatch, logits: Tensor
    ) -> None:
        first = 0
        for rows, step, (start, end) in zip(scheduled, steps, pairwise(batch.starts), strict=True):
            num_logits = rows.num_prompt_logits if rows.num_prompt_rows else end - start
            if step.output is not None:
                self._record(rows, step, logits[first : first + num_logits])
            first += num_logits

    def _record(self, rows: ScheduledRows, step: Step, logits: Tensor) -> None:
        assert self.record_logits is not None
        assert step.output is not None
        generation, tokens = rows.generation, step.output.token_ids
        nodes = ([-1] if rows.num_prompt_rows else step.path)[: len(tokens)]
        for n, node in enumerate(nodes):
            index = generation.num_output - len(tokens) + n
            self.record_logits(generation.request.request_id, index, logits[node].to("cpu", copy=True))


def _kept_hidden(
    result: ForwardResult, batch: RowBatch, steps: Sequence[Step], observing: Sequence[int]
) -> tuple[Tensor, ...]:
    """The kept rows of these sequences, [rows, hidden_size] each: parts of one tensor that holds nothing else."""
    rows = [batch.starts[i] + node for i in observing for node in steps[i].path]  # ascending, as paths are
    if len(rows) == batch.num_rows and not result.is_lent:
        kept = result.hidden
    elif rows and rows[-1] - rows[0] == len(rows) - 1:
        kept = result.hidden[rows[0] : rows[-1] + 1].clone()
    else:
        kept = result.hidden[rows]
    if len(observing) == 1:
        return (kept,)
    parts: tuple[Tensor, ...] = kept.split_with_sizes([len(steps[i].path) for i in observing])
    return parts


def _batch_rows(rows: ScheduledRows, tree: DraftTree | None) -> SequenceRows:
    sequence = rows.generation.sequence
    start = sequence.num_computed
    if tree is None:
        chunk = sequence.token_ids[start : start + rows.num_prompt_rows]
        logit_rows = range(len(chunk) - rows.num_prompt_logits, len(chunk))
        return SequenceRows(chunk, start, sequence.slot, sequence.block_table, logit_rows=logit_rows)
    return SequenceRows(tree.token_ids, start, sequence.slot, sequence.block_table, parents=tree.parents)


def _accept(rows: ScheduledRows, tree: DraftTree | None, choice: Choice) -> Step:
    """Walk the tree with the target's choices and append them, up to the token that ends the request."""
    generation, now = rows.generation, time.time_ns()
    sequence, stats = generation.sequence, generation.stats
    stats.num_rounds += 1
    generation.prompt_logprobs += choice.prompt_logprobs
    if tree is None and not rows.ends_prompt:
        sequence.num_computed += rows.num_prompt_rows
        return Step(range(rows.num_prompt_rows), None, None)
    if generation.sampling.fault is not None:
        return _refused(generation)
    accepted = accept(tree if tree is not None else anchor_tree(sequence.token_ids[-1]), choice.token_ids)
    if accepted.token_ids[-1] == NO_TOKEN:
        # What was accepted before goes out as in plain decoding; the next round ends the request.
        accepted = Accepted(accepted.path[:-1], accepted.token_ids[:-1])
        if not accepted.path:
            return _refused(generation)
    num_kept, text, reason = generation.take(accepted.token_ids)
    if not num_kept:
        return _refused(generation)
    # A kept token's own row is not computed yet, so as many rows are kept as tokens: a stop inside an accepted run cuts
    # the kept state with the text.
    path = range(rows.num_prompt_rows) if tree is None else accepted.path[:num_kept]
    sequence.num_computed += len(path)
    stats.num_output_tokens = generation.num_output
    gap_s = (now - stats.last_token_time_ns) / 1e9 if stats.last_token_time_ns else None
    stats.first_token_time_ns = stats.first_token_time_ns or now
    stats.last_token_time_ns = now
    if tree is not None:
        stats.num_decode_rounds += 1
        stats.num_draft_tokens += tree.num_nodes - 1
        stats.num_accepted_tokens += len(path) - 1
        _count_drafts(stats.drafter_tokens, tree, path)
    output = StepOutput(
        request_id=generation.request.request_id,
        text=text,
        token_ids=tuple(accepted.token_ids[:num_kept]),
        logprobs=tuple(choice.logprobs[node] for node in accepted.path[:num_kept]),
        top_logprobs=tuple(choice.top_logprobs[node] for node in accepted.path[:num_kept] if choice.top_logprobs),
        prompt_logprobs=generation.take_prompt_logprobs(),
        finish_reason=reason,
        rounds=generation.trees.tell(stats.num_decode_rounds, tree, accepted, num_kept) if generation.trees else (),
    )
    return Step(path, accepted if tree is not None else None, output, gap_s)


def _refused(generation: Generation) -> Step:
    """The end of a request that can't have a next token. Nothing of the round is kept, so its session stays whole."""
    fault, error = generation.sampling.fault, _no_token()
    if fault is not None:
        error = InternalError(f"the request's grammar failed: {type(fault).__name__}: {fault}")
    return Step((), None, StepOutput(request_id=generation.request.request_id, error=error))


def _no_token() -> TandemError:
    return InvalidRequestError(
        "sampling: the request's options and grammar together leave no token that could come next (bad_words, "
        "allowed_token_ids, logit_bias, no_repeat_ngram_size, min_tokens)"
    )


def _count_drafts(drafter_tokens: dict[str, tuple[int, int]], tree: DraftTree, path: Sequence[int]) -> None:
    for node in range(1, tree.num_nodes):
        drafted, accepted = drafter_tokens.get(tree.drafters[node], (0, 0))
        drafter_tokens[tree.drafters[node]] = (drafted + 1, accepted + (node in path))
