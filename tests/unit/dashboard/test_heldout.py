"""Held-out figures before and after RL, and how they are shown; those of a whole run are test_report.py's."""

from dataclasses import replace

import pytest

from etude.dashboard.heldout import Comparison, about_errors, comparison, full_marks, heldout_figures, kind_of
from etude.dashboard.statistics import Estimate, difference_of, mean_of
from etude.telemetry.events import EvalDone
from etude.types import Json

BEFORE = EvalDone(
    label="before", version=0, tasks=4, sampled_pass=0.5, sampled_stderr=0.28867, greedy_pass=0.4, greedy_stderr=0.2,
    clusters=["comp|a", "comp|a", "arith|b", "arith|c", "arith|c"],
    sampled_passed=[True, False, False, True, None], sampled_rewards=[1.0, 0.25, 0.0, 1.0, None],
    greedy_passed=[True, True, False, False, False], greedy_rewards=[1.0, 1.0, 0.0, 0.0, 0.0],
    sampled_calls=[{"read": 1 / 3, "edit": 0.5}, {"submit": 1.0}],
)  # fmt: skip
AFTER = replace(
    BEFORE, label="after", version=9, tasks=5, sampled_pass=0.6, sampled_stderr=0.3, greedy_pass=0.8, greedy_stderr=0.1,
    sampled_passed=[True, True, False, None, True], sampled_rewards=[1.0, 0.75, 0.5, None, 1.0],
    greedy_passed=[True, False, True, True, True], greedy_rewards=[1.0, 0.0, 1.0, 1.0, 1.0],
    sampled_calls=[], greedy_calls=[{"read": 2 / 3}],
)  # fmt: skip
OLDER_LOG = EvalDone(
    label="after", version=9, tasks=4, sampled_pass=0.75, sampled_stderr=0.1, greedy_pass=0.5, greedy_stderr=0.2
)
"""Without the values of single tasks."""


def mean(prefix: str, label: str, estimate: Estimate) -> dict[str, Json]:
    return {
        f"{prefix}reward_{label}": round(estimate.value, 4),
        f"{prefix}reward_stderr_{label}": round(estimate.stderr, 4),
    }


def difference(prefix: str, estimate: Estimate) -> dict[str, Json]:
    return {
        f"{prefix}difference": round(estimate.value, 4),
        f"{prefix}stderr": round(estimate.stderr, 4),
        f"{prefix}interval": [round(estimate.low, 4), round(estimate.high, 4)],
    }


def test_a_mean_is_over_the_tasks_tried_and_a_difference_over_those_tried_twice() -> None:
    clusters = BEFORE.clusters
    kinds: list[Json] = [
        {"kind": "arith", "n": 3, "pass_before": 0.5, "pass_after": 0.5, "greedy_before": 0.0, "greedy_after": 1.0},
        {"kind": "comp", "n": 2, "pass_before": 0.5, "pass_after": 1.0, "greedy_before": 1.0, "greedy_after": 0.5},
    ]
    assert heldout_figures(BEFORE, AFTER) == {
        "n": 5, "templates": 3, "pays_fractions": True,
        "pass_before": 0.5, "stderr_before": 0.2887, "passed_before": 2,
        **mean("", "before", mean_of([1.0, 0.25, 0.0, 1.0], clusters[:4])),
        "pass_after": 0.6, "stderr_after": 0.3, "passed_after": 3,
        **mean("", "after", mean_of([1.0, 0.75, 0.5, 1.0], [*clusters[:3], clusters[4]])),
        "calls_before": [{"read": 0.3333, "edit": 0.5}, {"submit": 1.0}], "calls_after": [],
        **difference("", difference_of([1.0, 0.0, 0.0], [1.0, 1.0, 0.0], clusters[:3])),
        **difference("reward_", difference_of([1.0, 0.25, 0.0], [1.0, 0.75, 0.5], clusters[:3])),
        "greedy_before": 0.4, "greedy_stderr_before": 0.2, "greedy_passed_before": 2,
        **mean("greedy_", "before", mean_of([1.0, 1.0, 0.0, 0.0, 0.0], clusters)),
        "greedy_after": 0.8, "greedy_stderr_after": 0.1, "greedy_passed_after": 4,
        **mean("greedy_", "after", mean_of([1.0, 0.0, 1.0, 1.0, 1.0], clusters)),
        "greedy_calls_before": [], "greedy_calls_after": [{"read": 0.6667}],
        **difference("greedy_", difference_of([1.0, 1.0, 0, 0, 0], [1.0, 0, 1.0, 1.0, 1.0], clusters)),
        **difference("greedy_reward_", difference_of([1.0, 1.0, 0, 0, 0], [1.0, 0, 1.0, 1.0, 1.0], clusters)),
        "kinds": kinds,
    }  # fmt: skip


