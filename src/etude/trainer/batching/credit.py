"""Credit of each turn of a group's rollouts.

    rewards, turn rewards, branches ──▶ value after each turn ──▶ minus that of other rollouts ──▶ Credit of a rollout

Owns the kinds of ``[credit]``, one function each, and the choice of turns to train on: a turn that several rollouts
share is trained once, in the first of them; a summary may be masked. The baselines for the case that all turns of a
rollout get the same credit are in :mod:`etude.trainer.batching.advantage`. Pure; docs/credit.md derives the estimator
of each kind.

For a turn with score s, every kind but ``rollout`` has the form A = V − b: V is an unbiased estimate of the value after
the turn, and b is computed from rollouts that do not contain the turn. So E[b · s] = 0 exactly, for any such b.

Array legend: G rollouts of a group, T turns of a rollout, R those rollouts of the group that reached a turn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from etude.config.credit import CreditConfig, CreditKind, DiscountedOptions, ShapedOptions
from etude.config.training import Baseline
from etude.trainer.batching.advantage import FEWEST_COMPARED, Values, group_advantages, net_rewards
from etude.types import Floats, Mask, Rollout, TurnKind

TurnKey: TypeAlias = tuple[str, int]
"""Key of a turn: the rollout that sampled it and its index there. Rollouts that share a turn use the same key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Advantages of the turns of one rollout."""

    advantages_T: Floats
    """0 where a turn is not trained on."""
    trained_T: Mask
    """Turns that are trained on in this rollout; the others are context."""

    @property
    def has_signal(self) -> bool:
        """True if any advantage is not 0."""
        return bool(self.advantages_T.any())


def turn_credits(
    rollouts: Sequence[Rollout],
    rewards_G: Floats | Values,
    config: CreditConfig,
    baseline: Baseline = "mean",
    penalties_G: Values | None = None,
) -> tuple[Credit, ...]:
    """The credit of each rollout of one group, in order. ``penalties_G`` are subtracted from ``rewards_G``; if rewards
    are divided by their deviation, after the division (:mod:`etude.trainer.batching.advantage`).

    With ``mean`` as baseline, advantages are (G − 1)/G times those with ``leave_one_out``, for every kind. Raises
    ``ValueError`` for a baseline that the kind does not support, and if rollouts share turns that the kind would credit
    more than once.
    """
    if config.kind != "shared_prefix" and any(rollout.branch for rollout in rollouts):
        raise ValueError(f"rollouts of a group share turns, and credit.kind = {config.kind!r} would count them twice")
    if config.kind != "rollout" and baseline not in SHARES:
        raise ValueError(f"baseline {baseline!r} does not go with credit.kind = {config.kind!r}: expected one of "
                         f"{', '.join(SHARES)}")  # fmt: skip
    if config.is_by_turn:
        taken_G = np.zeros(len(rewards_G)) if penalties_G is None else penalties_G
        advantages = CREDITS[config.kind](rollouts, net_rewards(rewards_G, taken_G), config, baseline)
    else:
        advantages = alike_in_all_turns(rollouts, group_advantages(rewards_G, baseline, penalties_G))
    return tuple(
        masked(rollout, advantages_T, own_T, config)
        for rollout, advantages_T, own_T in zip(rollouts, advantages, own_turns(rollouts), strict=True)
    )


def own_turns(rollouts: Sequence[Rollout]) -> tuple[Mask, ...]:
    """[T] for each rollout: true where it is the first of its group with this turn."""
    if not any(rollout.branch for rollout in rollouts):
        return tuple(np.ones(len(rollout.turns), bool) for rollout in rollouts)
    seen: set[TurnKey] = set()
    own = []
    for keys in turn_keys(rollouts):
        own.append(np.array([key not in seen for key in keys], bool))
        seen.update(keys)
    return tuple(own)


def turn_keys(rollouts: Sequence[Rollout]) -> tuple[tuple[TurnKey, ...], ...]:
    """The key of every turn of every rollout.

    Turns shared with an absent rollout (failed or removed) keep that rollout's name in their keys.
    """
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    return tuple(tuple(_key(rollout, turn, by_id) for turn in range(len(rollout.turns))) for rollout in rollouts)


def alike_in_all_turns(rollouts: Sequence[Rollout], advantages_G: Floats) -> list[Values]:
    """``rollout``: every turn has its rollout's advantage (Composer 2, arXiv 2603.24477)."""
    return [np.full(len(rollout.turns), advantage) for rollout, advantage in zip(rollouts, advantages_G, strict=True)]


