# SPDX-License-Identifier: Apache-2.0
"""The drafter that the backend's README shows, through the interface that the engine uses."""

from example_drafter import BigramDrafter
from tandem_backend.engine.drafters.base import DraftContext, Drafter, Proposal


def context(token_ids: list[int], max_nodes: int = 8, max_depth: int = 8, key: int = 0) -> DraftContext:
    return DraftContext(key, token_ids, 1, (), max_nodes, max_depth)


def started() -> Drafter:
    drafter = BigramDrafter()
    drafter.begin(0)
    return drafter


def test_it_follows_what_came_last() -> None:
    assert started().propose([context([1, 2, 1, 3, 4, 1])]) == [
        Proposal([3, 4, 1, 3, 4, 1, 3, 4], range(-1, 7), [0.5] * 8)
    ]


def test_it_learns_between_calls() -> None:
    drafter = started()
    assert drafter.propose([context([1, 2])])[0].token_ids == []
    assert drafter.propose([context([1, 2, 1], max_depth=1)])[0].token_ids == [2]
    assert drafter.propose([context([1, 2, 1, 5, 1], max_nodes=1)])[0].token_ids == [5]


def test_sequences_do_not_mix() -> None:
    drafter = started()
    drafter.begin(1)
    first, second = drafter.propose([context([1, 2, 1], max_nodes=1), context([1, 3, 1], max_nodes=1, key=1)])
    assert (first.token_ids, second.token_ids) == ([2], [3])


def test_it_forgets_at_begin() -> None:
    drafter = started()
    drafter.propose([context([1, 2])])
    drafter.end(0)
    drafter.begin(0)
    assert drafter.propose([context([1])])[0].token_ids == []
