"""``bench loop --quality`` compares bounds of staleness; its runs take hours and are not made here."""

import pytest

from bench.loop.quality import FRESH, STALE, Trial, figures, table
from etude.clock import date_utc


def trial(seed: int, max_staleness: int, sampled: list[float]) -> Trial:
    return Trial(
        seed=seed,
        max_staleness=max_staleness,
        rewards={way: {str(n): (str(n), each) for n, each in enumerate(sampled)} for way in ("sampled", "greedy")},
        staleness_mean=float(max_staleness),
        rl_s=1.0,
        seconds=2.0,
    )


TRIALS = [
    trial(0, FRESH, [1.0, 1.0, 0.0, 0.0]),
    trial(0, STALE, [1.0, 0.0, 0.0, 0.0]),
    trial(1, FRESH, [1.0, 0.0, 0.0, 0.0]),
    trial(1, STALE, [1.0, 1.0, 0.0, 0.0]),
]


def test_what_staleness_costs_is_averaged_over_seeds() -> None:
    result = figures(TRIALS)
    goals = result["goals"]
    assert isinstance(goals, dict) and isinstance(goals["staleness_shortfall"], dict)
    judged = goals["staleness_shortfall"]
    assert (judged["value"], judged["met"], judged["seeds"]) == (0.0, False, 2)
    assert judged["interval"] == pytest.approx([-3.1765, 3.1765], abs=1e-3)
    assert judged["stderr_seeds"] == pytest.approx(0.25)
    assert judged["method"] == "Student's t over seeds, on the same held-out tasks"


def test_seeds_on_the_same_tasks_are_no_further_tasks() -> None:
    def error(seeds: int) -> float:
        runs = [(FRESH, [1.0, 1.0, 0.0, 1.0]), (STALE, [1.0, 0.0, 0.0, 1.0])]
        goals = figures([trial(seed, bound, sampled) for seed in range(seeds) for bound, sampled in runs])["goals"]
        assert isinstance(goals, dict) and isinstance(goals["staleness_shortfall"], dict)
        stderr = goals["staleness_shortfall"]["stderr_templates"]
        assert isinstance(stderr, float)
        return stderr

    assert error(1) == error(9) == 0.25


def test_the_goal_is_met_where_the_interval_over_seeds_stays_below_it() -> None:
    alike = [trial(seed, bound, [1.0, 0.0]) for seed in (0, 1) for bound in (FRESH, STALE)]
    goals = figures(alike)["goals"]
    assert isinstance(goals, dict) and isinstance(goals["staleness_shortfall"], dict)
    assert goals["staleness_shortfall"]["met"] is True


def test_one_seed_that_lost_is_not_enough() -> None:
    result = figures(TRIALS[:2])
    goals, rows = result["goals"], result["results"]
    assert isinstance(goals, dict) and isinstance(goals["staleness_shortfall"], dict) and isinstance(rows, list)
    assert goals["staleness_shortfall"]["met"] is False
    assert goals["staleness_shortfall"]["stderr_seeds"] is None
    assert isinstance(rows[1], dict) and rows[1]["sampled_minus_fresh"] == -0.25
    assert "seed" in table({"bench": "loop-quality", "date": date_utc(), "commit": "0", **result})
