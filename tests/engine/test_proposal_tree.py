# SPDX-License-Identifier: Apache-2.0
"""Merged proposals: shared prefixes are shared nodes, and what is kept comes out as a draft tree in pre-order."""

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tandem_backend.engine.draft_tree import DraftTree, accept, anchor_tree
from tandem_backend.engine.drafters.base import Proposal
from tandem_backend.engine.proposal_tree import ProposalTree

ANCHOR = 99


@st.composite
def proposals(draw: st.DrawFn, max_nodes: int = 8) -> Proposal:
    num_nodes = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    token_ids = [draw(st.integers(0, 3)) for _ in range(num_nodes)]
    scores = [draw(st.floats(0.01, 1.0)) for _ in range(num_nodes)]
    return Proposal(token_ids, parents, scores)


def paths(token_ids: Sequence[int], parents: Sequence[int], root: int = -1) -> dict[tuple[int, ...], int]:
    """Each node by the tokens that lead to it."""
    known: list[tuple[int, ...]] = []
    for token_id, parent in zip(token_ids, parents, strict=True):
        known.append((*(known[parent] if parent > root else ()), token_id))
    return {path: node for node, path in enumerate(known)}


def proposed(proposal: Proposal) -> set[tuple[int, ...]]:
    return set(paths(proposal.token_ids, proposal.parents))


def merged(*several: Proposal) -> ProposalTree:
    tree = ProposalTree(ANCHOR, 24)
    for n, proposal in enumerate(several):
        tree.merge(f"drafter {n}", proposal, proposal.scores)
    return tree


def test_shared_prefixes_become_shared_nodes() -> None:
    tree = merged(Proposal([1, 2], [-1, 0], [0.5, 0.5]), Proposal([1, 3, 4], [-1, 0, -1], [0.9, 0.2, 0.1]))
    assert tree.token_ids == [1, 2, 3, 4]
    assert tree.parents == [-1, 0, 0, -1]
    assert tree.drafters == ["drafter 0", "drafter 0", "drafter 1", "drafter 1"]
    assert tree.scores == [0.5, 0.5, 0.2, 0.1]
    assert tree.conditionals == [0.9, 0.5, 0.2, 0.1]


def test_a_better_parent_makes_all_below_it_better() -> None:
    tree = merged(Proposal([1, 2, 3], [-1, 0, 1], [0.5, 0.5, 0.5]), Proposal([1], [-1], [0.9]))
    assert tree.paths == [0.9, 0.45, 0.225]


@given(st.lists(proposals(), min_size=1, max_size=4))
def test_a_merged_tree_holds_every_proposed_path_once(several: list[Proposal]) -> None:
    tree = merged(*several)
    assert set(paths(tree.token_ids, tree.parents)) == set().union(*map(proposed, several))
    assert len(tree.token_ids) == len(set().union(*map(proposed, several)))
    for node, parent in enumerate(tree.parents):
        assert parent < node
        assert node in tree.children[parent]
        above = tree.paths[parent] if parent >= 0 else 1.0
        assert math.isclose(tree.paths[node], tree.conditionals[node] * above)
        assert 0 < tree.paths[node] <= above


def is_pre_order(tree: DraftTree) -> bool:
    path = [0]
    for node in range(1, tree.num_nodes):
        while path and path[-1] != tree.parents[node]:
            path.pop()
        if not path:
            return False
        path.append(node)
    return True


@given(st.lists(proposals(), min_size=1, max_size=3), st.sets(st.integers(0, 23)))
def test_a_draft_tree_is_in_pre_order_and_holds_the_kept_nodes(several: list[Proposal], wanted: set[int]) -> None:
    tree = merged(*several)
    kept: set[int] = set()
    for node, parent in enumerate(tree.parents):
        if node in wanted and (parent < 0 or parent in kept):
            kept.add(node)
    draft = tree.draft_tree(kept)
    assert (draft.token_ids[0], draft.parents[0], draft.scores[0], draft.drafters[0]) == (ANCHOR, -1, 1.0, "")
    assert draft.num_nodes == len(draft.parents) == len(draft.scores) == len(draft.drafters) == len(kept) + 1
    assert is_pre_order(draft)
    node_of = paths(tree.token_ids, tree.parents)
    kept_paths = {path for path, node in node_of.items() if node in kept}
    found = paths(draft.token_ids[1:], [parent - 1 for parent in draft.parents[1:]])
    assert set(found) == kept_paths
    for path, place in found.items():
        assert draft.scores[place + 1] == tree.scores[node_of[path]]
        assert draft.drafters[place + 1] == tree.drafters[node_of[path]]


def test_likelier_children_come_first() -> None:
    tree = merged(Proposal([1, 2, 3], [-1, -1, -1], [0.2, 0.7, 0.5]))
    assert tree.draft_tree({0, 1, 2}).token_ids == (ANCHOR, 2, 3, 1)


@given(proposals(), st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_accept_follows_the_targets_choices_as_far_as_they_were_drafted(proposal: Proposal, choices: list[int]) -> None:
    tree = merged(proposal)
    draft = tree.draft_tree(set(range(len(tree.token_ids))))
    accepted = accept(draft, choices[: draft.num_nodes])
    assert accepted.token_ids == [choices[node] for node in accepted.path]
    assert accepted.path[0] == 0
    for above, node in zip(accepted.path, accepted.path[1:], strict=False):
        assert draft.parents[node] == above
        assert draft.token_ids[node] == choices[above]
    last = accepted.path[-1]
    below = [draft.token_ids[node] for node in range(draft.num_nodes) if draft.parents[node] == last]
    assert choices[last] not in below


def test_a_bare_anchor_yields_one_token() -> None:
    accepted = accept(anchor_tree(5), [7])
    assert (accepted.path, accepted.token_ids) == ([0], [7])
