# SPDX-License-Identifier: Apache-2.0
"""How prompts share a round's rows: the oldest always moves, the shortest are soon done, nothing is left over."""

from hypothesis import given
from hypothesis import strategies as st
from tandem_backend.engine.prompt_rows import OLDEST_SHARE, share_rows

prompts = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 9)), max_size=40)


@given(prompts, st.integers(1, 300))
def test_every_row_of_the_budget_is_used_and_the_oldest_gets_its_share(
    given_prompts: list[tuple[int, int]], budget: int
) -> None:
    num_pending = [pending for pending, _ in given_prompts]
    rows = share_rows(num_pending, [priority for _, priority in given_prompts], budget)
    assert all(0 <= given_rows <= pending for given_rows, pending in zip(rows, num_pending, strict=True))
    assert sum(rows) == min(budget, sum(num_pending))
    oldest = next((i for i, pending in enumerate(num_pending) if pending), None)
    if oldest is not None:
        assert rows[oldest] >= min(num_pending[oldest], budget / OLDEST_SHARE)


def test_short_prompts_pass_a_long_one() -> None:
    assert share_rows([2000, 30, 10, 40], [5] * 4, 64) == [16, 30, 10, 8]


def test_equal_prompts_are_read_in_their_order() -> None:
    assert share_rows([50, 50, 50], [5] * 3, 64) == [50, 14, 0]


def test_the_most_urgent_goes_first_whatever_its_length() -> None:
    assert share_rows([2000, 10, 900], [5, 5, 1], 64) == [16, 0, 48]