def discounted(
    rollouts: Sequence[Rollout], rewards_G: Floats, config: CreditConfig, baseline: Baseline
) -> list[Values]:
    """``discounted``: V_t = γ^(T−1−t) · R, minus the others' mean of V at the same turn.

    Not γ^(T−1−t) · (R − mean): the turn itself influences the length of the rollout, so a factor on the baseline would
    reward length as such, and more so in a better group.
    """
    return _scaled(less_the_others(_turn_values(rollouts, rewards_G, config)), baseline)


def shaped(rollouts: Sequence[Rollout], rewards_G: Floats, config: CreditConfig, baseline: Baseline) -> list[Values]:
    """``shaped``: V_t = Σ_{k≥t} γ^(k−t) · w · r_k + γ^(T−1−t) · R, minus the others' mean at the same turn.

    r are ``Rollout.turn_rewards`` and w is ``shaping``. Rewards of the form r_k = γ·Φ(h_{k+1}) − Φ(h_k), with Φ = 0 at
    the end, subtract Φ(h_t) from V_t and do not change the expected gradient (Ng, Harada and Russell, ICML 1999); any
    other turn rewards can be exploited.
    """
    return _scaled(less_the_others(_turn_values(rollouts, rewards_G, config)), baseline)


def shared_prefix(
    rollouts: Sequence[Rollout], rewards_G: Floats, config: CreditConfig, baseline: Baseline
) -> list[Values]:
    """``shared_prefix``: rewards of the rollouts through a turn, minus those of others with the same prefix.

        A_n = Σ_{i through n} (R_i − b_n),    b_n = mean of R over the rollouts of the longest prefix that are not
                                                    through n

    Without branches, b_n is the mean of all others and A_n the leave-one-out advantage. A shared turn is trained once,
    with the sum over all rollouts through it. VinePPO (arXiv 2410.01679, section 4) estimates the value of a prefix
    from its continuations; TreeRL (2506.11902) and Tree-GRPO (2509.21240) also train on these. They take the mean of
    all rollouts of a prefix, including the turn's own.
    """
    keys = turn_keys(rollouts)
    through: dict[TurnKey, list[int]] = {}
    for index, path in enumerate(keys):
        for key in path:
            through.setdefault(key, []).append(index)
    rewards_G64 = rewards_G.astype(np.float64)
    return _scaled([_compared(path, through, rewards_G64) for path in keys], baseline)


CREDITS: Mapping[CreditKind, Callable[[Sequence[Rollout], Floats, CreditConfig, Baseline], Sequence[Values]]]
CREDITS = MappingProxyType({"discounted": discounted, "shaped": shaped, "shared_prefix": shared_prefix})
"""Kind that differs by turn → its function: the advantages [T] of each rollout's turns."""
SHARES: Mapping[Baseline, Callable[[int], float]] = MappingProxyType(
    {"mean": lambda size: (size - 1) / size, "leave_one_out": lambda size: 1.0}
)
"""Baseline → function of G: the factor relative to an advantage over the others' mean."""


def turn_values(
    sessions: Sequence[tuple[int, Sequence[float]]], rewards: Floats | Values, config: CreditConfig
) -> list[Values]:
    """[T] V of the turns of each session by the configured kind, before a baseline is subtracted. ``sessions`` has the
    number of turns of each and, if turns are rewarded, their rewards.
    """
    options = config.options
    discount = options.discount if isinstance(options, DiscountedOptions | ShapedOptions) else 1.0
    shaping = options.shaping if isinstance(options, ShapedOptions) else 0.0
    return [
        returns_to_go(reward, shaping * np.array(turn_rewards or np.zeros(turns)), discount)
        for (turns, turn_rewards), reward in zip(sessions, rewards.tolist(), strict=True)
    ]


