# SPDX-License-Identifier: Apache-2.0
"""ProposalTree: the proposals of several drafters for one sequence, merged; shared prefixes become shared nodes."""

from collections.abc import Sequence, Set

from tandem_backend.engine.draft_tree import DraftTree
from tandem_backend.engine.drafters.base import Proposal
from tandem_backend.engine.sampling import Constraint

FORCED = "forced"  # who proposes what a constraint leaves no choice about


class ProposalTree:
    """Nodes in order of arrival; -1 stands for the anchor as a parent.

    With a constraint (its state at the anchor) the tree drops nodes that it rules out, and can draft what it forces.
    """

    def __init__(self, anchor: int, max_nodes: int, constraint: Constraint | None = None) -> None:
        self.anchor = anchor
        self.max_nodes = max_nodes  # nodes that may be kept; the proposals together may be more
        self.constraint = constraint
        self.states: list[Constraint | None] = []  # by node; None: the node can't be accepted, or nothing constrains
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.drafters: list[str] = []  # who proposed the node first
        self.scores: list[float] = []  # that drafter's raw score
        self.conditionals: list[float] = []  # calibrated probability given the parent, the best of its proposers'
        self.paths: list[float] = []  # product of the conditionals down to the node
        self.children: dict[int, list[int]] = {-1: []}

    def merge(self, drafter: str, proposal: Proposal, probabilities: Sequence[float]) -> None:
        """Add a proposal with its nodes' calibrated probabilities given their parents.

        A node that is already there keeps its first proposer and the better probability.
        """
        places: list[int] = []
        nodes = zip(proposal.token_ids, proposal.parents, proposal.scores, probabilities, strict=True)
        for token_id, parent, score, probability in nodes:
            place = places[parent] if parent >= 0 else -1
            conditional = min(max(probability, 1e-6), 1.0)
            node = next((child for child in self.children[place] if self.token_ids[child] == token_id), None)
            if node is None:
                node = self._append(token_id, place, drafter, score, conditional)
            else:
                self.conditionals[node] = max(self.conditionals[node], conditional)
            places.append(node)
        self._multiply()

    def _multiply(self) -> None:
        # Parents come before children, so a path is complete when its node is reached; a better probability of a shared
        # node counts for all below it.
        for node, place in enumerate(self.parents):
            self.paths[node] = self.conditionals[node] * (self.paths[place] if place >= 0 else 1.0)

    def _append(self, token_id: int, parent: int, drafter: str, score: float, conditional: float) -> int:
        node = len(self.token_ids)
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.drafters.append(drafter)
        self.scores.append(score)
        self.conditionals.append(conditional)
        self.paths.append(0.0)
        self.children[node] = []
        self.states.append(self._state_after(token_id, parent))
        if self.constraint is None or self.states[node] is not None:
            self.children[parent].append(node)
        else:
            self.conditionals[node] = 0.0
        return node

    def _state_after(self, token_id: int, parent: int) -> Constraint | None:
        before = self.constraint if parent < 0 else self.states[parent]
        state = before.fork() if before is not None else None
        return state if state is not None and state.advance(token_id) else None

    def draft_forced(self, max_depth: int) -> None:
        """Add what the constraint forces behind the nodes that nothing was proposed for, or behind the bare anchor."""
        if self.constraint is None:
            return
        depths = {-1: 0}
        for node, parent in enumerate(self.parents):
            depths[node] = depths[parent] + 1
        for leaf in [node for node, children in self.children.items() if not children]:
            state = self.constraint if leaf < 0 else self.states[leaf]
            room = min(max_depth - depths[leaf], self.max_nodes)
            if state is None or room <= 0:
                continue
            for token_id in state.forced()[:room]:
                leaf = self._append(token_id, leaf, FORCED, 1.0, 1.0)
        self._multiply()

    def draft_tree(self, kept: Set[int]) -> DraftTree:
        """The kept nodes (closed under parents) in depth-first pre-order, likelier children first."""
        order: list[int] = []
        place = {-1: 0}
        parents = [-1]
        stack = self._best_first(-1, kept)
        while stack:
            node = stack.pop()
            place[node] = len(order) + 1
            order.append(node)
            parents.append(place[self.parents[node]])
            stack.extend(self._best_first(node, kept))
        return DraftTree(
            token_ids=(self.anchor, *(self.token_ids[node] for node in order)),
            parents=tuple(parents),
            scores=(1.0, *(self.scores[node] for node in order)),
            drafters=("", *(self.drafters[node] for node in order)),
        )

    def _best_first(self, parent: int, kept: Set[int]) -> list[int]:
        """Kept children, the likeliest last: the stack's top."""
        return sorted((node for node in self.children[parent] if node in kept), key=lambda node: self.paths[node])


def drawn_tree(anchor: int, drafter: str, proposal: Proposal) -> DraftTree:
    """A proposal whose tokens were drawn, as it is: whole, alone, in its own order."""
    return DraftTree(
        token_ids=(anchor, *proposal.token_ids),
        parents=(-1, *(parent + 1 for parent in proposal.parents)),
        scores=(1.0, *proposal.scores),
        drafters=("", *([drafter] * len(proposal.token_ids))),
        q=(None, *proposal.q),
    )