def test_figures_of_one_evaluation_alone_are_known() -> None:
    only_after = heldout_figures(None, AFTER)
    assert [only_after[name] for name in ("n", "templates", "pays_fractions")] == [5, 3, True]
    assert [only_after[name] for name in ("pass_before", "passed_before", "calls_before", "difference")] == [None] * 4
    assert only_after["kinds"] == [
        {"kind": "arith", "n": 3, "pass_before": None, "pass_after": 0.5, "greedy_before": None, "greedy_after": 1.0},
        {"kind": "comp", "n": 2, "pass_before": None, "pass_after": 1.0, "greedy_before": None, "greedy_after": 0.5},
    ]
    older = heldout_figures(None, OLDER_LOG)
    assert [older[name] for name in ("n", "pass_after", "templates", "reward_after", "passed_after", "kinds")] == [
        4, 0.75, None, None, None, [],
    ]  # fmt: skip
    assert set(heldout_figures(None, None).values()) == {None}


def test_of_evaluations_with_different_tasks_the_newer_one_has_its_kinds() -> None:
    kinds = heldout_figures(replace(BEFORE, clusters=["a", "a", "b", "b", "c"]), AFTER)["kinds"]
    assert kinds == heldout_figures(None, AFTER)["kinds"]


WHOLE = replace(AFTER, sampled_rewards=[0.0, 1.0, None, 1.0, 0.0], greedy_rewards=[1.0, 1.0, 0.0, 0.0, None])


@pytest.mark.parametrize(
    "fractional",
    [replace(WHOLE, sampled_rewards=[0.5] * 5), replace(WHOLE, greedy_rewards=[None, 0.0, -1.0, 1.0, 1.0])],
)
def test_a_fraction_in_either_evaluation_is_noticed(fractional: EvalDone) -> None:
    for before, after, expected in ((WHOLE, WHOLE, False), (fractional, WHOLE, True), (WHOLE, fractional, True)):
        assert heldout_figures(before, after)["pays_fractions"] is expected


@pytest.mark.parametrize(
    ("templates", "kinds"),
    [
        (["a|1", "a|2"], ""),
        (["a|1", "b|1"], ""),
        (["b|1", "a|1", "a|2"], "ab"),
        ([*(f"{kind}|1" for kind in "hgfedcba"), "a|2"], "abcdefgh"),
        ([f"{kind}|{number}" for kind in "ihgfedcba" for number in (1, 2)], ""),
    ],
    ids=["one-kind", "a-kind-each", "two", "eight", "nine"],
)
def test_two_to_eight_kinds_of_more_templates_are_shown(templates: list[str], kinds: str) -> None:
    rows = heldout_figures(replace(OLDER_LOG, clusters=templates), None)["kinds"]
    assert isinstance(rows, list)
    assert [row["kind"] for row in rows if isinstance(row, dict)] == [*kinds]


