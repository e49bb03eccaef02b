# SPDX-License-Identifier: Apache-2.0
"""DraftTree: what one sequence puts to the vote in a round, in depth-first pre-order, and the walk that accepts."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Node 0 is the anchor, the last committed token. A parent's index is lower than its children's."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]  # -1 for the anchor
    scores: tuple[float, ...]  # the drafter's own score of each node; 1 for the anchor
    drafters: tuple[str, ...]  # who proposed the node; "" for the anchor
    q: tuple[Tensor | None, ...] = ()  # what each node's token was drawn from; empty: nothing was drawn

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)


def anchor_tree(token_id: int) -> DraftTree:
    """A tree that drafts nothing: plain decoding."""
    return DraftTree((token_id,), (-1,), (1.0,), ("",))


def children_of(tree: DraftTree) -> dict[int, list[int]]:
    """The children of each node that has any, in order."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents[1:], start=1):
        children.setdefault(parent, []).append(node)
    return children


def child_by_token(tree: DraftTree) -> dict[tuple[int, int], int]:
    """The child of a node (its parent's index) that carries a token."""
    return {
        (parent, token_id): node
        for node, (parent, token_id) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
        if parent >= 0
    }


@dataclass(frozen=True, slots=True)
class Accepted:
    """The walk's result: rows whose state is kept, and one token after each of them."""

    path: list[int]  # nodes from the anchor down
    token_ids: list[int]  # the target's choice at each node of the path; the last one is the bonus token


def accept(tree: DraftTree, choices: Sequence[int]) -> Accepted:
    """Follow the target's own choice at each node (`choices[node]`) to the child that carries it, if there is one."""
    children = child_by_token(tree)
    path, token_ids = [0], [choices[0]]
    while (child := children.get((path[-1], token_ids[-1]))) is not None:
        path.append(child)
        token_ids.append(choices[child])
    return Accepted(path, token_ids)
