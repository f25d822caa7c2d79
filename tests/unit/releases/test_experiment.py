"""The sequential test of two arms: its interval, its error rate, and the test of the drawn shares."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.releases.experiment import Experiment, UserSums, mismatch_p_value, winsorised

RULES = Experiment(alpha=0.05, tuned_users=100)


def users_of(*values: float, sessions: int = 1) -> UserSums:
    """Users with these means, each over so many sessions."""
    totals_U = sessions * np.array(values, dtype=np.float64)
    return UserSums(totals_U=totals_U, sessions_U=np.full(len(values), float(sessions)))


def test_a_sequence_holds_at_all_looks() -> None:
    random, misses = np.random.default_rng(0), 0
    for _ in range(200):
        values = random.normal(0, 1, (2, 400))
        looks = (RULES.difference(*(users_of(*one[:users]) for one in values)) for users in range(20, 400, 20))
        misses += any(look is not None and not look.low <= 0 <= look.high for look in looks)
    assert misses <= 10


@pytest.mark.parametrize("tuned_users", [20, 100])
def test_a_sequence_ends_where_the_likelihood_ratio_is_one_over_alpha(tuned_users: int) -> None:
    """Λ of the module's docstring. Each value is there twice, so that no quantile is within the range."""
    control, treatment = [0.0, 0.0, 1.0, 1.0, 1.0], [0.5, 0.5, 3.0, 3.0]
    rules = Experiment(alpha=0.05, tuned_users=tuned_users)
    difference = rules.difference(users_of(*control, sessions=3), users_of(*treatment, sessions=2))
    assert difference is not None
    assert difference.users == (5, 4)
    assert difference.value == pytest.approx(1.75 - 0.6)
    variance = 0.3 / 5 + (4 * 1.25**2 / 3) / 4
    tau2 = 8 * variance * 9 / tuned_users
    for end in (difference.low, difference.high):
        exponent = tau2 * (end - difference.value) ** 2 / (2 * variance * (variance + tau2))
        assert math.sqrt(variance / (variance + tau2)) * math.exp(exponent) == pytest.approx(1 / 0.05)
    assert difference.low < difference.value < difference.high


def test_users_who_are_all_alike_show_nothing() -> None:
    difference = RULES.difference(users_of(0.5, 0.5), users_of(0.7, 0.7, 0.7))
    assert difference is not None
    assert (difference.low, difference.high) == (-math.inf, math.inf)


@pytest.mark.parametrize("users", [(1, 5), (5, 1), (2, 3)])
def test_two_users_of_each_arm_are_the_fewest_that_are_compared(users: tuple[int, int]) -> None:
    difference = RULES.difference(*(users_of(*np.linspace(1.0, count, count)) for count in users))
    assert (difference is None) == (min(users) < 2)
    if difference is not None:
        assert difference.users == users
        assert difference.value == pytest.approx(0.5, abs=0.01)


def test_values_beyond_the_quantiles_of_all_users_are_clipped_to_them() -> None:
    """Of the numbers from 0 to 200, the quantiles 0.005 and 0.995 are 1 and 199."""
    control, treatment = winsorised(np.arange(101.0), np.arange(101.0, 201.0))
    assert control.tolist() == [1.0, *range(1, 101)]
    assert treatment.tolist() == [*range(101, 200), 199.0]


@pytest.mark.parametrize(
    ("totals", "sessions"), [([1.0, 2.0], [1.0]), ([1.0], [1.0, 1.0]), ([1.0, 2.0], [3.0, 0.0]), ([], [1.0])]
)
def test_sums_have_one_total_and_at_least_one_session_for_each_user(totals: list[float], sessions: list[float]) -> None:
    with pytest.raises(ValueError, match="one total and one number of sessions, from 1, for each user"):
        UserSums(totals_U=np.array(totals), sessions_U=np.array(sessions))


@pytest.mark.parametrize(
    ("control", "treatment", "share", "expected"),
    [(950, 50, 0.05, 1.0), (96, 1, 0.05, None), (0, 9, 0.25, None), (960, 10, 0.05, None)],
)
def test_a_mismatch_is_the_binomial_against_the_beta_binomial(
    control: int, treatment: int, share: float, expected: float | None
) -> None:
    """Both are products over the users; the prior of the second is the stated share, with the weight of 100 users."""
    stated, mixture = Fraction(1), Fraction(1)
    for arm, stated_share in ((treatment, Fraction(share)), (control, 1 - Fraction(share))):
        for number in range(arm):
            stated *= stated_share
            mixture *= 100 * stated_share + number
    for number in range(control + treatment):
        mixture /= 100 + number
    p_value = mismatch_p_value(control, treatment, share)
    assert p_value == pytest.approx(min(1.0, float(stated / mixture)), rel=1e-6)
    assert expected is None or p_value == expected


@given(st.integers(0, 500), st.integers(0, 500), st.floats(0.01, 0.99))
def test_a_mismatch_does_not_depend_on_which_arm_is_named_first(control: int, treatment: int, share: float) -> None:
    other_way = mismatch_p_value(treatment, control, 1 - share)
    assert mismatch_p_value(control, treatment, share) == pytest.approx(other_way, rel=1e-6)


@pytest.mark.parametrize("share", [-0.1, 0.0, 1.0, 1.5])
def test_a_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(ValueError, match=f"share={share}: expected a number between 0 and 1"):
        mismatch_p_value(1, 1, share)