@pytest.mark.parametrize(
    ("template", "kind"),
    [("comp|even|double {x}|sum", "comp"), ("project:module", "project"), ("a/b:c", "a"), ("plain", "plain")],
)
def test_a_kind_is_the_beginning_of_a_template(template: str, kind: str) -> None:
    assert kind_of(template) == kind


def test_rewards_are_compared_where_they_are_fractions_and_pass_rates_elsewhere() -> None:
    fractions, rates = heldout_figures(BEFORE, AFTER), heldout_figures(WHOLE, WHOLE)
    for section, mode, name, errors in (
        (fractions, "sampled", "reward", "reward_"), (fractions, "greedy", "greedy_reward", "greedy_reward_"),
        (rates, "sampled", "pass", ""), (rates, "greedy", "greedy", "greedy_"),
    ):  # fmt: skip
        shown, interval = comparison({"heldout": section}, mode), section[f"{errors}interval"]
        assert isinstance(interval, list)
        assert [shown.before, shown.after] == [section[f"{name}_before"], section[f"{name}_after"]]
        assert shown.stderr_before == section[f"{errors}stderr_before"]
        assert shown.stderr_after == section[f"{errors}stderr_after"]
        assert [shown.difference, shown.stderr] == [section[f"{errors}difference"], section[f"{errors}stderr"]]
        assert shown.interval == (interval[0], interval[1])
        assert shown.is_rate == (section is rates)


RATE = Comparison(
    before=0.25, after=0.5, stderr_before=None, stderr_after=None, difference=None, stderr=None, interval=None,
    is_rate=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("shown", "gain"),
    [
        (RATE, 0.25),
        (replace(RATE, difference=0.125), 0.125),
        (replace(RATE, before=None), None),
        (replace(RATE, after=None), None),
    ],
)
def test_a_gain_is_the_paired_difference_or_else_that_of_both_figures(shown: Comparison, gain: float | None) -> None:
    assert shown.gain == gain


def test_rates_are_shown_in_percent_and_rewards_as_numbers() -> None:
    reward = replace(RATE, is_rate=False)
    assert (RATE.value(0.4264), RATE.change(-0.1), RATE.error(0.0412)) == ("42.6%", "−10.0", "4.1")
    assert (reward.value(0.4264), reward.change(-0.1), reward.error(0.0412)) == ("0.426", "−0.100", "0.041")
    for shown in (RATE, reward):
        assert (shown.value(None), shown.change(None), shown.error(None)) == ("–", "–", "–")


@pytest.mark.parametrize(
    ("before", "after", "pass_at", "shown"),
    [
        (BEFORE, AFTER, None, "full marks: 2 → 3"),
        (BEFORE, AFTER, 1.0, "full marks: 2 → 3"),
        (BEFORE, AFTER, 0.5, "0.5 or better: 2 → 3"),
        (BEFORE, None, 1.0, "full marks: 2"),
        (WHOLE, WHOLE, 1.0, ""),
    ],
)
def test_the_passed_tasks_are_counted_beside_mean_rewards(
    before: EvalDone, after: EvalDone | None, pass_at: float | None, shown: str
) -> None:
    heldout = heldout_figures(before, after)
    assert full_marks({"heldout": heldout, "config": {"eval": {"pass_at": pass_at}}}, "sampled") == shown


@pytest.mark.parametrize(
    ("templates", "tasks", "stderr", "over"),
    [
        (8, 64, 0.1, "8 templates"),
        (2, 64, 0.1, "2 templates"),
        (1, 64, 0.1, "64 tasks"),
        (64, 64, 0.1, "64 tasks"),
        (8, 64, None, ""),
        (None, 64, 0.1, ""),
    ],
)
def test_errors_are_over_templates_or_tasks(templates: int | None, tasks: int, stderr: float | None, over: str) -> None:
    words = about_errors({"heldout": {"templates": templates, "n": tasks, "stderr": stderr}})
    assert words.partition(";")[0] == (over and f"± is one standard error over {over}")
