# SPDX-License-Identifier: Apache-2.0
"""Drafting: asks the drafters, merges and cuts what they propose, and learns what drafting costs and brings."""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from tandem_backend.engine.account import NUM_LOOKED_BACK, TRIAL_DEPTH, Account, Trust
from tandem_backend.engine.draft_tree import Accepted, DraftTree, anchor_tree
from tandem_backend.engine.drafters.base import (
    CommittedRows,
    DraftContext,
    Drafter,
    KVDrafter,
    ObservingDrafter,
    Proposal,
    QuickDrafter,
)
from tandem_backend.engine.proposal_tree import FORCED, ProposalTree, drawn_tree
from tandem_backend.engine.router import MARGIN, Calibration, Prices, Router
from tandem_backend.engine.scheduler import ScheduledRows
from tandem_backend.engine.sequence import Generation
from tandem_backend.engine.times import RoundTimes
from tandem_backend.errors import InvalidRequestError
from tandem_backend.model.state import KVLayer

logger = logging.getLogger(__name__)

NO_DRAFTER = "none"
MIN_SAVED = 0.25  # of a token's time, for each that is accepted: the router keeps only rows that pay
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Drafted:
    """One round's trees and what they cost."""

    trees: list[DraftTree | None]  # by scheduled request; None: a prompt chunk
    asked: list[dict[str, float]]  # the drafters that were asked, and what each took for this sequence, in tokens


