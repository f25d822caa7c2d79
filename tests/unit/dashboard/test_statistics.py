"""Means, intervals and differences, compared with known values."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.dashboard.statistics import (
    difference_of,
    exact_interval,
    mean_amount,
    mean_of,
    mean_over_seeds,
    pass_at_k,
    sign_test,
    student,
)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_draws_of_k_tries_with_a_pass(tries: int, data: st.DataObject) -> None:
    passed, k = data.draw(st.integers(0, tries)), data.draw(st.integers(1, tries))
    draws = list(itertools.combinations([index < passed for index in range(tries)], k))
    assert pass_at_k(tries, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    rate, tries, k = Fraction(3, 10), 6, 3
    chances = [math.comb(tries, c) * rate**c * (1 - rate) ** (tries - c) for c in range(tries + 1)]
    mean = sum(float(chance) * pass_at_k(tries, c, k) for c, chance in enumerate(chances))
    assert mean == pytest.approx(float(1 - (1 - rate) ** k), abs=1e-12)


@pytest.mark.parametrize(("tries", "k"), [(3, 4), (3, 0)])
def test_pass_at_k_of_too_few_tries_is_refused(tries: int, k: int) -> None:
    with pytest.raises(
        ValueError, match=f"pass@{k} cannot be told from {tries} tries: try each task at least {k} times"
    ):
        pass_at_k(tries, 0, k)


@pytest.mark.parametrize(
    ("passed", "tasks", "low", "high"),
    [(0, 10, 0.0, 0.30850), (4, 10, 0.12155, 0.73762), (10, 10, 0.69150, 1.0), (130, 200, 0.57955, 0.71593)],
)
def test_the_exact_interval_is_that_of_the_tables(passed: int, tasks: int, low: float, high: float) -> None:
    assert exact_interval(passed, tasks) == pytest.approx((low, high), abs=2e-5)


@pytest.mark.parametrize("tasks", [1, 10])
def test_the_exact_interval_of_none_or_all_ends_at_0_or_1(tasks: int) -> None:
    assert (exact_interval(0, tasks)[0], exact_interval(tasks, tasks)[1]) == (0.0, 1.0)


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.5, 0.97])
def test_the_exact_interval_covers_in_95_percent_of_cases_or_more(rate: float) -> None:
    tasks = 25
    chances = [math.comb(tasks, c) * rate**c * (1 - rate) ** (tasks - c) for c in range(tasks + 1)]
    covered = [low <= rate <= high for low, high in (exact_interval(c, tasks) for c in range(tasks + 1))]
    assert sum(chance for chance, hit in zip(chances, covered, strict=True) if hit) >= 0.95


def own(values: Sequence[float]) -> list[str]:
    """Each task is of a template of its own."""
    return [str(index) for index in range(len(values))]


@pytest.mark.parametrize(
    ("freedom", "width"),
    [(1, 12.70620), (2, 4.302653), (3, 3.182446), (4, 2.776445), (9, 2.262157), (19, 2.093024), (30, 2.042272),
     (77, 1.991254), (511, 1.964617)],
)  # fmt: skip
def test_students_interval_is_that_of_the_tables(freedom: int, width: float) -> None:
    assert student(freedom) == pytest.approx(width, rel=1e-6)  # scipy.stats.t.ppf(0.975, freedom)


def test_errors_over_templates_are_those_of_a_regression_with_clusters() -> None:
    """statsmodels: OLS(values, ones).fit(cov_type="cluster", cov_kwds={"groups": clusters}, use_t=True)."""
    values = [1.0, 0.0, 1.0, 1.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.75]
    result = mean_of(values, list("aabbbcccda"))
    assert result.value == pytest.approx(0.55)
    assert result.stderr == pytest.approx(0.19646883, abs=1e-8)
    assert (result.low, result.high, result.method) == (0.0, 1.0, "Student's t over templates")  # a rate ends there
    unbounded = mean_amount(values, list("aabbbcccda"))
    assert (unbounded.low, unbounded.high) == pytest.approx((-0.07525149, 1.17525149), abs=1e-7)


@pytest.mark.parametrize(
    ("tasks", "covered"), [(5, (0.90, 0.97)), (10, (0.93, 0.97)), (20, (0.92, 0.97))], ids=["5", "10", "20"]
)
def test_the_interval_of_a_few_tasks_covers_about_as_often_as_it_says(tasks: int, covered: tuple[float, float]) -> None:
    """Four tries of each task; a percentile bootstrap covers 86 % of five tasks."""
    generator, rounds = np.random.default_rng(5), 1000
    rates = generator.random((rounds, tasks))
    estimates = [mean_of(values, own(values)) for values in (generator.binomial(4, rates) / 4).tolist()]
    hits = sum(estimate.low <= 0.5 <= estimate.high for estimate in estimates) / rounds
    assert covered[0] <= hits <= covered[1]


def test_tasks_are_what_is_drawn_not_tries() -> None:
    values = [1.0, 0.0, 0.5, 0.5, 1.0, 0.25] * 2
    few_tasks = mean_of(values, own(values))
    assert few_tasks.high - few_tasks.low > 0.3  # as if each try counted it would be a half of that


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_what_never_differs_is_not_certain(value: float) -> None:
    values = [value] * 20
    estimate = mean_of(values, own(values))
    assert estimate.value == value
    assert estimate.high - estimate.low == pytest.approx(0.16843, abs=1e-4)
    alike = difference_of(values, values, own(values))
    assert alike.value == 0.0
    assert alike.high == pytest.approx(0.16843, abs=1e-4)
    assert alike.low == -alike.high
    of_templates = mean_of(values, [str(index // 5) for index in range(20)])
    assert of_templates.high - of_templates.low == pytest.approx(exact_interval(0, 4)[1])


def test_what_changes_alike_everywhere_is_not_certain_either() -> None:
    unseen = 0.16843  # the share of a kind of task of which twenty show none, at most
    gained = difference_of([0.0] * 20, [1.0] * 20, own([0.0] * 20))
    assert (gained.value, gained.low, gained.high) == pytest.approx((1.0, 1 - 2 * unseen, 1.0), abs=1e-4)
    middling = mean_of([0.5] * 20, own([0.5] * 20))
    assert (middling.value, middling.low) == pytest.approx((0.5, 0.5 - unseen / 2), abs=1e-4)
    assert middling.high - middling.value == pytest.approx(middling.value - middling.low)


@pytest.mark.parametrize(
    ("values", "error"),
    [([1.0, 0.0] * 128, 0.5 / 255**0.5), ([1.0] * 512, 0.00718 / 1.96), ([0.0] * 512, 0.00718 / 1.96), ([1.0], 0.497)],
)
def test_a_rate_that_never_failed_has_an_error_all_the_same(values: list[float], error: float) -> None:
    assert mean_of(values, own(values)).stderr == pytest.approx(error, rel=2e-3)


@pytest.mark.parametrize(
    ("values", "ends"), [((2.2, 0.6, -1.0), (-3.374, 4.574)), ((0.0, 1.0), (-5.853, 6.853)), ((3.0,) * 20, (3.0, 3.0))]
)
def test_few_seeds_have_a_wide_interval(values: tuple[float, ...], ends: tuple[float, float]) -> None:
    result = mean_over_seeds(values)
    assert (result.low, result.high) == pytest.approx(ends, abs=1e-3)
    assert "on the same held-out tasks" in result.method
    with pytest.raises(ValueError, match="an interval needs two"):
        mean_over_seeds(values[:1])


def test_a_difference_is_paired() -> None:
    before = [0.0, 1.0] * 20
    after = [value + 0.1 for value in before]
    estimate = difference_of(before, after, own(before))
    assert estimate.value == pytest.approx(0.1)
    assert estimate.low == pytest.approx(0.1)  # the tasks differ much, the pairs do not
    assert estimate.high == pytest.approx(0.1)


def test_the_sign_test_is_the_binomial_one() -> None:
    test = sign_test([0, 0, 0, 0, 0, 1, 0.5, 1], [1, 1, 1, 1, 1, 0, 0.5, 1])
    assert (test.wins, test.losses, test.ties) == (5, 1, 2)
    assert test.p == pytest.approx(2 * (1 + 6) / 64)
    assert sign_test([1, 0], [1, 0]).p == 1.0


def test_nothing_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no task has a value"):
        mean_of([], [])
    with pytest.raises(ValueError, match="no task in common"):
        difference_of([], [], [])


def test_only_a_difference_of_rates_has_bounds() -> None:
    rates, amounts = [0.0, 1.0, 0.0, 1.0], [0.0, 9.0, 9.0, 0.0]
    assert difference_of(rates, rates[::-1], own(rates)).low == -1
    assert difference_of(amounts, rates, own(rates)).low < -1
    assert difference_of(rates, amounts, own(rates)).high > 1


def test_a_difference_is_of_the_same_tasks() -> None:
    with pytest.raises(ValueError, match="longer"):
        difference_of([0.0], [0.0, 1.0], ["a"])


def test_an_interval_over_templates_is_that_of_their_means_where_they_are_of_one_size() -> None:
    means = [0.2, 0.5, 0.9, 0.4]
    values = [mean + spread for mean in means for spread in (-0.1, 0.0, 0.1)]
    result = mean_amount(values, [name for name in "abcd" for _ in range(3)])
    of_means = mean_over_seeds(means)
    assert (result.low, result.value, result.high) == pytest.approx((of_means.low, of_means.value, of_means.high))


@pytest.mark.parametrize("templates", ["abcde", "aaaaa"])
def test_tasks_are_drawn_where_templates_have_one_each_or_there_is_but_one(templates: str) -> None:
    values = [0.2, 0.6, 0.7, 0.4, 0.6]
    result = mean_of(values, list(templates))
    of_tasks = mean_over_seeds(values)
    assert (result.low, result.high) == pytest.approx((of_tasks.low, of_tasks.high))
    assert result.method == "Student's t over tasks"


def test_the_interval_over_templates_covers_about_as_often_as_it_says_and_that_over_tasks_does_not() -> None:
    generator, rounds = np.random.default_rng(6), 400
    covered = {"templates": 0, "tasks": 0}
    for _ in range(rounds):
        rates = np.repeat(generator.beta(1, 1, size=12), 20)
        values = (generator.random(240) < rates).astype(float).tolist()
        over_templates = mean_of(values, [str(index // 20) for index in range(240)])
        low, high = exact_interval(int(sum(values)), 240)
        covered["templates"] += over_templates.low <= 0.5 <= over_templates.high
        covered["tasks"] += low <= 0.5 <= high
    assert covered["templates"] / rounds == pytest.approx(0.95, abs=0.03)
    assert covered["tasks"] / rounds < 0.8
