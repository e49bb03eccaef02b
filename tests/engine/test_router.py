# SPDX-License-Identifier: Apache-2.0
"""The router keeps the nodes that pay; the calibration learns what scores are worth, the curve what passes cost."""

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_backend.engine.drafters.base import Proposal
from tandem_backend.engine.proposal_tree import ProposalTree
from tandem_backend.engine.router import MARGIN, Calibration, Router, VerifyCurve, load_verify_curve
from tandem_backend.errors import ConfigError

FLAT = VerifyCurve((1, 64), (1.0, 1.0))
LINEAR = VerifyCurve((1, 64), (1.0, 64.0))


def tree_of(parents: Sequence[int], scores: Sequence[float], max_nodes: int = 8) -> ProposalTree:
    tree = ProposalTree(0, max_nodes)
    tree.merge("drafter", Proposal(range(1, len(parents) + 1), parents, scores), scores)
    return tree


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 5) -> ProposalTree:
    num_nodes = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    scores = [draw(st.floats(0.02, 1.0)) for _ in range(num_nodes)]
    return tree_of(parents, scores, draw(st.sampled_from([max_nodes, max_nodes, 0, 2])))


@st.composite
def curves(draw: st.DrawFn) -> VerifyCurve:
    rows = (1, 2, 4, 8, 16)
    steps = [draw(st.floats(0.05, 3.0)) for _ in rows]
    return VerifyCurve(rows, tuple(sum(steps[: n + 1]) for n in range(len(rows))))


def closed_sets(tree: ProposalTree) -> Iterator[set[int]]:
    for chosen in product([False, True], repeat=len(tree.token_ids)):
        kept = {node for node, is_kept in enumerate(chosen) if is_kept}
        if len(kept) <= tree.max_nodes and all(tree.parents[node] < 0 or tree.parents[node] in kept for node in kept):
            yield kept


def rate(router: Router, several: Sequence[ProposalTree], kept: Sequence[set[int]], others: int, fixed: float) -> float:
    """Tokens a millisecond that a choice of nodes promises."""
    tokens = len(several) + sum(tree.paths[node] for tree, nodes in zip(several, kept, strict=True) for node in nodes)
    plain = router.curve.cost(others)
    added = router.curve.cost(others + sum(map(len, kept))) - plain
    return tokens / (plain + MARGIN * added + fixed)


@given(
    st.lists(trees(), min_size=1, max_size=2),
    curves(),
    st.integers(2, 12),
    st.integers(0, 6),
    st.floats(0.0, 5.0),
)
@settings(max_examples=60, deadline=None)
def test_the_cut_is_the_best_of_all_closed_sets(
    several: list[ProposalTree], curve: VerifyCurve, row_budget: int, num_prompt_rows: int, fixed_ms: float
) -> None:
    router, others = Router(curve, row_budget), len(several) + num_prompt_rows
    kept = router.cut(several, others, fixed_ms)
    fits = max(row_budget - len(several), 0)
    assert sum(map(len, kept)) <= fits
    assert all(nodes in list(closed_sets(tree)) for tree, nodes in zip(several, kept, strict=True))
    best = max(
        rate(router, several, choice, others, fixed_ms)
        for choice in product(*(list(closed_sets(tree)) for tree in several))
        if sum(map(len, choice)) <= fits
    )
    assert rate(router, several, kept, others, fixed_ms) == pytest.approx(best)


@given(st.lists(trees(8), min_size=1, max_size=4), st.integers(1, 20))
def test_always_fills_the_budget(several: list[ProposalTree], row_budget: int) -> None:
    kept = Router(LINEAR, row_budget, always=True).cut(several, len(several), 0.0)
    num_nodes = sum(min(len(tree.token_ids), tree.max_nodes) for tree in several)
    assert sum(map(len, kept)) == min(max(row_budget - len(several), 0), num_nodes)


