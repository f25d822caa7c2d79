"""Estimates for missing answers, on a population with known true values.

Both the probability of an answer and its value depend on visible properties of a session: happy users of short sessions
answer more often. The truth is the mean over all sessions, including users who never answer.
"""

from dataclasses import replace

import numpy as np
import pytest

from etude.config.feedback import SignalPart, SignalReward
from etude.regression import Array
from etude.rewards.live.formula import LiveScorer, formula_spec
from etude.rewards.live.propensity import doubly_robust, fit_answers
from etude.session_features import UserRecord
from etude.types import Observation, ObservedSession

LIKED = SignalPart(name="liked", signal="thumbs", weight=1.0, range=(-1, 1))
FORMULA = SignalReward(parts=(LIKED,), history=8192)
SESSIONS = 3000


def population(seed: int) -> tuple[list[ObservedSession], Array]:
    """Sessions with the given answers, and the answer that every user would have given [N]."""
    rng = np.random.default_rng(seed)
    hard_N = rng.integers(0, 3, SESSIONS)
    lengths_N = rng.lognormal(4.0 + 0.3 * hard_N, 0.5, SESSIONS).astype(int) + 1
    happy_N = 1 / (1 + np.exp(-(1.5 - 1.0 * hard_N - 0.8 * (np.log(lengths_N) - 4.3))))
    values_N = np.where(rng.random(SESSIONS) < happy_N, 1.0, -1.0)
    answers_N = rng.random(SESSIONS) < 1 / (1 + np.exp(-(-0.5 - 0.9 * hard_N - 0.8 * (np.log(lengths_N) - 4.3))))
    sessions = [
        ObservedSession(
            session_id=f"s{index}",
            observation=Observation(user=f"u{rng.integers(400)}", day=0, template=f"t{hard}", arm="", prompt_tokens=9),
            ended_at=float(index),
            sampled_tokens=(int(length),),
            answers={"liked": (float(value) if is_answered else None,)},
        )
        for index, (hard, length, value, is_answered) in enumerate(
            zip(hard_N, lengths_N, values_N, answers_N, strict=True)
        )
    ]
    return sessions, values_N


def standard_error(values_N: Array) -> float:
    return float(values_N.std(ddof=1) / np.sqrt(len(values_N)))


def test_silence_is_estimated_without_bias_where_answers_alone_and_zeros_are_far_off() -> None:
    errors, naive, zeros = [], [], []
    for seed in range(6):
        sessions, values_N = population(seed)
        rewards_N = np.array([one.session.reward for one in LiveScorer(FORMULA).score(sessions)])
        given_N = np.array([session.answers["liked"][0] or np.nan for session in sessions])
        errors.append(rewards_N.mean() - values_N.mean())
        naive.append(np.nanmean(given_N) - values_N.mean())
        zeros.append(np.nan_to_num(given_N).mean() - values_N.mean())
    three_errors = 3 * standard_error(np.array(errors))
    assert abs(np.mean(errors)) < max(three_errors, 0.02)
    assert np.mean(naive) > 0.25
    assert np.mean(zeros) < -0.04


def test_the_gradient_of_an_action_is_right_where_it_makes_people_silent() -> None:
    """Action 1 is better by 0.5 and halves who answers: as silence counts 0, it looks worse."""
    rng = np.random.default_rng(3)
    count = 20_000
    actions_N, template_N = rng.integers(0, 2, count), rng.integers(0, 2, count)
    values_N = 0.5 + 0.5 * actions_N - 0.4 * template_N + rng.normal(0, 0.1, count)
    chance_N = np.where(actions_N == 1, 0.2, 0.8)
    answered_N = rng.random(count) < chance_N
    given_N = np.where(answered_N, values_N, np.nan)
    estimates_N, _ = doubly_robust(given_N, chance_N, np.full(count, 0.4), 20.0)

    def gain(rewards_N: Array) -> float:
        return float(rewards_N[actions_N == 1].mean() - rewards_N[actions_N == 0].mean())

    assert gain(estimates_N) == pytest.approx(0.5, abs=0.03)
    assert gain(np.nan_to_num(given_N)) < 0


