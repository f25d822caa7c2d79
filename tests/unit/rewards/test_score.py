"""The score of a rollout: the sum of its parts, cheating, missing values; and its replacement in training."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.reward import RewardConfig
from etude.config.training import EffortConfig
from etude.errors import ConfigError, InfrastructureError
from etude.harnesses.actions import Finding, Severity
from etude.protocols import Grade, Score
from etude.rewards.score import IMPOSSIBLE_PASSED, ScorePolicy, grade_of, penalty, score, trained_value
from etude.rewards.shaping.effort import effort_penalty
from etude.types import Disposition, Verdict
from records import make_rollout, make_turn

KEEP, ZERO, QUARANTINE = Disposition.KEEP, Disposition.ZERO, Disposition.QUARANTINE
TESTS: dict[str, Any] = {"name": "tests", "source": "grader", "version": 1, "weight": 1.0, "range": (0.0, 1.0)}
SHARE: dict[str, Any] = {**TESTS, "name": "share", "source": "grader.hidden_passed", "weight": 0.5}
ASKING: dict[str, Any] = {**TESTS, "name": "asking", "source": "behaviour.asking", "weight": -0.25}
STYLE: dict[str, Any] = {**TESTS, "name": "style", "source": "judge.style", "weight": 0.125, "missing": "wait"}
MASKING: dict[str, Any] = {**ASKING, "missing": "mask"}
FINDINGS = st.lists(
    st.builds(
        Finding,
        detector=st.sampled_from(["a", "b", "c"]),
        severity=st.sampled_from(Severity),
        turn=st.just(0),
        where=st.just("command"),
        span=st.just((0, 1)),
        evidence=st.just("x"),
    ),
    max_size=4,
)


def policy(*parts: dict[str, Any], **exceptions: Disposition) -> ScorePolicy:
    return ScorePolicy(reward=RewardConfig.model_validate({"parts": parts}), by_name=exceptions)


def finding(severity: Severity, detector: str = "spy") -> Finding:
    return Finding(detector=detector, severity=severity, turn=0, where="command", span=(0, 1), evidence="x")


def passed(value: float = 1.0, **parts: float) -> Grade:
    return Grade(value=value, parts=parts)


LOW, MEDIUM, HIGH = finding(Severity.LOW), finding(Severity.MEDIUM, "maybe"), finding(Severity.HIGH, "sure")
SUM = (TESTS, SHARE, ASKING)
VALUES = {"behaviour.asking": 0.5, "behaviour.other": 9.0, "measure.seconds": 3.0}


@pytest.mark.parametrize(
    ("grade", "findings", "values", "rules", "value", "disposition", "reason"),
    [
        (passed(), None, {}, policy(), 1.0, None, ""),  # the grade alone
        (passed(0.25), [], {}, policy(), 0.25, KEEP, ""),
        (passed(hidden_passed=0.5), [], VALUES, policy(*SUM), 1.0 + 0.25 - 0.125, KEEP, ""),  # a weighted sum
        (passed(7.0, hidden_passed=0.5), [], {}, policy(TESTS, SHARE), 1.25, KEEP, ""),  # clipped
        (passed(), [LOW], {}, policy(), 1.0, KEEP, ""),
        (passed(), [MEDIUM], {}, policy(), 0.0, QUARANTINE, "maybe"),
        (passed(), [MEDIUM, finding(Severity.MEDIUM)], {}, policy(), 0.0, QUARANTINE, "maybe"),  # the first one
        (passed(), [MEDIUM, HIGH], {}, policy(), 0.0, ZERO, "sure"),  # certain beats suspected
        (passed(), [HIGH], {}, policy(sure=KEEP), 1.0, KEEP, ""),  # an exception by name
        (passed(cheat_canary=1.0, cheat_other=0.0), [], {}, policy(), 0.0, ZERO, "cheat_canary"),
        (passed(cheat_canary=0.5), [], {}, policy(), 0.0, ZERO, "cheat_canary"),
        (passed(cheat_canary=1.0), [], {}, policy(cheat_canary=QUARANTINE), 0.0, QUARANTINE, "cheat_canary"),
        (passed(0.0, cheat_canary=1.0), [HIGH], {}, policy(), 0.0, KEEP, ""),  # a cheat that failed is bad work
        (passed(0.0, cheat_canary=1.0), [HIGH], VALUES, policy(TESTS, ASKING), -0.125, KEEP, ""),
        (passed(), [HIGH], VALUES, policy(TESTS, ASKING), 0.0, ZERO, "sure"),  # a zero is above every bonus
        (passed(), None, {}, policy(TESTS, STYLE), 0.0, QUARANTINE, "reward part 'style' is missing"),
        (passed(), [], {}, policy(TESTS, STYLE), 0.0, QUARANTINE, "reward part 'style' is missing"),
        (passed(), [], {}, policy(STYLE, MASKING), 0.0, QUARANTINE, "reward part 'asking' is missing"),
        (passed(), [HIGH], {}, policy(TESTS, STYLE), 0.0, ZERO, "sure"),  # no way out of a zero
        (passed(), [], {}, policy(TESTS | {"source": "behaviour.x", "missing": 0.25}), 0.25, KEEP, ""),  # assumed
    ],
)
def test_the_table(
    grade: Grade,
    findings: list[Finding] | None,
    values: Mapping[str, float],
    rules: ScorePolicy,
    value: float,
    disposition: Disposition | None,
    reason: str,
) -> None:
    decided = score(grade, findings, values, rules)
    assert decided.value == value
    assert (decided.verdict and decided.verdict.disposition) == disposition
    if decided.verdict is not None:
        assert (decided.verdict.reason, decided.verdict.graded) == (reason, grade.value)


def test_passing_the_impossible_is_quarantined_before_all_other_reasons() -> None:
    verdict = score(passed(), [MEDIUM], {}, policy(), impossible=True).verdict
    assert verdict == Verdict(
        disposition=QUARANTINE,
        reason=IMPOSSIBLE_PASSED,
        flags=(IMPOSSIBLE_PASSED, "maybe"),
        hacked=True,
        graded=1.0,
        impossible=True,
    )


def test_failing_the_impossible_is_no_hack() -> None:
    verdict = score(passed(0.0), [], {}, policy(), impossible=True).verdict
    assert verdict == Verdict(disposition=KEEP, graded=0.0, impossible=True)


def test_what_is_recorded_is_all_that_is_known_by_one_name_each() -> None:
    assert score(passed(hidden_passed=0.5), None, VALUES, policy()) == Score(value=1.0, parts={"hidden_passed": 0.5})
    assert score(passed(7.0, hidden_passed=0.5), None, VALUES, policy(*SUM)).parts == {
        "hidden_passed": 0.5,
        "grader": 7.0,
        "behaviour.asking": 0.5,
        "behaviour.other": 9.0,
        "tests": 7.0,
        "share": 0.5,
        "asking": 0.5,
        "clipped": 1.0,
        "assumed": 0.0,
    }


@pytest.mark.parametrize(("graded", "clipped"), [(-0.5, 1.0), (0.0, 0.0), (1.0, 0.0), (1.5, 1.0)])
def test_the_ends_of_a_range_are_in_it(graded: float, clipped: float) -> None:
    assert score(passed(graded), None, {}, policy(TESTS)).parts["clipped"] == clipped


@pytest.mark.parametrize("value", [None, math.nan, math.inf], ids=["none", "nan", "infinite"])
def test_what_is_no_finite_number_is_missing(value: float | None) -> None:
    values = {} if value is None else {"behaviour.asking": value}
    with pytest.raises(ConfigError, match="'asking' has no value"):
        score(passed(), None, values, policy(ASKING))
    with pytest.raises(InfrastructureError, match="'asking' is missing"):
        score(passed(), None, values, policy(ASKING | {"missing": "wait"}))
    with pytest.raises(InfrastructureError, match="'style' is missing"):  # not of a judge, in spite of its name
        score(passed(), None, values, policy(STYLE | {"source": "judges:style_rubric"}))
    masked = score(passed(), None, values, policy(ASKING | {"missing": "mask"}, TESTS))
    assert masked.masked == "reward part 'asking' is missing"
    assert "asking" not in masked.parts and masked.parts["tests"] == 1.0
    assumed = score(passed(), None, values, policy(ASKING | {"missing": 0.5}))
    assert (assumed.value, assumed.parts["asking"], assumed.parts["assumed"]) == (-0.125, 0.5, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_grade_that_is_no_finite_number_is_never_a_reward(value: float) -> None:
    """A grader that divides by zero once would make the gradient of a whole batch not finite."""
    with pytest.raises(InfrastructureError, match=r"the grader returned (nan|-?inf): expected a finite number"):
        score(passed(value), (), {}, policy())


@given(st.floats(), st.dictionaries(st.sampled_from(["behaviour.asking", "behaviour.other"]), st.floats()))
def test_whatever_the_values_the_sum_stays_within_its_range(graded: float, values: dict[str, float]) -> None:
    rules = policy(*(part | {"missing": 0.5} for part in SUM))
    low, high = rules.reward.bounds
    assert low <= score(passed(graded), None, values, rules).value <= high


@given(FINDINGS, st.floats(0, 1), st.booleans(), st.floats(0, 1))
def test_suspicious_work_is_never_worth_more(
    findings: list[Finding], graded: float, impossible: bool, canary: float
) -> None:
    decided = score(passed(graded, cheat_canary=canary), findings, {}, policy(), impossible=impossible)
    verdict = decided.verdict
    assert verdict is not None
    assert decided.value in (0.0, graded)
    assert (verdict.disposition is KEEP) == (verdict.reason == "")
    if (impossible and graded > 0) or any(one.severity > Severity.LOW for one in findings):
        assert verdict.hacked
        assert decided.value == 0.0
    if not findings and canary < 0.5 and not impossible:
        assert decided.value == graded


def test_a_policy_that_says_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="HIGH"):
        ScorePolicy(by_severity={Severity.LOW: KEEP, Severity.MEDIUM: KEEP})


def test_trained_on_is_the_score_less_effort_and_the_way_from_the_reference() -> None:
    rollout, effort = (
        make_rollout("r", make_turn([1], [2]), reward=0.75),
        EffortConfig(weight=0.5, prices={"turns": 1.0}),
    )
    assert penalty(rollout, EffortConfig(), nats=2.0) == penalty(rollout, EffortConfig(), reference_beta=0.1) == 0.0
    taken_off = penalty(rollout, effort, reference_beta=0.1, nats=2.0)
    assert taken_off == effort_penalty(rollout, effort) + 0.1 * 2.0
    assert trained_value(rollout, taken_off) == 0.75 - taken_off
    assert trained_value(make_rollout("r", make_turn([1], [2]), reward=0.0), 0.25) == -0.25


@pytest.mark.parametrize(("disposition", "value"), [(None, 0.5), (KEEP, 0.25), (ZERO, 0.0), (QUARANTINE, 0.0)])
def test_the_grade_of_a_stored_rollout(disposition: Disposition | None, value: float) -> None:
    verdict = None if disposition is None else Verdict(disposition=disposition, graded=0.25)
    assert grade_of(make_rollout("r", make_turn([1], [2]), reward=0.5, verdict=verdict)) == value


def test_a_stored_reward_of_zero_is_a_grade_of_zero() -> None:
    assert grade_of(make_rollout("r", make_turn([1], [2]), reward=0.0)) == 0.0