def test_nothing_is_kept_where_a_row_costs_more_than_it_brings() -> None:
    unlikely = tree_of([-1, 0], [0.3, 0.3])
    assert Router(LINEAR, 32).cut([unlikely, unlikely], 2, 0.0) == [set(), set()]
    assert Router(FLAT, 32).cut([unlikely, unlikely], 2, 0.0) == [{0, 1}, {0, 1}]


def test_a_joint_budget_goes_where_it_gains_most() -> None:
    likely, unlikely = tree_of([-1, 0, 1, 2], [0.9] * 4), tree_of([-1, 0, 1, 2], [0.6] * 4)
    # 0.9, 0.81, 0.729 and 0.656 of the first come before 0.6 of the second; 0.36 is left out.
    assert Router(FLAT, 2 + 5).cut([likely, unlikely], 2, 0.0) == [{0, 1, 2, 3}, {0}]
    assert Router(FLAT, 2 + 2).cut([unlikely, likely], 2, 0.0) == [set(), {0, 1}]


def test_more_sequences_than_rows_leaves_each_its_anchor() -> None:
    several = [tree_of([-1], [1.0])] * 5
    assert Router(FLAT, 3).cut(several, 5, 0.0) == [set()] * 5


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
def test_calibration_converges_to_what_is_observed(rate: float) -> None:
    calibration, random = Calibration(), Random(0)
    assert calibration.probability("a", 0.7) == pytest.approx(0.7)
    for _ in range(3000):
        calibration.learn("a", 0.7, taken=random.random() < rate)
    assert calibration.probability("a", 0.7) == pytest.approx(rate, abs=0.06)
    assert calibration.probability("b", 0.7) == pytest.approx(0.7)
    assert calibration.probability("a", 0.2) == pytest.approx(0.2)


def test_calibration_forgets() -> None:
    calibration = Calibration()
    for taken in (True, False):
        for _ in range(1500):
            calibration.learn("a", 0.5, taken=taken)
    assert calibration.probability("a", 0.5) < 0.05


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60), st.floats(0, 1))
def test_a_calibrated_probability_is_one(trials: list[tuple[float, bool]], score: float) -> None:
    calibration = Calibration()
    for tried, taken in trials:
        calibration.learn("a", tried, taken=taken)
    assert 0 <= calibration.probability("a", score) <= 1


@given(curves(), st.integers(1, 40))
def test_a_curve_goes_through_its_points_and_rises(curve: VerifyCurve, rows: int) -> None:
    assert [curve.cost(n) for n in curve.rows] == pytest.approx(list(curve.milliseconds))
    assert curve.cost(rows) <= curve.cost(rows + 1) + 1e-9


def test_a_curve_follows_the_machine_and_shrugs_off_a_stall() -> None:
    curve = VerifyCurve((1, 2), (1.0, 2.0))
    curve.learn(1, 1000.0)
    assert curve.scale < 1.1
    for _ in range(500):
        curve.learn(2, 6.0)
    assert curve.cost(1) == pytest.approx(3.0, rel=0.01)


def test_a_curve_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps({"rows": [{"rows": 1, "milliseconds": 2.0}, {"rows": 5, "milliseconds": 4.0}]}))
    curve = load_verify_curve(path)
    assert curve.cost(3) == 3.0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is no table"),
        ("{", "is no table"),
        ('{"rows": [1, 2]}', "is no table"),
        ('{"rows": []}', "is no table"),
        ('{"rows": [{"rows": 1, "milliseconds": 1}]}', "needs two or more"),
        ('{"rows": [{"rows": 2, "milliseconds": 1}, {"rows": 1, "milliseconds": 1}]}', "needs two or more"),
        ('{"rows": [{"rows": 1, "milliseconds": 0}, {"rows": 2, "milliseconds": 1}]}', "needs two or more"),
    ],
)
def test_a_bad_curve_is_refused_by_its_key(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "curve.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"^verify_curve: .*{problem}"):
        load_verify_curve(path)