@dataclass(slots=True)
class Drafting:
    """All state of drafting. It decides how fast a text comes; nothing in here can change the text."""

    drafters: Mapping[str, Drafter]  # cheap ones first: a costly one is left out where they suffice
    default: tuple[str, ...]
    router: Router
    max_draft_tokens: int
    calibration: Calibration = field(default_factory=Calibration)
    commit_ms: float = 0.2
    call_ms: dict[tuple[str, int], float] = field(default_factory=dict)  # by drafter and number of sequences
    accounts: dict[tuple[int, str], Account] = field(default_factory=dict)  # by sequence and drafter
    trusts: dict[tuple[int, str], Trust] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    _observing: dict[str, ObservingDrafter] = field(init=False)
    _quick: dict[str, QuickDrafter] = field(init=False)

    def __post_init__(self) -> None:
        self._observing = {name: each for name, each in self.drafters.items() if isinstance(each, ObservingDrafter)}
        self._quick = {name: drafter for name, drafter in self.drafters.items() if isinstance(drafter, QuickDrafter)}

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
                self._contained(name, drafter.begin, key)

    def end(self, key: int) -> None:
        for name, drafter in self.drafters.items():
            if name not in self.failed:
                self._contained(name, drafter.end, key)
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
        kept = [self._contained(name, drafter.kept, key) or (0, None) for name, drafter in self._kv_drafters().items()]
        # A block serves all of them, so what one lacks none may go on from.
        return kept[0] if len({num_rows for num_rows, _ in kept}) == 1 else (0, None)

    def resume(self, key: int, position: int, hidden: Tensor, next_token_id: int, block_table: Sequence[int]) -> None:
        """A sequence that has begun goes on from a kept prefix: see KVDrafter.resume."""
        for name, drafter in self._kv_drafters().items():
            self._contained(name, drafter.resume, key, position, hidden, next_token_id, block_table)

    def _kv_drafters(self) -> dict[str, KVDrafter]:
        return {
            name: drafter
            for name, drafter in self.drafters.items()
            if isinstance(drafter, KVDrafter) and name not in self.failed
        }

    def observes(self, generation: Generation) -> bool:
        """Whether a drafter that the request wants is to see its rows."""
        return any(name in generation.drafters and name not in self.failed for name in self._observing)

    def observe(self, scheduled: Sequence[ScheduledRows], committed: Sequence[CommittedRows]) -> None:
        """Show each drafter the rows of the requests that want it; the others shall not pay for it."""
        for name, drafter in self._observing.items():
            wanted = [c for rows, c in zip(scheduled, committed, strict=True) if name in rows.generation.drafters]
            if wanted and name not in self.failed:
                self._contained(name, drafter.observe, wanted)

    def propose(self, scheduled: Sequence[ScheduledRows]) -> Drafted:
        """One tree a decoding sequence, cut to what pays; the bare anchor where nothing does."""
        begun = time.perf_counter()
        decoding = {i: rows.generation for i, rows in enumerate(scheduled) if not rows.num_prompt_rows}
        num_other_rows = len(decoding) + sum(rows.num_prompt_rows for rows in scheduled)
        if not self._may_draft(decoding.values(), num_other_rows):
            return Drafted([_bare(rows) for rows in scheduled], [{}] * len(scheduled))
        trees = {i: self._tree(generation) for i, generation in decoding.items()}
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
        return Drafted(cut, asked)

    def _may_draft(self, decoding: Collection[Generation], num_other_rows: int) -> bool:
        """Whether anyone might be asked. Most rounds of texts in which drafts fail end here."""
        wanting = [generation for generation in decoding if generation.drafters]
        if any(self.router.always or generation.sampling.constraint is not None for generation in wanting):
            return True
        for name in self.drafters:
            keys = [each.sequence.slot for each in wanting if name in each.drafters and self._is_open(each, name)]
            if not keys:
                continue
            prices = self.router.prices(len(decoding), num_other_rows, self.commit_ms)
            if self._call_pays(name, keys, prices):
                return True
        return False

    def _is_open(self, generation: Generation, name: str) -> bool:
        key = generation.sequence.slot
        if name in self.failed or not self._account(key, name).is_open:
            return False
        quick = self._quick.get(name)
        return quick is None or bool(self._contained(name, quick.has_proposal, key, generation.sequence.token_ids))

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
        begun = time.perf_counter()
        contexts = self._contexts(name, scheduled, trees, prices)
        if not contexts or not self._call_pays(name, [context.key for context in contexts.values()], prices):
            return
        proposals = self._contained(name, drafter.propose, list(contexts.values())) or [Proposal()] * len(contexts)
        spent = 1e3 * (time.perf_counter() - begun)
        cost = self.call_ms.get((name, len(contexts)), spent)
        # One stall must not make a drafter look costly for long, and a first call is often one.
        rate = 0.1 if 2 * spent > cost else 0.5
        self.call_ms[name, len(contexts)] = cost + rate * (min(spent, 2 * cost) - cost)
        for (i, context), proposal in zip(contexts.items(), proposals, strict=True):
            asked[i][name] = min(spent, 4 * cost) / len(contexts) / prices.token_ms
            if proposal.q:
                drawn[i] = drawn_tree(trees[i].anchor, name, proposal)
                continue
            if proposal.looked_back:
                self._look_back(context.key, name, proposal.looked_back)
            if proposal.token_ids:
                trees[i].merge(name, proposal, self._probabilities(context.key, name, proposal.scores))

    def _contexts(
        self, name: str, scheduled: Sequence[ScheduledRows], trees: Mapping[int, ProposalTree], prices: Prices
    ) -> dict[int, DraftContext]:
        """The sequences that a drafter may draft for, by their place among the scheduled."""
        contexts = {}
        for i, tree in trees.items():
            generation = scheduled[i].generation
            if name not in generation.drafters or name in self.failed:
                continue
            max_depth = _max_depth(generation)
            room = self.router.row_budget - len(trees)
            if generation.draft_sampler is not None:
                room //= len(trees)  # drawn nodes are not cut later, so nobody may take more than a share
            max_nodes = min(tree.max_nodes, room)
            if max_nodes > 0 and max_depth > 0 and self._may_pay(generation.sequence.slot, name, tree):
                contexts[i] = self._context(name, generation, max_nodes, max_depth, prices)
        return contexts

    def _call_pays(self, name: str, keys: Sequence[int], prices: Prices) -> bool:
        """Whether what the drafter usually brings these sequences is worth a call, which for few costs much.

        A sequence that was never asked for is: its credit bounds what that costs, and what calls cost is learned anew.
        """
        accounts = [self._account(key, name) for key in keys]
        if self.router.always or not all(account.num_asked for account in accounts):
            return True
        saved_ms = prices.token_ms * sum(account.num_accepted for account in accounts)
        rows_ms = prices.row_ms * sum(account.num_rows for account in accounts)
        return max(saved_ms - rows_ms, MIN_SAVED * saved_ms) > MARGIN * self.call_ms.get((name, len(keys)), 0.0)

    def _contained(self, name: str, call: Callable[..., T], *args: Any) -> T | None:
        """A drafter that raises is left out from then on: texts do not need it."""
        try:
            return call(*args)
        except Exception:
            logger.exception("drafter %r failed and is left out until the model is loaded again", name)
            self.failed.add(name)
            return None

    def _context(
        self, name: str, generation: Generation, max_nodes: int, max_depth: int, prices: Prices
    ) -> DraftContext:
        sequence = generation.sequence
        is_on_trial = self._is_on_trial(sequence.slot, name)
        return DraftContext(
            key=sequence.slot,
            token_ids=sequence.token_ids,
            num_prompt_tokens=generation.stats.num_prompt_tokens,
            block_table=sequence.block_table,
            max_nodes=max_nodes,
            max_depth=min(max_depth, TRIAL_DEPTH) if is_on_trial else max_depth,
            token_ms=math.inf if self.router.always else prices.token_ms,
            row_ms=prices.row_ms,
            trust=self._trust(sequence.slot, name).factor,
            num_looked_back=min(NUM_LOOKED_BACK, generation.num_output) if is_on_trial else 0,
            sampler=generation.draft_sampler,
        )

    def _trust(self, key: int, name: str) -> Trust:
        return self.trusts.get((key, name)) or Trust()

    def _probabilities(self, key: int, name: str, scores: Sequence[float]) -> list[float]:
        trust = self._trust(key, name)
        return [trust.probability(self.calibration.probability(name, score)) for score in scores]

    def _max_nodes(self, generation: Generation) -> int:
        asked = generation.request.params.num_draft_tokens
        return self.max_draft_tokens if asked is None else min(asked, self.max_draft_tokens)

    def _may_pay(self, key: int, name: str, tree: ProposalTree) -> bool:
        if self.router.always:
            return True
        account = self._account(key, name)
        # A cheaper drafter may already promise as much as this one usually brings.
        return account.is_open and (not tree.token_ids or sum(tree.paths) < account.num_accepted)

    def _account(self, key: int, name: str) -> Account:
        account = self.accounts.get((key, name))
        if account is None:
            account = self.accounts[key, name] = Account()
        return account

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
        for rows, tree, walk, asked in zip(scheduled, drafted.trees, accepted, drafted.asked, strict=True):
            if tree is None or walk is None:
                continue
            key = rows.generation.sequence.slot
            if tree.num_nodes > 1:
                self._learn_nodes(key, tree, walk)
            for name in self.drafters:
                if name in asked:
                    num_accepted = sum(tree.drafters[node] == name for node in walk.path)
                    num_rows = tree.drafters.count(name)
                    self._account(key, name).settle(num_accepted, asked[name], num_rows)
                elif name in rows.generation.drafters:
                    self._account(key, name).wait()

    def _learn_nodes(self, key: int, tree: DraftTree, walk: Accepted) -> None:
        """Which of the nodes that stood to the vote were taken."""
        path = set(walk.path)
        for node in range(1, tree.num_nodes):
            if tree.parents[node] in path:
                self._learn_node(key, tree.drafters[node], tree.scores[node], taken=node in path)

    def _look_back(self, key: int, name: str, guesses: Sequence[tuple[float, bool]]) -> None:
        self._account(key, name).look_back(guesses)
        for score, is_right in guesses:
            self._learn_node(key, name, score, taken=is_right)

    def _learn_node(self, key: int, name: str, score: float, *, taken: bool) -> None:
        expected = self.calibration.probability(name, score)
        self.trusts.setdefault((key, name), Trust()).learn(expected, taken=taken)
        self.calibration.learn(name, score, taken=taken)


def _bare(rows: ScheduledRows) -> DraftTree | None:
    return None if rows.num_prompt_rows else anchor_tree(rows.generation.sequence.token_ids[-1])


def _max_depth(generation: Generation) -> int:
    """Tokens that drafts may bring: with one token left there is room for the bonus token only."""
    return generation.max_tokens - generation.num_output - 1
