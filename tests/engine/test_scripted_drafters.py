# SPDX-License-Identifier: Apache-2.0
"""The test drafters are right and wrong where their names say, so that the exactness gate tests what it claims to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_backend.engine.drafters.base import DraftContext, Proposal
from tandem_backend.engine.drafters.scripted import ScriptedDrafter

PROMPT = (3, 1, 4)
VOCAB_SIZE = 50
REFERENCE = [(7 * index + 3) % VOCAB_SIZE for index in range(200)]


def context(done: int, max_nodes: int = 16, max_depth: int = 16) -> DraftContext:
    """The request after `done` output tokens."""
    return DraftContext(0, [*PROMPT, *REFERENCE[:done]], len(PROMPT), (), max_nodes, max_depth)


def propose(name: str, at: DraftContext, vocab_size: int = VOCAB_SIZE) -> Proposal:
    reference = [token % vocab_size for token in REFERENCE]
    return ScriptedDrafter(name, {PROMPT: reference}, vocab_size).propose([at])[0]


def depths(proposal: Proposal) -> list[int]:
    found: list[int] = []
    for node, parent in enumerate(proposal.parents):
        assert -1 <= parent < node
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def rightness(proposal: Proposal, done: int) -> list[bool]:
    """Whether each node carries the reference's token of its position."""
    return [
        token == REFERENCE[done + depth - 1] for token, depth in zip(proposal.token_ids, depths(proposal), strict=True)
    ]


@given(
    st.sampled_from(["wrong", "half", "oracle"]),
    st.integers(1, 300),
    st.integers(1, 64),
    st.integers(1, 20),
    st.integers(2, 9),
)
def test_a_proposal_is_a_tree_within_its_limits(
    name: str, done: int, max_nodes: int, max_depth: int, vocab_size: int
) -> None:
    at = DraftContext(0, [*PROMPT, *range(done)], len(PROMPT), (), max_nodes, max_depth)
    proposal = propose(name, at, vocab_size)
    assert 1 <= len(proposal.token_ids) == len(proposal.parents) == len(proposal.scores) <= max_nodes
    assert max(depths(proposal)) <= max_depth
    assert all(0 < score <= 1 for score in proposal.scores)
    siblings = list(zip(proposal.parents, proposal.token_ids, strict=True))
    assert len(set(siblings)) == len(siblings)
    assert all(0 <= token < vocab_size for token in proposal.token_ids)


@given(st.integers(1, 150), st.integers(1, 64), st.integers(1, 20))
def test_oracle_is_a_chain_of_right_tokens(done: int, max_nodes: int, max_depth: int) -> None:
    proposal = propose("oracle", context(done, max_nodes, max_depth))
    num_nodes = min(max_nodes, max_depth)
    assert list(proposal.token_ids) == REFERENCE[done : done + num_nodes]
    assert list(proposal.parents) == list(range(-1, num_nodes - 1))


@given(st.integers(1, 150), st.integers(1, 49), st.integers(1, 20))
def test_wrong_fills_its_tree_and_is_wrong_at_every_node(done: int, max_nodes: int, max_depth: int) -> None:
    proposal = propose("wrong", context(done, max_nodes, max_depth))
    assert len(proposal.token_ids) == max_nodes
    assert not any(rightness(proposal, done))


def test_half_is_right_for_half_of_the_nodes_that_have_children() -> None:
    num_groups = num_right = 0
    for done in range(1, 180):
        proposal = propose("half", context(done))
        right = rightness(proposal, done)
        groups = {
            parent: [right[node] for node, of in enumerate(proposal.parents) if of == parent]
            for parent in set(proposal.parents)
        }
        assert all(sum(group) <= 1 for group in groups.values())
        num_groups += len(groups)
        num_right += sum(map(sum, groups.values()))
    assert 0.47 < num_right / num_groups < 0.53


def test_half_puts_right_nodes_among_wrong_siblings_that_have_children_too() -> None:
    places, below_wrong, accepted = set(), 0, set()
    for done in range(1, 180):
        proposal = propose("half", context(done))
        right = rightness(proposal, done)
        first = [node for node, parent in enumerate(proposal.parents) if parent < 0]
        places |= {(place, len(first)) for place, node in enumerate(first) if right[node]}
        below_wrong += sum(
            right[node] for node, parent in enumerate(proposal.parents) if parent >= 0 and not right[parent]
        )
        on_path = [True] * len(right)
        for node, parent in enumerate(proposal.parents):
            on_path[node] = right[node] and (parent < 0 or on_path[parent])
        accepted.add(sum(on_path))
    assert {(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)} <= places
    assert below_wrong > 100
    assert {0, 1, 2, 3, 4} <= accepted


def test_proposals_depend_on_the_position_alone() -> None:
    assert propose("half", context(5)) == propose("half", context(5))
    assert propose("half", context(5)).parents != propose("half", context(6)).parents


@pytest.mark.parametrize("name", ["wrong", "half", "oracle"])
def test_past_the_reference_they_still_propose(name: str) -> None:
    at = DraftContext(0, [*PROMPT, *REFERENCE, 1, 1], len(PROMPT), (), 8, 8)
    proposal = propose(name, at)
    assert len(proposal.token_ids) == 8
    if name == "oracle":
        assert set(proposal.token_ids) == {0}


def test_references_may_be_a_function() -> None:
    drafter = ScriptedDrafter("oracle", lambda prompt: [prompt[0], prompt[1], 9], 10)
    assert list(drafter.propose([DraftContext(0, [5, 6, 5], 2, (), 2, 2)])[0].token_ids) == [6, 9]


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^name: must be wrong, half or oracle, got 'best'"):
        ScriptedDrafter("best", {}, 10)
    with pytest.raises(ValueError, match=r"^vocab_size: must be at least 2, got 1"):
        ScriptedDrafter("half", {}, 1)
    with pytest.raises(ValueError, match=r"^references: none for a prompt of 3 tokens"):
        ScriptedDrafter("half", {}, 10).propose([context(1)])
