# SPDX-License-Identifier: Apache-2.0
"""A drafter that does not pay for a sequence is asked now and then only; one that pays, always."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_backend.engine.account import CAP, CREDIT, NUM_LOOKED_BACK, RATE, Account, Trust


def ask(account: Account, num_accepted: int, cost: float, rounds: int) -> list[bool]:
    """In which rounds the drafter is asked when each of its drafts brings and costs so many tokens."""
    asked = []
    for _ in range(rounds):
        asked.append(account.balance > 0)
        if asked[-1]:
            account.settle(num_accepted, cost, 2)
        else:
            account.wait()
    return asked


@given(st.floats(0.02, 5.0), st.integers(1, 3000))
def test_drafts_that_never_succeed_cost_their_credit_and_a_small_share_of_the_rounds(cost: float, rounds: int) -> None:
    spent = cost * sum(ask(Account(), 0, cost, rounds))
    assert spent <= CREDIT + RATE * rounds + cost


@given(st.floats(0.02, 2.0))
def test_a_drafter_that_loses_is_still_tried(cost: float) -> None:
    tries = sum(ask(Account(), 0, cost, 3000)[1000:])
    assert tries >= RATE * 2000 / (max(cost, RATE * NUM_LOOKED_BACK) + 2 * RATE) - 1


def test_a_trial_that_fails_is_repeated_when_there_is_something_new_to_look_back_at() -> None:
    asked = ask(Account(), 0, 0.02, 30)
    assert asked[0]
    assert asked.index(True, 1) > NUM_LOOKED_BACK


def test_looking_back_earns_what_it_would_have_saved_and_owes_nothing() -> None:
    account = Account()
    account.settle(0, 0.5, 2)
    before = account.balance
    account.look_back([(0.5, False)] * NUM_LOOKED_BACK)
    assert account.balance == before
    account.look_back([(0.5, True)] * NUM_LOOKED_BACK)
    assert account.is_open
    account.look_back([(0.5, True)] * 100)
    assert account.balance == CAP


@given(st.integers(1, 4), st.floats(0.02, 0.9))
def test_a_drafter_that_pays_is_always_asked(num_accepted: int, cost: float) -> None:
    assert all(ask(Account(), num_accepted, cost, 300))


def test_a_drafter_that_pays_again_recovers() -> None:
    account = Account()
    ask(account, 0, 0.5, 500)
    assert all(ask(account, 2, 0.5, 300)[100:])


def test_earlier_gains_are_lost_again_up_to_a_cap() -> None:
    account = Account()
    ask(account, 4, 0.5, 1000)
    assert account.balance == CAP
    assert sum(ask(account, 0, 0.5, 20)) == CAP / 0.5 + 1


def test_a_drafter_is_on_trial_until_a_success_and_again_when_its_balance_is_spent() -> None:
    account = Account()
    assert account.is_on_trial
    account.settle(0, 0.1, 2)
    assert account.is_on_trial
    account.settle(2, 0.1, 2)
    assert not account.is_on_trial
    account.settle(0, 0.1, 2)
    assert not account.is_on_trial
    account.settle(0, CAP, 2)
    assert account.is_on_trial


@pytest.mark.parametrize("num_accepted", [0, 1, 5])
def test_the_mean_follows_what_a_draft_brings(num_accepted: int) -> None:
    account = Account()
    for _ in range(100):
        account.settle(num_accepted, 0.1, 2)
    assert account.num_accepted == pytest.approx(num_accepted, abs=0.01)


def test_the_first_asks_count_in_full() -> None:
    account = Account()
    for num_accepted, num_rows, mean, mean_rows in [(0, 1, 1.0, 2.0), (4, 5, 2.0, 3.0), (0, 1, 1.5, 2.5)]:
        account.settle(num_accepted, 0.1, num_rows)
        assert (account.num_accepted, account.num_rows) == (pytest.approx(mean), pytest.approx(mean_rows))


def trusted(expected: float, taken: list[bool]) -> float:
    trust = Trust()
    for is_taken in taken:
        trust.learn(expected, taken=is_taken)
    return trust.factor


def test_trust_starts_neutral_and_follows_the_text() -> None:
    assert Trust().factor == 1.0
    assert trusted(0.5, [True, False] * 200) == pytest.approx(1.0, abs=0.05)
    assert trusted(0.8, [False] * 200) < 0.1
    assert trusted(0.3, [True] * 200) == 1.5
    assert trusted(0.8, [False] * 200 + [True] * 200) > 0.9


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=80))
def test_trust_stays_within_its_bounds(expected: float, taken: list[bool]) -> None:
    assert 0 < trusted(expected, taken) <= 1.5


@given(st.floats(0, 1), st.floats(0, 1), st.lists(st.booleans(), max_size=20))
def test_trust_moves_probabilities_towards_what_it_saw_but_not_to_certainty(
    expected: float, general: float, taken: list[bool]
) -> None:
    trust = Trust()
    for is_taken in taken:
        trust.learn(expected, taken=is_taken)
    here = trust.probability(general)
    assert (here == 1) <= (general > 0.999)
    rounding = 1e-12
    assert here <= general if trust.factor < 1 else here >= general - rounding


def test_what_a_drafter_brought_is_forgotten_while_it_is_not_asked() -> None:
    account = Account(balance=CAP)
    for _ in range(20):
        account.settle(0, 0.0, 2)
    low, few = account.num_accepted, account.num_rows
    for _ in range(1000):
        account.wait()
    assert low < 0.5
    assert few < 2.5
    assert account.num_accepted > 1.9
    assert account.num_rows > 2.9
