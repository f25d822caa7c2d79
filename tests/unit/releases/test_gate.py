"""The checks of the offline gate: their numbers, bounds and words."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from etude.config.release import ReleaseConfig, SuiteConfig
from etude.releases.gate import Against, Check, GateFacts, Interval, MissingTries, checks

CONFIG = ReleaseConfig(
    every_steps=1,
    minimum_bar=0.4,
    margin=0.05,
    max_cheating=0.02,
    max_cost_ratio=2.0,
    max_latency_ratio=4.0,
    suites=(SuiteConfig(name="own", recipe="r.toml", margin=0.02),),
)
LEAST = GateFacts(
    reward=Interval(value=0.4, low=0.3, high=0.5),
    tries=50,
    cheats=1,
    parity=True,
    against=Against(
        reward=Interval(value=0.01, low=-0.049, high=0.07),
        cost_excess=Interval(value=-9.0, low=-20.0, high=0.0),
        latency_excess=Interval(value=-3.0, low=-5.0, high=0.0),
        suites={"own": Interval(value=0.0, low=-0.019, high=0.02)},
    ),
    missing=(MissingTries(evaluation="suite own", version=3, missing=1, planned=20, reason="a timeout"),),
)
"""A candidate that just passes every check."""


def by_name(facts: GateFacts) -> Mapping[str, Check]:
    results = checks(facts, CONFIG)
    assert len({check.name for check in results}) == len(results)
    return {check.name: check for check in results}


def test_every_check_has_its_number_its_bound_and_says_both() -> None:
    assert [(check.name, check.value, check.bound, check.passed, check.says) for check in checks(LEAST, CONFIG)] == [
        ("minimum bar", 0.4, 0.4, True, "0.400, at least 0.4"),
        ("cheating", 0.02, 0.02, True, "1 of 50 tries, at most 2.0%"),
        (
            "tries of suite own", 0.05, 0.05, True,
            "1 of 20 tries of version 3 are missing, at most 5%; the last failed because of a timeout",
        ),
        ("numerics", 1.0, 1.0, True, "engine and trainer agree"),
        ("held-out tasks", -0.049, -0.05, True, "+0.010 [-0.049, +0.070], must be above -0.05"),
        ("suite own", -0.019, -0.02, True, "+0.000 [-0.019, +0.020], must be above -0.02"),
        ("cost", 0.0, 0.0, True, "+0 beyond 2 times the released version's, at most 0"),
        ("latency", 0.0, 0.0, True, "+0 beyond 4 times the released version's, at most 0"),
    ]  # fmt: skip


def test_a_difference_of_the_whole_margin_is_too_much() -> None:
    assert LEAST.against is not None
    inferior = replace(
        LEAST.against,
        reward=Interval(value=0.0, low=-0.05, high=0.05),
        suites={"own": Interval(value=0.0, low=-0.02, high=0.02)},
    )
    results = by_name(replace(LEAST, against=inferior))
    assert {name for name, check in results.items() if not check.passed} == {"held-out tasks", "suite own"}


def test_different_numbers_of_engine_and_trainer_fail() -> None:
    check = by_name(replace(LEAST, parity=False))["numerics"]
    assert (check.value, check.passed, check.says) == (0.0, False, "engine and trainer compute different numbers")


def test_before_the_first_release_only_absolute_checks_are_made() -> None:
    alone = by_name(replace(LEAST, parity=None, against=None, missing=()))
    assert alone.keys() == {"minimum bar", "cheating"}


@pytest.mark.parametrize(("cheats", "tries", "share"), [(1, 1, 1.0), (3, 100, 0.03), (0, 0, 0.0)])
def test_cheating_is_a_share_of_the_tries(cheats: int, tries: int, share: float) -> None:
    check = by_name(replace(LEAST, cheats=cheats, tries=tries))["cheating"]
    assert (check.value, check.passed) == (share, share <= CONFIG.max_cheating)


def test_a_candidate_with_many_missing_tries_is_not_measured() -> None:
    few, many = LEAST.missing[0], replace(LEAST.missing[0], missing=2)
    assert replace(LEAST, missing=()).is_measured
    assert LEAST.is_measured
    assert not replace(LEAST, missing=(few, many)).is_measured
    assert not by_name(replace(LEAST, missing=(many,)))["tries of suite own"].passed
