# SPDX-License-Identifier: Apache-2.0
"""The lookup drafter against a search through the whole text, and what any tree of it must be."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from tandem_backend.engine.drafters.base import DraftContext, Proposal
from tandem_backend.engine.drafters.lookup import MAX_MATCH, MAX_VOTERS, MIN_MATCH, History, LookupDrafter

short_texts = st.integers(1, 4).flatmap(lambda vocab: st.lists(st.integers(0, vocab), min_size=1, max_size=80))
long_texts = st.builds(  # n-grams that stand more often than they are remembered
    lambda seed, vocab, size: Random(seed).choices(range(vocab), k=size),
    st.integers(0, 1000),
    st.integers(1, 4),
    st.integers(100, 300),
)
texts = short_texts | long_texts


def context(token_ids: list[int], max_nodes: int = 16, max_depth: int = 16, key: int = 0) -> DraftContext:
    return DraftContext(key, token_ids, 1, (), max_nodes, max_depth)


def draft(token_ids: list[int], max_nodes: int = 16, max_depth: int = 16) -> Proposal:
    drafter = LookupDrafter()
    drafter.begin(0)
    return drafter.propose([context(token_ids, max_nodes, max_depth)])[0]


def depths(proposal: Proposal) -> list[int]:
    found: list[int] = []
    for node, parent in enumerate(proposal.parents):
        assert -1 <= parent < node
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def paths(proposal: Proposal) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token_id, parent in zip(proposal.token_ids, proposal.parents, strict=True):
        found.append((() if parent < 0 else found[parent]) + (token_id,))
    return found


def searched(tokens: list[int]) -> dict[int, int]:
    """What `History.matches` gives, found by comparing every place with the text's end."""
    common = {}
    for end in range(MIN_MATCH, len(tokens)):
        length = 0
        while length < min(MAX_MATCH, end) and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        if length >= MIN_MATCH:
            common[end] = length
    best = sorted(common, key=lambda end: (-common[end], -end))[:MAX_VOTERS]
    return {end: common[end] for end in best}


@given(texts)
def test_matches_are_the_longest_and_latest_of_the_whole_text(tokens: list[int]) -> None:
    history = History()
    history.extend(tokens)
    assert list(history.matches().items()) == list(searched(tokens).items())


@given(texts, st.data())
def test_a_text_in_pieces_drafts_like_the_text_at_once(tokens: list[int], data: st.DataObject) -> None:
    drafter = LookupDrafter()
    drafter.begin(0)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=10)))
    for cut in [*cuts, len(tokens)]:
        assert drafter.propose([context(tokens[:cut])]) == [draft(tokens[:cut])]


@given(texts)
def test_it_knows_beforehand_whether_it_will_propose(tokens: list[int]) -> None:
    drafter = LookupDrafter()
    drafter.begin(0)
    assert drafter.has_proposal(0, tokens) == bool(draft(tokens).token_ids)
    assert drafter.propose([context(tokens)]) == [draft(tokens)]


@given(texts, st.integers(1, 64), st.integers(1, 20))
def test_a_proposal_is_a_tree_within_its_limits(tokens: list[int], max_nodes: int, max_depth: int) -> None:
    proposal = draft(tokens, max_nodes, max_depth)
    assert len(proposal.token_ids) == len(proposal.parents) == len(proposal.scores) <= max_nodes
    assert all(depth <= max_depth for depth in depths(proposal))
    assert all(0 < score <= 1 for score in proposal.scores)
    assert len(set(paths(proposal))) == len(proposal.token_ids)  # siblings carry distinct tokens
    assert set(proposal.token_ids) <= set(tokens)


@given(texts)
def test_more_nodes_only_add_to_the_likeliest_ones(tokens: list[int]) -> None:
    many, few = draft(tokens, max_nodes=40, max_depth=10), draft(tokens, max_nodes=10, max_depth=10)
    assert many.token_ids[: len(few.token_ids)] == few.token_ids
    assert many.parents[: len(few.parents)] == few.parents
    reach: list[float] = []
    for score, parent in zip(many.scores, many.parents, strict=True):
        reach.append(score * (1.0 if parent < 0 else reach[parent]))
    assert reach == sorted(reach, reverse=True)


def test_a_repeated_passage_is_drafted_to_the_full_depth() -> None:
    passage = list(range(100, 130))
    assert paths(draft([*passage, 1, 2, *passage[:5]], max_nodes=12))[-1] == tuple(passage[5:17])


def test_a_loop_is_drafted_as_looping() -> None:
    assert draft([9, 8, 7, 7, 7]).token_ids == [7] * 16
    assert draft([9, 1, 2, 1, 2, 1]).token_ids == [2, 1] * 8
    assert draft([9, 1, 2, 3, 1, 2]).token_ids == [3, 1, 2] * 5 + [3]


def test_several_continuations_become_branches_and_the_commoner_one_comes_first() -> None:
    proposal = draft([1, 2, 5, 0, 1, 2, 6, 3, 1, 2, 5, 4, 1, 2], max_depth=1)
    assert (proposal.token_ids, proposal.parents) == ([5, 6], [-1, -1])
    assert proposal.scores[0] > proposal.scores[1]


def test_shorter_matches_add_branches_below_longer_ones() -> None:
    proposal = draft([1, 2, 3, 50, 7, 2, 3, 60, 1, 2, 3], max_depth=1)
    assert proposal.token_ids == [50, 60]
    assert proposal.scores[0] > proposal.scores[1]


def test_shared_beginnings_are_shared_nodes() -> None:
    proposal = draft([1, 2, 5, 6, 7, 1, 2, 5, 6, 8, 1, 2], max_nodes=4)
    assert sorted(paths(proposal)) == [(5,), (5, 6), (5, 6, 7), (5, 6, 8)]


def test_a_longer_match_a_further_vote_and_a_deeper_node_raise_the_score() -> None:
    def first_score(tokens: list[int]) -> float:
        return draft(tokens, max_depth=1).scores[0]

    short, long, twice = [1, 2, 5, 9, 1, 2], [0, 1, 2, 5, 9, 0, 1, 2], [1, 2, 5, 8, 1, 2, 5, 9, 1, 2]
    assert first_score(short) < first_score(long)
    assert first_score(short) < first_score(twice)
    scores = list(draft(short).scores)
    assert scores == sorted(set(scores))


def test_a_text_without_repetition_is_declined() -> None:
    assert draft(list(range(50))) == Proposal()


def test_sequences_do_not_mix_and_begin_and_end_forget() -> None:
    drafter = LookupDrafter()
    drafter.begin(0)
    drafter.begin(1)
    known, unknown = drafter.propose([context([1, 2, 5, 1, 2]), context([1, 2], key=1)])
    assert known.token_ids
    assert not unknown.token_ids
    drafter.begin(0)
    assert not drafter.propose([context([1, 2])])[0].token_ids
    drafter.end(0)
    drafter.end(0)
    drafter.end(1)
    assert not drafter._histories


@given(texts)
def test_memory_is_bounded_by_the_text(tokens: list[int]) -> None:
    history = History()
    history.extend(tokens)
    lengths = MAX_MATCH - MIN_MATCH + 1
    assert len(history._ends) <= lengths * len(tokens)
    assert all(0 < len(ends) <= MAX_VOTERS for ends in history._ends.values())


def test_a_text_that_never_repeats_costs_one_entry_a_token() -> None:
    history = History()
    history.extend(range(1000))
    assert len(history._ends) == 998  # the last pair has no continuation, and a lone token is no n-gram