@pytest.mark.parametrize(
    ("propensity", "expected", "max_inverse", "bias"),
    [
        pytest.param(0.25, 0.0, 20.0, 0.0, id="right chances, wrong expectation"),
        pytest.param(0.6, 1.0, 20.0, 0.0, id="wrong chances, right expectation"),
        pytest.param(0.5, 0.0, 20.0, -0.5, id="both wrong: (p/p̂ - 1)(μ - m̂)"),
        pytest.param(0.25, 0.0, 2.0, -0.5, id="bounded: (pW - 1)(μ - m̂)"),
    ],
)
def test_one_right_model_is_enough_and_the_bias_of_the_rest_is_what_is_said(
    propensity: float, expected: float, max_inverse: float, bias: float
) -> None:
    """Half of the rows answer in the right share, so that the mean is exact: μ = 1, p = ¼."""
    answers_N = np.array([1.0, np.nan, np.nan, np.nan])
    values_N, bounded_N = doubly_robust(answers_N, np.full(4, propensity), np.full(4, expected), max_inverse)
    assert values_N.mean() - 1.0 == pytest.approx(bias)
    assert bounded_N.tolist() == [1 / propensity > max_inverse, False, False, False]


def test_an_estimate_knows_nothing_of_its_own_user() -> None:
    """Other answers of a user change neither the expected answer of that user nor its probability."""
    sessions, _ = population(0)
    user = sessions[0].observation.user

    def turned(session: ObservedSession) -> ObservedSession:
        value = session.answers["liked"][0]
        is_theirs = session.observation.user == user
        return replace(session, answers={"liked": (1.0 if value is None else -value,)}) if is_theirs else session

    silent = replace(sessions[0], answers={"liked": (None,)})
    estimates = [
        fit_answers([make(one) for one in sessions], FORMULA)["liked"].estimate(silent, UserRecord(), 20.0)
        for make in (lambda one: one, turned)
    ]
    assert estimates[0] == estimates[1]


def test_scoring_goes_on_where_it_was_and_scoring_twice_changes_nothing() -> None:
    sessions, _ = population(1)
    earlier, now = sessions[:2000], sessions[2000:2040]
    scorer = LiveScorer(FORMULA, earlier)
    first, again = scorer.score(now), scorer.score(now)
    assert first == again == LiveScorer(FORMULA, earlier).score(now)
    assert {one.parts["answered"] for one in first} == {0.0, 1.0}
    assert all(0 < one.session.observation.propensity < 1 for one in first)


def test_parts_by_turn_are_rewards_of_turns_and_a_number_may_stand_for_silence() -> None:
    formula = SignalReward(
        parts=(
            SignalPart(name="undone", signal="reverted", weight=-2.0, range=(0, 1), per="turn", missing=0.0),
            SignalPart(name="slow", signal="latency", weight=-0.1, range=(0, 10), missing=5.0),
        )
    )
    session = ObservedSession(
        session_id="s", observation=Observation(user="u", day=0, template="", arm="", prompt_tokens=3), ended_at=0.0,
        sampled_tokens=(4, 5, 6), answers={"undone": (None, 1.0, None), "slow": (99.0,)},
    )  # fmt: skip
    (scored,) = LiveScorer(formula).score([session])
    assert scored.session.reward == pytest.approx(-1.0)
    assert scored.session.turn_rewards == (0.0, -2.0, 0.0)
    assert scored.session.observation.propensity == 1.0


@pytest.mark.parametrize("change", [{"weight": 2.0}, {"range": (-1.0, 0.5)}, {"missing": 0.0}, {"per": "turn"}])
def test_whatever_decides_what_a_session_is_worth_is_in_the_specification(change: dict[str, object]) -> None:
    other = SignalReward(parts=(LIKED.model_copy(update=change),))
    assert formula_spec(other) != formula_spec(FORMULA)
