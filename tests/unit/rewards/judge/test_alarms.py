"""Alarms when the judge is another one or agrees less with people."""

from random import Random

import pytest

from etude.rewards.judge.calibration import AgreementWatch, IdentityWatch


def checks_until_alarm(rate: float, really: float, rng: Random, most: int) -> int:
    """The number of items judged again before an alarm."""
    watch = AgreementWatch(rate)
    return next((n for n in range(1, most) if watch.observe(hit=rng.random() < really)), most)


@pytest.mark.parametrize("rate", [0.6, 0.8, 0.95])
def test_a_fall_is_noticed_soon_and_none_is_hardly_ever_imagined(rate: float) -> None:
    rng = Random(7)
    fallen = [checks_until_alarm(rate, rate - 0.3, rng, 2_000) for _ in range(60)]
    same = [checks_until_alarm(rate, rate, rng, 2_000) for _ in range(30)]
    assert sum(fallen) / len(fallen) < 60
    assert sum(length == 2_000 for length in same) > 20


def test_a_judge_that_agrees_never_alarms_even_where_it_always_did() -> None:
    watch = AgreementWatch(1.0)
    assert not any(watch.observe(hit=True) for _ in range(1_000))
    assert (watch.checks, watch.misses, watch.evidence) == (1_000, 0, 0.0)


def test_after_an_alarm_the_evidence_starts_from_nothing() -> None:
    watch = AgreementWatch(0.9)
    outcomes = [watch.observe(hit=False) for _ in range(40)]
    first = outcomes.index(True)
    assert outcomes.index(True, first + 1) == 2 * first + 1


def test_each_new_name_of_a_model_is_told_once() -> None:
    watch = IdentityWatch(["a", ""])
    assert [watch.observe(name) for name in ("a", "b", "a", "b", "", "c", "c")] == [
        *(False, True, False, False, False, True, False)
    ]


def test_the_first_identity_of_an_uncalibrated_judge_is_not_a_change() -> None:
    watch = IdentityWatch()
    assert [watch.observe(name) for name in ("a", "a", "b")] == [False, False, True]
