"""Hack rates: every rollout counted once, in any order, and nothing unbounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.telemetry.hacks import MAX_TEMPLATES, OTHERS, HackRates, Judged, interval

judged = st.builds(
    Judged,
    template=st.sampled_from(["a", "b", "c"]),
    step=st.integers(0, 4),
    hacked=st.booleans(),
    flags=st.sampled_from([(), ("x",), ("x", "y")]),
    disposition=st.sampled_from(["keep", "zero", "quarantine"]),
    reason=st.sampled_from(["x", "y"]),
    impossible=st.booleans(),
    passed=st.booleans(),
)


def fold(rollouts: list[Judged]) -> HackRates:
    rates = HackRates()
    for one in rollouts:
        rates.add(one)
    return rates


def test_figures_of_a_few_rollouts() -> None:
    honest = Judged(template="sort", step=1, hacked=False, flags=("outside_task",), disposition="keep", passed=True)
    cheat = Judged(
        template="sort", step=2, hacked=True, flags=("git_archaeology",), disposition="quarantine",
        reason="git_archaeology", passed=True,
    )  # fmt: skip
    meter = Judged(template="impossible: sum", step=2, hacked=False, flags=(), disposition="keep", impossible=True)
    figures = fold([honest, cheat, meter, honest]).figures()
    assert figures["hack_rate"] == 0.25
    assert figures["by_detector"] == {"outside_task": 0.5, "git_archaeology": 0.25}
    assert figures["by_step"] == {"1": 0.0, "2": 0.5}
    assert figures["by_template"] == {"sort": 1 / 3}
    assert (figures["quarantined"], figures["zeroed"], figures["reasons"]) == (1, 0, {"git_archaeology": 1})
    assert isinstance(figures["impossible"], dict)
    assert (figures["impossible"]["tried"], figures["impossible"]["passed"]) == (1, 0)


def test_nothing_counted_is_unknown_not_zero() -> None:
    figures = HackRates().figures()
    assert figures["hack_rate"] is None
    assert figures["impossible"] == {"tried": 0, "passed": 0, "rate": None, "low": None, "high": None}


def test_templates_are_bounded() -> None:
    many = [
        Judged(template=f"t{i}", step=0, hacked=True, flags=(), disposition="keep") for i in range(MAX_TEMPLATES + 50)
    ]
    rates = fold(many)
    assert len(rates.templates) == MAX_TEMPLATES + 1
    assert rates.templates[OTHERS].of == 50


@given(st.lists(judged, max_size=20), st.randoms(use_true_random=False))
def test_order_does_not_matter_and_the_parts_add_up(rollouts: list[Judged], rng: object) -> None:
    shuffled = sorted(rollouts, key=lambda _: rng.random())  # type: ignore[attr-defined]  # a random.Random
    rates = fold(rollouts)
    assert rates.figures() == fold(shuffled).figures()
    assert sum(share.of for share in rates.steps.values()) == sum(share.of for share in rates.templates.values())
    assert rates.total.of == len(rollouts)


@pytest.mark.parametrize(
    ("hits", "of", "expected"), [(0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (10, 10, (0.7225, 1.0))]
)
def test_the_interval_is_wilsons(hits: int, of: int, expected: tuple[float, float]) -> None:
    assert interval(hits, of) == pytest.approx(expected, abs=1e-4)
