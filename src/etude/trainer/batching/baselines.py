"""Baselines without groups: references for the reward of a live session, with one rollout per prompt.

    sessions of a batch ─────┐
    sessions of earlier steps┴─▶ expected reward of each ──▶ reward − expected ──▶ Credit of each turn

Owns the baselines, one function each, by name (:data:`etude.config.live.LIVE_BASELINES`), and their conversion to
advantages of turns. Pure.

With s the score of a session's sampled tokens and x its context, E[b · s | x] = 0 for any b that is a function of x, of
other sessions and of their rewards, if these do not depend on the samples of *this* session. So a baseline changes only
the variance. It must not depend on three things:

- its own reward;
- the sampled length, which the model decides: short answers would be compared with short ones, and a model that
  succeeds by being short would never learn that this is good;
- later sessions of the same user, whose mood this one may have changed.

Legend: N sessions of the batch, M sessions that they may be compared with, earlier ones first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

import numpy as np

from etude.config.credit import CreditConfig
from etude.config.live import LIVE_BASELINES
from etude.regression import fit_linear
from etude.session_features import SessionFeatures, UserRecord
from etude.trainer.batching.advantage import Values
from etude.trainer.batching.credit import Credit, masked, turn_values
from etude.types import Mask, Observation, ObservedSession, Rollout

PRIOR = 4.0
"""Weight of the overall mean, in sessions, when a mean of few sessions is shrunk towards it."""
NEIGHBOURS = 16
"""Number of most similar sessions that one is compared with."""
FEWEST_FITTED = 32
"""Fewest earlier sessions for which a value model is fitted."""
LINEAR_RIDGE = 4.0
"""Ridge penalty of the value model, in units of sessions."""
ROUNDING = 1e-12
"""Relative size below which an advantage counts as 0: the floating-point mean of equal numbers may differ from them."""
MOST_SLOPE = 1.5
"""Largest factor of the value model's prediction in the control variate."""


class ValuedSession(NamedTuple):
    """A session, and its value from some turn on."""

    observation: Observation
    value: float


LiveBaseline: TypeAlias = Callable[[Sequence[ValuedSession], Sequence[ValuedSession]], Values]
"""A function of the batch's sessions, in order of admission, and of earlier steps' sessions; returns the expected value
of each session of the batch, [N].
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveComparison:
    """Comparison of a batch's live sessions."""

    baseline: str = "control_variate"
    """Name of a baseline."""
    earlier: Sequence[ObservedSession] = ()
    """Sessions of earlier steps, the oldest first."""


def none(present: Sequence[ValuedSession], earlier: Sequence[ValuedSession]) -> Values:
    """Nothing, b = 0: REINFORCE (Williams, Machine Learning 1992)."""
    return np.zeros(len(present))


def template_mean(present: Sequence[ValuedSession], earlier: Sequence[ValuedSession]) -> Values:
    """The mean of the other sessions of the same template, shrunk towards the mean of all others if they are few."""
    same_NM = _equal([one.observation.template for one in present], [one.observation.template for one in earlier])
    return _mean_of(same_NM, present, earlier)


def user_day_mean(present: Sequence[ValuedSession], earlier: Sequence[ValuedSession]) -> Values:
    """The mean of the same user's earlier sessions of the same day, shrunk towards the mean of all others."""
    days = [[(one.observation.user, one.observation.day) for one in some] for some in (present, earlier)]
    return _mean_of(_equal(*days), present, earlier)


def similar(present: Sequence[ValuedSession], earlier: Sequence[ValuedSession]) -> Values:
    """The mean of the most similar other sessions: of the same template, else the nearest by user, arm and prompt.

    Leave-one-out (RLOO, arXiv 2402.14740) with neighbours in place of a group.
    """
    ours, theirs = ([one.observation for one in some] for some in (present, earlier))
    lengths_N, lengths_M = (np.log1p([each.prompt_tokens for each in some]) for some in (ours, [*theirs, *ours]))
    distance_NM = np.abs(lengths_N[:, None] - lengths_M[None])
    for weight, trait in ((8.0, "template"), (1.0, "user"), (0.5, "arm")):
        named = [[getattr(each, trait) for each in some] for some in (ours, theirs)]
        distance_NM += weight * ~_equal(*named)
    distance_NM = np.where(_others(present, earlier), distance_NM, np.inf)
    nearest_NM = distance_NM <= np.sort(distance_NM, axis=1)[:, :NEIGHBOURS][:, -1:]
    return _mean_of(nearest_NM & np.isfinite(distance_NM), present, earlier)


def value_model(present: Sequence[ValuedSession], earlier: Sequence[ValuedSession]) -> Values:
    """Ridge regression of values on features of the context before the model's first token, fitted on earlier steps
    only.

    The features are from :mod:`etude.session_features`. Without enough earlier sessions it is the others' mean.
    """
    if len(earlier) < FEWEST_FITTED:
        return _mean_of(np.zeros((len(present), len(earlier) + len(present)), bool), present, earlier)
    features = SessionFeatures.of([one.observation for one in earlier], float(np.mean([one.value for one in earlier])))
    records: dict[str, UserRecord] = {}
    rows = []
    for observation, value in earlier:
        record = records.setdefault(observation.user, UserRecord())
        rows.append(features.row(observation, record))
        record.add([value])
    rows_MD, values_M = np.array(rows), np.array([one.value for one in earlier])
    middle_D, width_D = rows_MD.mean(axis=0), np.maximum(rows_MD.std(axis=0), 1e-9)
    fitted_D, intercept = fit_linear((rows_MD - middle_D) / width_D, values_M, ridge=LINEAR_RIDGE)
    ours = [features.row(one.observation, records.get(one.observation.user, UserRecord())) for one in present]
    scaled_ND = ((np.array(ours) - middle_D) / width_D).clip(-10, 10)  # an unseen name has no width
    values_N: Values = scaled_ND @ fitted_D + intercept
    return values_N


