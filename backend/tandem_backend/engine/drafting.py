# SPDX-License-Identifier: Apache-2.0
"""Drafting: asks the drafters, merges and cuts what they propose, and learns what drafting costs and brings."""

import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from tandem_backend.engine.account import TRIAL_DEPTH, Account, Trust
from tandem_backend.engine.draft_tree import Accepted, DraftTree, anchor_tree
from tandem_backend.engine.drafters.base import CommittedRows, DraftContext, Drafter, KVDrafter, Proposal
from tandem_backend.engine.proposal_tree import FORCED, ProposalTree, drawn_tree
from tandem_backend.engine.router import Calibration, Prices, Router
from tandem_backend.engine.scheduler import ScheduledRows
from tandem_backend.engine.sequence import Generation
from tandem_backend.engine.times import RoundTimes
from tandem_backend.errors import InvalidRequestError
from tandem_backend.model.state import KVLayer

logger = logging.getLogger(__name__)

NO_DRAFTER = "none"


@dataclass(frozen=True, slots=True)
class Drafted:
    """One round's trees and what they cost."""

    trees: list[DraftTree | None]  # by scheduled request; None: a prompt chunk
    asked: list[dict[str, float]]  # the drafters that drafted, and the milliseconds each took for this sequence
    prices: Prices
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
    accounts: dict[tuple[int, str], Account] = field(default_factory=dict)  # by sequence and drafter
    trusts: dict[tuple[int, str], Trust] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def names(self, requested: str | None) -> frozenset[str]:
        """The drafters a request asks for. Raises InvalidRequestError naming the unknown one."""
        if requested is None:
            names = list(self.default)
        else:
            names = [name for name in requested.split("+") if name != NO_DRAFTER]
        for name in names:
            if name not in self.drafters and name != FORCED:
                allowed = ", ".join([NO_DRAFTER, *self.drafters, FORCED])
                raise InvalidRequestError(f"drafter: unknown drafter {name!r}; this model has {allowed} (join with +)")
        # Who drafts at all takes what is forced: it costs next to nothing.
        return frozenset([*names, FORCED] if names else ())

    def begin(self, key: int) -> None:
        for name, drafter in self.drafters.items():
            if name not in self.failed:
                with self._containing(name):
                    drafter.begin(key)

    def end(self, key: int) -> None:
        for name, drafter in self.drafters.items():
            if name not in self.failed:
                with self._containing(name):
                    drafter.end(key)
            self.accounts.pop((key, name), None)
            self.trusts.pop((key, name), None)

    def kv_layers(self) -> list[KVLayer]:
        """KV of drafters that lies under the target's block ids."""
        return [layer for drafter in self._kv_drafters().values() for layer in drafter.kv_layers()]

    def resumes_kv(self, names: Collection[str]) -> bool:
        """Whether one of the drafters can only go on from a prefix that has its KV."""
        return any(name in names for name in self._kv_drafters())

    def kept(self, key: int) -> tuple[int, Tensor | None]:
        """What a prefix cache may keep of a sequence for such drafters: see KVDrafter.kept."""
        num_rows, hidden = 0, None
        for name, drafter in self._kv_drafters().items():
            with self._containing(name):
                num_rows, hidden = drafter.kept(key)
        return num_rows, hidden

    def resume(self, key: int, position: int, hidden: Tensor, next_token_id: int, block_table: Sequence[int]) -> None:
        """A sequence that has begun goes on from a kept prefix: see KVDrafter.resume."""
        for name, drafter in self._kv_drafters().items():
            with self._containing(name):
                drafter.resume(key, position, hidden, next_token_id, block_table)

    def _kv_drafters(self) -> dict[str, KVDrafter]:
        return {
            name: drafter
            for name, drafter in self.drafters.items()
            if isinstance(drafter, KVDrafter) and name not in self.failed
        }

    def observe(self, scheduled: Sequence[ScheduledRows], committed: Sequence[CommittedRows]) -> None:
        """Show each drafter the rows of the requests that want it; the others shall not pay for it."""
        for name, drafter in self.drafters.items():
            wanted = [c for rows, c in zip(scheduled, committed, strict=True) if name in rows.generation.drafters]
            if wanted and name not in self.failed:
                with self._containing(name):
                    drafter.observe(wanted)

    def propose(self, scheduled: Sequence[ScheduledRows]) -> Drafted:
        """One tree a decoding sequence, cut to what pays; the bare anchor where nothing does."""
        begun = time.perf_counter()
        trees = {i: self._tree(rows.generation) for i, rows in enumerate(scheduled) if not rows.num_prompt_rows}
        num_other_rows = len(trees) + sum(rows.num_prompt_rows for rows in scheduled)
        prices = self.router.prices(len(trees), num_other_rows, self.commit_ms)
        asked: list[dict[str, float]] = [{} for _ in scheduled]
        drawn: dict[int, DraftTree] = {}
        for name, drafter in self.drafters.items():
            self._ask(name, drafter, scheduled, trees, prices, asked, drawn)
        for i, tree in trees.items():
            self._draft_forced(tree, scheduled[i].generation)
        milliseconds = 1e3 * (time.perf_counter() - begun)
        kept = self.router.cut(list(trees.values()), num_other_rows, milliseconds + self.commit_ms)
        cut: list[DraftTree | None] = [None] * len(scheduled)
        for (i, tree), nodes in zip(trees.items(), kept, strict=True):
            cut[i] = drawn.get(i) or (tree.draft_tree(nodes) if nodes else anchor_tree(tree.anchor))
        return Drafted(cut, asked, prices, milliseconds)

    def _tree(self, generation: Generation) -> ProposalTree:
        tree = ProposalTree(
            generation.sequence.token_ids[-1], self._max_nodes(generation), generation.sampling.constraint
        )
        self._draft_forced(tree, generation)
        return tree

    def _draft_forced(self, tree: ProposalTree, generation: Generation) -> None:
        if FORCED in generation.drafters:
            tree.draft_forced(_max_depth(generation))

    def _ask(
        self,
        name: str,
        drafter: Drafter,
        scheduled: Sequence[ScheduledRows],
        trees: Mapping[int, ProposalTree],
        prices: Prices,
        asked: Sequence[dict[str, float]],
        drawn: dict[int, DraftTree],
    ) -> None:
        """Let one drafter add to the trees of the sequences that want it and for which it may pay."""
        contexts = {}
        for i, tree in trees.items():
            generation = scheduled[i].generation
            max_depth = _max_depth(generation)
            room = self.router.row_budget - len(trees)
            if generation.draft_sampler is not None:
                room //= len(trees)  # drawn nodes are not cut later, so nobody may take more than a share
            max_nodes = min(tree.max_nodes, room)
            wants = name in generation.drafters and name not in self.failed and max_nodes > 0 and max_depth > 0
            if wants and self._may_pay(generation.sequence.slot, name, tree):
                if self._is_on_trial(generation.sequence.slot, name):
                    max_depth = min(max_depth, TRIAL_DEPTH)
                contexts[i] = self._context(name, generation, max_nodes, max_depth, prices)
        if not contexts:
            return
        begun = time.perf_counter()
        proposals = [Proposal()] * len(contexts)
        with self._containing(name):
            proposals = drafter.propose(list(contexts.values()))
        spent = 1e3 * (time.perf_counter() - begun) / len(contexts)
        cost = self.cost_ms.get(name, spent)
        # One stall must not make a drafter look costly for long.
        self.cost_ms[name] = cost + 0.1 * (min(spent, 2 * cost) - cost)
        for (i, context), proposal in zip(contexts.items(), proposals, strict=True):
            asked[i][name] = min(spent, 4 * cost)
            if proposal.q:
                drawn[i] = drawn_tree(trees[i].anchor, name, proposal)
                continue
            trust = self._trust(context.key, name)
            trees[i].merge(name, proposal, [trust * self.calibration.probability(name, s) for s in proposal.scores])

    @contextmanager
    def _containing(self, name: str) -> Iterator[None]:
        """A drafter that raises is left out from then on: texts do not need it."""
        try:
            yield
        except Exception:
            logger.exception("drafter %r failed and is left out until the model is loaded again", name)
            self.failed.add(name)

    def _context(
        self, name: str, generation: Generation, max_nodes: int, max_depth: int, prices: Prices
    ) -> DraftContext:
        sequence = generation.sequence
        return DraftContext(
            key=sequence.slot,
            token_ids=sequence.token_ids,
            num_prompt_tokens=generation.stats.num_prompt_tokens,
            block_table=sequence.block_table,
            max_nodes=max_nodes,
            max_depth=max_depth,
            token_ms=math.inf if self.router.always else prices.token_ms * self._trust(sequence.slot, name),
            row_ms=prices.row_ms,
            sampler=generation.draft_sampler,
        )

    def _trust(self, key: int, name: str) -> float:
        trust = self.trusts.get((key, name))
        return trust.factor if trust is not None else 1.0

    def _max_nodes(self, generation: Generation) -> int:
        asked = generation.request.params.num_draft_tokens
        return self.max_draft_tokens if asked is None else min(asked, self.max_draft_tokens)

    def _may_pay(self, key: int, name: str, tree: ProposalTree) -> bool:
        if self.router.always:
            return True
        account = self.accounts.setdefault((key, name), Account())
        # A cheaper drafter may already promise as much as this one usually brings.
        is_needed = not tree.token_ids or sum(tree.paths) < account.num_accepted
        return is_needed and account.balance > 0

    def _is_on_trial(self, key: int, name: str) -> bool:
        return not self.router.always and self.accounts[key, name].is_on_trial

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
        prices = drafted.prices
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
            for name in rows.generation.drafters & self.drafters.keys():
                account = self.accounts.setdefault((key, name), Account())
                if name in asked:
                    num_accepted = sum(tree.drafters[node] == name for node in walk.path)
                    account.settle(num_accepted, asked[name] / prices.token_ms)
                else:
                    account.wait()


def _max_depth(generation: Generation) -> int:
    """Tokens that drafts may bring: with one token left there is room for the bonus token only."""
    return generation.max_tokens - generation.num_output - 1
