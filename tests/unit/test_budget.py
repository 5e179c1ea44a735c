"""HOW many steps are left for the cluster?"""

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.control.budget import Budget


def test_a_worker_holds_one_ticket() -> None:
    budget = Budget(2)
    assert budget.grant(0, applied=0)
    assert budget.grant(0, applied=0)
    assert budget.grant(1, applied=0)
    assert not budget.grant(2, applied=0)


def test_a_ticket_that_comes_back_is_granted_again() -> None:
    budget = Budget(1)
    assert budget.grant(0, applied=0)
    assert not budget.grant(1, applied=0)
    budget.give_back(0)
    budget.give_back(0)
    assert budget.grant(1, applied=0)


def test_it_is_spent_when_all_are_applied() -> None:
    budget = Budget(3)
    assert [budget.is_spent(applied) for applied in (0, 2, 3, 4)] == [False, False, True, True]
    assert [budget.grant_round(applied) for applied in (0, 2, 3)] == [True, True, False]
    assert Budget(0).is_spent(0)
    assert not Budget(0).grant(0, applied=0)


@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200))
def test_exactly_the_total_is_applied_whoever_comes_and_dies(total: int, events: list[tuple[int, bool]]) -> None:
    """A worker asks, and then pushes or dies; in the end everybody who is left goes on until nothing is granted."""
    budget, applied, holders = Budget(total), 0, set()
    for worker, dies in events + [(w, False) for w in range(4)] * (2 * total + 2):
        if worker not in holders:
            if budget.grant(worker, applied):
                holders.add(worker)
            continue
        holders.discard(worker)
        budget.give_back(worker)
        applied += not dies
        assert applied <= total
    assert applied == total
    assert budget.is_spent(applied)