def control_variate(present: Sequence[ValuedSession], earlier: Sequence[ValuedSession]) -> Values:
    """The others' mean, corrected by the value model's prediction f for the session: b = R̄ + β · (f − f̄).

    β = Cov(R, f) / Var(f), R̄ and f̄ are of the *other* sessions of the batch, so that b is independent of this
    session's samples (control variates: Lavenberg & Welch, Management Science 1981; CUPED: Deng et al., WSDM 2013). β
    corrects for a stale or wrong model, R̄ for changes of the policy.
    """
    expected_N = value_model(present, earlier)
    others_NN = _others(present, ()).astype(np.float64)
    values_N = np.array([one.value for one in present])
    number_N = others_NN.sum(axis=1)
    alone_N = number_N < 1
    number_N = np.maximum(number_N, 1.0)
    value_N, mean_N = others_NN @ values_N / number_N, others_NN @ expected_N / number_N
    shared_N = others_NN @ (values_N * expected_N) / number_N - value_N * mean_N
    spread_N = others_NN @ expected_N**2 / number_N - mean_N**2
    slope_N = np.where(spread_N > 1e-12, shared_N / np.maximum(spread_N, 1e-12), 0.0) * number_N / (number_N + PRIOR)
    corrected_N = value_N + slope_N.clip(0.0, MOST_SLOPE) * (expected_N - mean_N)
    return np.where(alone_N, expected_N, corrected_N)


def live_credits(
    rollouts: Sequence[Rollout], config: CreditConfig, comparison: LiveComparison, penalties_N: Values
) -> tuple[Credit, ...]:
    """The credit of live sessions, [N] in order of admission, by the kind of ``[credit]``.

    A turn's value is compared with the others' values at the same turn, or at the last turn that any other session has.
    Penalties are compared with the others' mean penalty.
    """
    baseline = cast("LiveBaseline", LIVE_BASELINES.find(comparison.baseline))
    rewards_N = np.array([rollout.reward for rollout in rollouts], np.float64)
    others = penalties_N.sum() - penalties_N
    taken_N = penalties_N - others / max(1, len(rollouts) - 1)
    values = turn_values([(len(one.turns), one.turn_rewards) for one in rollouts], rewards_N, config)
    before = comparison.earlier
    values_before = turn_values([(len(one.sampled_tokens), one.turn_rewards) for one in before],
                                np.array([one.reward for one in before], np.float64), config)  # fmt: skip
    expected = [np.zeros(len(values_T)) for values_T in values]
    for turn in range(max(map(len, values), default=0) if config.is_by_turn else 1):
        reached = [index for index, values_T in enumerate(values) if len(values_T) > turn]
        present = [ValuedSession(_observation(rollouts[i]), values[i][turn]) for i in reached]
        earlier = [ValuedSession(one.observation, values_T[turn])
                   for one, values_T in zip(before, values_before, strict=True) if len(values_T) > turn]  # fmt: skip
        if len(present) + len(earlier) > 1 or not turn:
            for index, value in zip(reached, baseline(present, earlier), strict=True):
                expected[index][turn:] = value
    return tuple(
        masked(rollout, _less(values_T, expected_T + taken), np.ones(len(rollout.turns), bool), config)
        for rollout, values_T, expected_T, taken in zip(rollouts, values, expected, taken_N, strict=True)
    )


def _less(values_T: Values, taken_T: Values) -> Values:
    """[T] the difference, 0 where it is only a rounding error."""
    difference_T = values_T - taken_T
    return np.where(np.abs(difference_T) <= ROUNDING * np.abs(values_T), 0.0, difference_T)


def _observation(rollout: Rollout) -> Observation:
    assert rollout.observation is not None, f"rollout {rollout.rollout_id} is of no live session"
    return rollout.observation


def _equal(present: Sequence[object], earlier: Sequence[object]) -> Mask:
    """[N, M] true where two names are equal."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys([*earlier, *present]))}
    ours_N, all_M = (np.array([numbers[name] for name in some], np.int64) for some in (present, [*earlier, *present]))
    same_NM: Mask = ours_N[:, None] == all_M[None]
    return same_NM


def _others(present: Sequence[ValuedSession], earlier: Sequence[ValuedSession]) -> Mask:
    """[N, M] sessions that each may be compared with: neither itself nor a later one of the same user."""
    users = [[one.observation.user for one in some] for some in (present, earlier)]
    order_N, order_M = np.arange(len(present)), np.arange(-len(earlier), len(present))
    later_NM = order_M[None] >= order_N[:, None]
    others_NM: Mask = (order_M[None] != order_N[:, None]) & ~(later_NM & _equal(*users))
    return others_NM


def _mean_of(chosen_NM: Mask, present: Sequence[ValuedSession], earlier: Sequence[ValuedSession]) -> Values:
    """[N] the mean over the chosen others, shrunk towards the mean of the batch's others or, without any, of earlier
    ones.
    """
    others_NM = _others(present, earlier)
    values_M = np.array([one.value for one in (*earlier, *present)])
    batch_NN = others_NM[:, len(earlier) :]
    number_N, sum_N = batch_NN.sum(axis=1), batch_NN @ values_M[len(earlier) :]
    fallback = float(values_M[: len(earlier)].mean()) if earlier else 0.0
    usual_N = np.where(number_N > 0, sum_N / np.maximum(number_N, 1), fallback)
    weights_NM = (chosen_NM & others_NM).astype(np.float64)
    mean_N: Values = (weights_NM @ values_M + PRIOR * usual_N) / (weights_NM.sum(axis=1) + PRIOR)
    return mean_N
