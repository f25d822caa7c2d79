"""Baselines without groups: they change the noise and nothing else, and see nothing that would change more."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from bench.live.baselines import Population
from etude.config.credit import CreditConfig, DiscountedOptions, ShapedOptions
from etude.config.live import LIVE_BASELINES
from etude.trainer.batching import baselines
from etude.trainer.batching.advantage import Values
from etude.trainer.batching.baselines import LiveComparison, ValuedSession, live_credits
from etude.trainer.batching.batch import build_batch
from etude.types import Disposition, Group, Observation, ObservedSession, Verdict
from records import TASK, make_rollout, make_turn

NAMES = list(LIVE_BASELINES.builtins)
BASELINES: dict[str, Callable[..., Values]] = {name: getattr(baselines, name) for name in NAMES}


def some_sessions(seed: int, count: int = 24, earlier: int = 64) -> tuple[list[ValuedSession], list[ValuedSession]]:
    rng = np.random.default_rng(seed)
    population = Population.draw(np.random.default_rng(0), moving=False)
    before, _ = population.sessions(earlier, rng, moods=np.zeros(1), age=np.zeros(earlier))
    present, _ = population.sessions(count, rng, moods=np.zeros(1), age=np.zeros(count))
    return present, before


@pytest.mark.parametrize("name", NAMES)
def test_a_baseline_sees_neither_its_own_reward_nor_what_its_user_did_later(name: str) -> None:
    present, earlier = some_sessions(1)
    user = present[3].observation.user
    present[20] = present[20]._replace(observation=replace(present[20].observation, user=user))
    before = BASELINES[name](present, earlier)
    for changed in (3, 20):
        other = [one._replace(value=one.value + 9.0) if i == changed else one for i, one in enumerate(present)]
        assert BASELINES[name](other, earlier)[3] == pytest.approx(before[3], abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("count", "earlier"), [(1, 0), (2, 0), (1, 64), (5, 3)])
def test_every_baseline_has_something_to_say_of_few_sessions(name: str, count: int, earlier: int) -> None:
    present, before = some_sessions(2, count, earlier)
    expected_N = BASELINES[name](present, before)
    assert expected_N.shape == (count,) and np.isfinite(expected_N).all()


def bias_of(baseline: Callable[..., Values], batches: int = 120) -> float:
    """The mean error of the gradient, in units of its standard error."""
    population = Population.draw(np.random.default_rng(0), moving=False)
    gradients = []
    for batch in range(batches):
        rng = np.random.default_rng((7, batch))
        earlier, _ = population.sessions(48, rng, moods=np.zeros(1), age=np.zeros(48))
        present, scores_N = population.sessions(24, rng, moods=np.zeros(1), age=np.zeros(24))
        gains_N = np.array([one.value for one in present]) - baseline(present, earlier)
        gradients.append((gains_N[:, None, None] * scores_N).mean(axis=0).ravel())
    errors = np.array(gradients) - population.gradient().ravel()
    return float(np.sqrt((errors.mean(axis=0) ** 2).sum() / (errors.var(axis=0, ddof=1).sum() / batches)))


@pytest.mark.parametrize("name", NAMES)
def test_the_expected_gradient_is_the_true_one(name: str) -> None:
    assert bias_of(BASELINES[name]) < 1.4


def test_a_baseline_that_sees_its_own_reward_is_noticed() -> None:
    def with_own_reward(present: list[ValuedSession], earlier: list[ValuedSession]) -> Values:
        return 0.5 * np.array([one.value for one in present])

    assert bias_of(with_own_reward) > 1.6


def seen(user: str, template: str, value: float, prompt_tokens: int = 10) -> ValuedSession:
    return ValuedSession(
        Observation(user=user, day=0, template=template, arm="", prompt_tokens=prompt_tokens, weight=1.0), value
    )


def test_sessions_of_the_same_template_are_more_similar_than_those_of_the_same_length() -> None:
    alike = [seen(f"u{index}", "ours", 1.0, prompt_tokens=500) for index in range(baselines.NEIGHBOURS)]
    others = [seen(f"v{index}", "theirs", 0.0) for index in range(baselines.NEIGHBOURS)]
    (expected,) = baselines.similar([seen("w", "ours", 0.0)], [*others, *alike])
    assert expected == pytest.approx((len(alike) + baselines.PRIOR * 0.5) / (len(alike) + baselines.PRIOR))


def test_a_prediction_that_holds_moves_the_others_mean_towards_it() -> None:
    def of_users(count: int) -> list[ValuedSession]:
        return [seen(f"{index % 2}", "t", float(index % 2)) for index in range(count)]

    expected_N = baselines.control_variate(of_users(40), of_users(2 * baselines.FEWEST_FITTED + 40))
    assert expected_N[-2:] == pytest.approx([0.0, 1.0], abs=0.2)  # to the last ones all others are compared


def test_a_penalty_costs_what_it_is_above_the_others_mean_penalty() -> None:
    rollouts = [session(index, 1.0).rollouts[0] for index in range(3)]
    credited = live_credits(rollouts, CreditConfig(), LiveComparison(baseline="none"), np.array([0.3, 0.0, 0.0]))
    assert [float(credit.advantages_T[0]) for credit in credited] == pytest.approx([0.7, 1.15, 1.15])


# ── live sessions in a batch
# ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def session(index: int, reward: float, *, turn_rewards: tuple[float, ...] = (), weight: float = 1.0) -> Group:
    turns = [make_turn([9], [1, 2], [3, 3]), make_turn([9, 1, 2, 8], [4], [4])]
    observation = Observation(user=f"u{index}", day=0, template="t", arm="", prompt_tokens=1, weight=weight)
    rollout = make_rollout(f"s{index}", *turns, group=index, slot=0, reward=reward)
    rollout = replace(rollout, observation=observation, turn_rewards=turn_rewards)
    return Group(index=index, task=TASK, admitted_version=3, rollouts=(rollout,), weight=weight)


SIMULATED = Group(
    index=0,
    task=TASK,
    admitted_version=3,
    rollouts=tuple(
        make_rollout(f"0.{slot}", make_turn([9], [1], [4]), slot=slot, reward=float(slot)) for slot in (0, 1)
    ),
)


def own(present: list[ValuedSession], earlier: list[ValuedSession]) -> Values:
    """A user's own baseline: the mean of all earlier sessions."""
    return np.full(len(present), np.mean([one.value for one in earlier]) if earlier else 0.0)