def returns_to_go(reward: float, turn_rewards_T: Values, discount: float) -> Values:
    """[T] V_t = Σ_{k≥t} γ^(k−t) · r_k + γ^(T−1−t) · R, from the last turn to the first."""
    backwards = [*turn_rewards_T[:-1][::-1].tolist()]
    last = reward + (float(turn_rewards_T[-1]) if len(turn_rewards_T) else 0.0)
    values = accumulate(backwards, lambda later, own: own + discount * later, initial=last)
    return np.array([*values][::-1][: len(turn_rewards_T)])


def less_the_others(values: Sequence[Values]) -> list[Values]:
    """[T] for each rollout: its values minus the others' mean at the same turn, over those that have this turn.

    If no other has it, the mean at the last turn that any of them has. 0 if all compared values are equal or there is
    no other.
    """
    advantages = [np.zeros(len(values_T)) for values_T in values]
    if len(values) < FEWEST_COMPARED:
        return advantages
    lengths = [len(values_T) for values_T in values]
    *_, shorter, longest = sorted(lengths)
    for turn in range(shorter):
        reached = [index for index, length in enumerate(lengths) if length > turn]
        for index, advantage in zip(reached, _around([values[i][turn] for i in reached]), strict=True):
            advantages[index][turn] = advantage
    if shorter < longest:
        alone = lengths.index(longest)
        last = [values_T[shorter - 1] for values_T in values if len(values_T) == shorter]
        advantages[alone][shorter:] = values[alone][shorter:] - _mean(last)
    return advantages


def _turn_values(rollouts: Sequence[Rollout], rewards_G: Floats, config: CreditConfig) -> list[Values]:
    return turn_values([(len(rollout.turns), rollout.turn_rewards) for rollout in rollouts], rewards_G, config)


def _key(rollout: Rollout, turn: int, by_id: Mapping[str, Rollout]) -> TurnKey:
    for _ in range(len(by_id) + 1):
        if rollout.branch is None or turn >= rollout.branch.turns:
            return rollout.rollout_id, turn
        origin = by_id.get(rollout.branch.rollout_id)
        if origin is None:
            return rollout.branch.rollout_id, turn
        rollout = origin
    raise ValueError(f"rollouts of a group branch off each other in a circle, {rollout.rollout_id} among them")


def _compared(path: Sequence[TurnKey], through: Mapping[TurnKey, Sequence[int]], rewards_G: Values) -> Values:
    """[T] for one rollout. ``others`` are those that left at the last branch so far; rollouts that share a turn share
    its prefix.
    """
    advantages = []
    before: Sequence[int] = range(len(rewards_G))
    others: list[int] = []
    for key in path:
        here = through[key]
        if len(here) < len(before):
            others = sorted(set(before).difference(here))
        advantages.append(_gain(rewards_G[list(here)], rewards_G[others]))
        before = here
    return np.array(advantages)


def _gain(own: Values, others: Values) -> float:
    """Σ (R − mean of the others' R) over ``own``; 0 if there are no others or all are equal."""
    if not len(others) or ((own == others[0]).all() and (others == others[0]).all()):
        return 0.0  # the floating-point mean of equal numbers may differ from them
    return float(own.sum() - len(own) * others.mean())


def _around(values: Sequence[float]) -> Values:
    """[R] each value minus the mean of the others."""
    values_R = np.array(values)
    if (values_R == values_R[0]).all():
        return np.zeros(len(values_R))
    around: Values = (values_R - values_R.mean()) * (len(values_R) / (len(values_R) - 1))
    return around


def _mean(values: Sequence[float]) -> float:
    return values[0] if min(values) == max(values) else float(np.mean(values))


def _scaled(advantages: Sequence[Values], baseline: Baseline) -> list[Values]:
    share = SHARES[baseline](len(advantages)) if advantages else 1.0
    return [advantages_T * share for advantages_T in advantages]


def masked(rollout: Rollout, advantages_T: Floats | Values, own_T: Mask, config: CreditConfig) -> Credit:
    """The credit of a rollout; 0 for turns that are not trained: those of another rollout, and masked summaries."""
    trained_T = own_T
    if config.summaries == "mask":
        trained_T = own_T & np.array([turn.kind is not TurnKind.SUMMARY for turn in rollout.turns], bool)
    return Credit(
        advantages_T=np.where(trained_T, advantages_T, 0).astype(np.float32),
        trained_T=trained_T,
    )
