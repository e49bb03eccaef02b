# SPDX-License-Identifier: Apache-2.0
"""Drafting: asks the drafters, merges and cuts what they propose, and learns what drafting costs and brings."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem_backend.engine.draft_tree import Accepted, DraftTree, anchor_tree
from tandem_backend.engine.drafters.base import CommittedRows, DraftContext, Drafter
from tandem_backend.engine.payoff import Payoff, Trust
from tandem_backend.engine.proposal_tree import ProposalTree
from tandem_backend.engine.router import Calibration, Router
from tandem_backend.engine.scheduler import ScheduledRows
from tandem_backend.engine.sequence import Generation
from tandem_backend.engine.times import RoundTimes
from tandem_backend.errors import InvalidRequestError

NO_DRAFTER = "none"
FREE_MS = 0.1  # a drafter cheaper than this is asked every round


@dataclass(frozen=True, slots=True)
class Drafted:
    """One round's trees and what they cost."""

    trees: list[DraftTree | None]  # by scheduled request; None: a prompt chunk
    asked: list[frozenset[str]]  # the costly drafters that drafted
    milliseconds: float


@dataclass(slots=True)
class Drafting:
    """All state of drafting. It decides how fast a text comes; nothing in here can change the text."""

    drafters: Mapping[str, Drafter]  # cheap ones first: a costly one is left out where they suffice
    default: tuple[str, ...]
    router: Router
    max_draft_tokens: int
    calibration: Calibration = field(default_factory=Calibration)
    commit_ms: float = 0.2
    cost_ms: dict[str, float] = field(default_factory=dict)  # by drafter, a call's share of one sequence
    payoffs: dict[tuple[int, str], Payoff] = field(default_factory=dict)  # by sequence and drafter
    trusts: dict[tuple[int, str], Trust] = field(default_factory=dict)

    def names(self, requested: str | None) -> frozenset[str]:
        """The drafters a request asks for. Raises InvalidRequestError naming the unknown one."""
        if requested is None:
            return frozenset(self.default)
        names = [name for name in requested.split("+") if name != NO_DRAFTER]
        for name in names:
            if name not in self.drafters:
                allowed = ", ".join([NO_DRAFTER, *self.drafters])
                raise InvalidRequestError(f"drafter: unknown drafter {name!r}; this model has {allowed} (join with +)")
        return frozenset(names)

    def begin(self, key: int) -> None:
        for drafter in self.drafters.values():
            drafter.begin(key)

    def end(self, key: int) -> None:
        for name, drafter in self.drafters.items():
            drafter.end(key)
            self.payoffs.pop((key, name), None)
            self.trusts.pop((key, name), None)

    def observe(self, scheduled: Sequence[ScheduledRows], committed: Sequence[CommittedRows]) -> None:
        """Show each drafter the rows of the requests that want it; the others shall not pay for it."""
        for name, drafter in self.drafters.items():
            wanted = [c for rows, c in zip(scheduled, committed, strict=True) if name in rows.generation.drafters]
            if wanted:
                drafter.observe(wanted)

    def propose(self, scheduled: Sequence[ScheduledRows]) -> Drafted:
        """One tree a decoding sequence, cut to what pays; the bare anchor where nothing does."""
        begun = time.perf_counter()
        trees = {
            i: ProposalTree(rows.generation.sequence.token_ids[-1], self._max_nodes(rows.generation))
            for i, rows in enumerate(scheduled)
            if not rows.num_prompt_rows
        }
        num_other_rows = len(trees) + sum(rows.num_prompt_rows for rows in scheduled)
        asked: list[set[str]] = [set() for _ in scheduled]
        for name, drafter in self.drafters.items():
            self._ask(name, drafter, scheduled, trees, num_other_rows, asked)
        milliseconds = 1e3 * (time.perf_counter() - begun)
        kept = self.router.cut(list(trees.values()), num_other_rows, milliseconds + self.commit_ms)
        cut: list[DraftTree | None] = [None] * len(scheduled)
        for (i, tree), nodes in zip(trees.items(), kept, strict=True):
            cut[i] = tree.draft_tree(nodes) if nodes else anchor_tree(tree.anchor)
        return Drafted(cut, [frozenset(names) for names in asked], milliseconds)

    def _ask(
        self,
        name: str,
        drafter: Drafter,
        scheduled: Sequence[ScheduledRows],
        trees: Mapping[int, ProposalTree],
        num_other_rows: int,
        asked: Sequence[set[str]],
    ) -> None:
        """Let one drafter add to the trees of the sequences that want it and for which it may pay."""
        is_costly = self.cost_ms.get(name, 0.0) > FREE_MS
        contexts = {}
        for i, tree in trees.items():
            context = self._context(name, scheduled[i], len(trees), num_other_rows)
            if context is not None and not (is_costly and self._declines(context.key, name, tree)):
                contexts[i] = context
        if not contexts:
            return
        begun = time.perf_counter()
        proposals = drafter.propose(list(contexts.values()))
        spent = 1e3 * (time.perf_counter() - begun) / len(contexts)
        self.cost_ms[name] = spent + 0.95 * (self.cost_ms.get(name, spent) - spent)
        for (i, context), proposal in zip(contexts.items(), proposals, strict=True):
            trust = self._trust(context.key, name)
            trees[i].merge(name, proposal, [trust * self.calibration.probability(name, s) for s in proposal.scores])
            if is_costly:
                asked[i].add(name)

    def _context(self, name: str, rows: ScheduledRows, num_sequences: int, num_other_rows: int) -> DraftContext | None:
        """None where the request does not want the drafter or has room for the bonus token only."""
        generation = rows.generation
        max_nodes = min(self._max_nodes(generation), self.router.row_budget - num_sequences)
        max_depth = generation.max_tokens - generation.num_output - 1
        if name not in generation.drafters or max_nodes < 1 or max_depth < 1:
            return None
        sequence, router = generation.sequence, self.router
        token_ms = router.token_ms(num_sequences, num_other_rows) + self.commit_ms
        return DraftContext(
            key=sequence.slot,
            token_ids=sequence.token_ids,
            num_prompt_tokens=generation.stats.num_prompt_tokens,
            block_table=sequence.block_table,
            max_nodes=max_nodes,
            max_depth=max_depth,
            token_ms=math.inf if router.always else token_ms * self._trust(sequence.slot, name),
            row_ms=router.row_ms(num_other_rows),
        )

    def _trust(self, key: int, name: str) -> float:
        trust = self.trusts.get((key, name))
        return trust.factor if trust is not None else 1.0

    def _max_nodes(self, generation: Generation) -> int:
        asked = generation.request.params.num_draft_tokens
        return self.max_draft_tokens if asked is None else min(asked, self.max_draft_tokens)

    def _declines(self, key: int, name: str, tree: ProposalTree) -> bool:
        if self.router.always:
            return False
        payoff = self.payoffs.setdefault((key, name), Payoff())
        # A cheaper drafter already promises as much as this one usually brings.
        return sum(tree.paths) >= payoff.num_accepted or not payoff.is_due()

    def learn(
        self,
        drafted: Drafted,
        scheduled: Sequence[ScheduledRows],
        accepted: Sequence[Accepted | None],
        spent: RoundTimes,
    ) -> None:
        """Take note of a round: what the pass cost, which nodes were taken, which drafters paid."""
        self.router.curve.learn(spent.num_rows, spent.verify_ms)
        self.commit_ms += 0.05 * (min(spent.commit_ms, 4 * self.commit_ms) - self.commit_ms)
        num_sequences = max(sum(tree is not None for tree in drafted.trees), 1)
        num_other_rows = num_sequences + sum(rows.num_prompt_rows for rows in scheduled)
        token_ms = self.router.token_ms(num_sequences, num_other_rows) + self.commit_ms
        row_ms = self.router.row_ms(num_other_rows)
        for rows, tree, walk, asked in zip(scheduled, drafted.trees, accepted, drafted.asked, strict=True):
            if tree is None or walk is None:
                continue
            path, key = set(walk.path), rows.generation.sequence.slot
            for node in range(1, tree.num_nodes):
                if tree.parents[node] in path:
                    name, score, taken = tree.drafters[node], tree.scores[node], node in path
                    expected = self.calibration.probability(name, score)
                    self.trusts.setdefault((key, name), Trust()).learn(expected, taken=taken)
                    self.calibration.learn(name, score, taken=taken)
            for name in asked:
                nodes = [node for node in range(1, tree.num_nodes) if tree.drafters[node] == name]
                num_accepted = len(path.intersection(nodes))
                gain_ms = num_accepted * token_ms - len(nodes) * row_ms - self.cost_ms[name]
                self.payoffs.setdefault((key, name), Payoff()).learn(num_accepted, gain_ms)