def test_live_sessions_are_compared_with_each_other_and_simulated_groups_within_themselves() -> None:
    groups = [SIMULATED, session(0, 1.0), session(1, 0.0), session(2, 0.5)]
    batch = build_batch(5, groups, live=LiveComparison(baseline="control_variate"))
    advantages = {one.rollout_id: float(one.advantages[one.loss_mask][0]) for one in batch.trajectories}
    assert advantages == pytest.approx({"0.0": -0.5, "0.1": 0.5, "s0": 0.75, "s1": -0.75})
    assert (batch.num_groups, batch.num_degenerate_groups) == (4, 1)
    assert batch.rewards.tolist() == pytest.approx([0, 1, 1, 0, 0.5])
    assert batch.staleness.max() == 1


def test_a_session_weighs_what_its_observation_says_in_advantages_and_in_what_they_are_divided_by() -> None:
    plain = build_batch(5, [session(0, 1.0), session(1, 0.0)])
    capped = build_batch(5, [session(0, 1.0, weight=0.25), session(1, 0.0)])
    assert capped.trajectories[0].advantages.max() == 0.25 * plain.trajectories[0].advantages.max()
    assert capped.num_loss_tokens + capped.num_lost_tokens == pytest.approx(0.25 * 3 + 3)


def test_a_quarantined_session_teaches_nothing_and_is_no_comparison() -> None:
    verdict = Verdict(disposition=Disposition.QUARANTINE, reason="user.pace", graded=9.0)
    suspect = session(2, 9.0)
    suspect = replace(suspect, rollouts=(replace(suspect.rollouts[0], verdict=verdict),))
    with_it = build_batch(5, [session(0, 1.0), session(1, 0.0), suspect])
    assert [one.advantages.max() for one in with_it.trajectories] == [
        one.advantages.max() for one in build_batch(5, [session(0, 1.0), session(1, 0.0)]).trajectories
    ]


def test_sessions_that_all_came_to_the_same_have_no_signal() -> None:
    assert build_batch(5, [session(index, 0.1) for index in range(7)]).trajectories == ()


def test_a_turn_is_credited_with_what_was_said_of_it_and_of_later_ones() -> None:
    credit = CreditConfig(kind="shaped", options=ShapedOptions(shaping=1.0))
    groups = [session(0, 0.0, turn_rewards=(-1.0, 0.0)), session(1, 0.0, turn_rewards=(0.0, 1.0))]
    batch = build_batch(5, groups, credit=credit, live=LiveComparison(baseline="none"))
    by_turn = [sorted(set(one.advantages[one.loss_mask].tolist())) for one in batch.trajectories]
    assert by_turn == [[-1.0, 0.0], [1.0]]
    compared = build_batch(5, groups, credit=credit)
    assert [one.advantages[one.loss_mask].tolist() for one in compared.trajectories] == [[-2, -2, -1], [2, 2, 1]]


def test_turns_are_compared_with_what_earlier_sessions_came_to_from_the_same_turn_on() -> None:
    before = ObservedSession(
        session_id="x", observation=Observation(user="x", day=0, template="t", arm="", prompt_tokens=1), ended_at=0.0,
        sampled_tokens=(1, 1), reward=1.0,
    )  # fmt: skip
    credit = CreditConfig(kind="discounted", options=DiscountedOptions(discount=0.5))
    live = LiveComparison(baseline=f"{__name__}:own", earlier=[before])
    batch = build_batch(5, [session(0, 2.0)], credit=credit, live=live)
    assert batch.trajectories[0].advantages[batch.trajectories[0].loss_mask].tolist() == [0.5, 0.5, 1.0]
