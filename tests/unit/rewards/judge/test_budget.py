"""Budgets of judges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards.judge.budget import BudgetLimit, JudgeBudget, Prices, Spend

SPENDS = st.builds(
    Spend, calls=st.integers(0, 3), prompt_tokens=st.integers(0, 50), completion_tokens=st.integers(0, 50)
)


@given(st.lists(st.tuples(SPENDS, st.floats(0, 1), st.booleans()), max_size=30))
def test_no_limit_is_ever_overstepped(steps: list[tuple[Spend, float, bool]]) -> None:
    prices = Prices(prompt=1e6, completion=2e6)
    run = JudgeBudget(BudgetLimit(calls=12, tokens=300, cost=350.0), prices)
    budget = run.portion(BudgetLimit(calls=8, tokens=200))
    open_ones: list[tuple[Spend, Spend]] = []
    for most, share, settles in steps:
        if budget.reserve(most):
            used = Spend(
                calls=most.calls,
                prompt_tokens=int(share * most.prompt_tokens),
                completion_tokens=int(share * most.completion_tokens),
            )
            open_ones.append((most, used))
        if settles and open_ones:
            budget.settle(*open_ones.pop(0))
        assert budget.spent.calls <= 8
        assert budget.spent.tokens <= 200
        assert run.cost <= 350.0
    for most, used in open_ones:
        budget.settle(most, used)
    assert run.spent == budget.spent
    assert run.spent.tokens <= 200


def test_what_was_set_aside_and_not_used_is_free_again() -> None:
    budget = JudgeBudget(BudgetLimit(calls=2, tokens=100), Prices())
    most = Spend(calls=1, prompt_tokens=60, completion_tokens=40)
    assert budget.reserve(most)
    assert not budget.reserve(Spend(calls=1, prompt_tokens=1))
    budget.settle(most, Spend(calls=1, prompt_tokens=10))
    assert budget.reserve(Spend(calls=1, prompt_tokens=90))
    assert not budget.reserve(Spend(calls=1))


def test_an_empty_budget_of_the_run_empties_those_of_its_rollouts() -> None:
    run = JudgeBudget(BudgetLimit(calls=1, tokens=100), Prices(), spent=Spend(calls=1))
    assert not run.portion(BudgetLimit(calls=9, tokens=100)).reserve(Spend(calls=1))


def test_no_use_is_below_zero() -> None:
    with pytest.raises(ValueError, match="expected no number below 0"):
        Spend(calls=-1)


def test_money_is_tokens_at_their_prices() -> None:
    assert Prices(prompt=3.0, completion=15.0).cost(Spend(prompt_tokens=1_000_000, completion_tokens=200_000)) == 6.0
