"""Credit of each turn of a group's rollouts.

    rewards, turn rewards, branches ──▶ what came after a turn ──▶ less what came after others' ──▶ Credit of a rollout

Owns the kinds of ``[credit]``, one function each, and which turns are trained on: a turn that rollouts share is trained
once, in the first of them; a summary may be masked. What a reward is compared with where all turns of a rollout count
alike is :mod:`etude.trainer.batching.advantage`'s. Pure; docs/credit.md derives what each kind estimates.

Of a turn with score s, every kind but ``rollout`` has the form A = V − b: V is an unbiased value of what the turn led
to, and b was computed from rollouts that the turn had no part in. So E[b · s] = 0 exactly, whatever b is.

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
"""A turn by the rollout that sampled it and its index there: rollouts that share it have it by the same key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Advantages of the turns of one rollout."""

    advantages_T: Floats
    """0 where a turn is not trained on."""
    trained_T: Mask
    """Turns that are trained on in this rollout; the others are context."""

    @property
    def has_signal(self) -> bool:
        """True if anything can be learnt from it."""
        return bool(self.advantages_T.any())


def turn_credits(
    rollouts: Sequence[Rollout],
    rewards_G: Floats | Values,
    config: CreditConfig,
    baseline: Baseline = "mean",
    penalties_G: Values | None = None,
) -> tuple[Credit, ...]:
    """The credit of each rollout of one group, in order. ``penalties_G`` are taken off ``rewards_G``, and where these
    are divided by their deviation off what that leaves (:mod:`etude.trainer.batching.advantage`).

    With ``mean`` as baseline advantages are (G − 1)/G of what they are with ``leave_one_out``, whatever the kind.
    Raises ``ValueError`` for a baseline that the kind does not know, and where rollouts share turns and the kind would
    credit them more than once.
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
    """[T] for each rollout: true where it is the first of its group to have the turn."""
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

    A rollout that shares turns with one that is not here (it failed, or was taken out) has them by that one's name.
    """
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    return tuple(tuple(_key(rollout, turn, by_id) for turn in range(len(rollout.turns))) for rollout in rollouts)


def alike_in_all_turns(rollouts: Sequence[Rollout], advantages_G: Floats) -> list[Values]:
    """``rollout``: every turn has its rollout's advantage (Composer 2, arXiv 2603.24477)."""
    return [np.full(len(rollout.turns), advantage) for rollout, advantage in zip(rollouts, advantages_G, strict=True)]


def discounted(
    rollouts: Sequence[Rollout], rewards_G: Floats, config: CreditConfig, baseline: Baseline
) -> list[Values]:
    """``discounted``: V_t = γ^(T−1−t) · R, less the mean of what that was for the others at the same turn.

    Not γ^(T−1−t) · (R − mean): how long a rollout goes on is the turn's own doing, so that factor before the baseline
    would reward length by itself, and does so the more, the better the group is.
    """
    return _scaled(less_the_others(_turn_values(rollouts, rewards_G, config)), baseline)


def shaped(rollouts: Sequence[Rollout], rewards_G: Floats, config: CreditConfig, baseline: Baseline) -> list[Values]:
    """``shaped``: V_t = Σ_{k≥t} γ^(k−t) · w · r_k + γ^(T−1−t) · R, less the others' mean at the same turn.

    r are ``Rollout.turn_rewards`` and w is ``shaping``. Rewards of the form r_k = γ·Φ(h_{k+1}) − Φ(h_k), with Φ = 0 at
    the end, take Φ(h_t) off V_t and change no gradient (Ng, Harada and Russell, ICML 1999); any others may be farmed.
    """
    return _scaled(less_the_others(_turn_values(rollouts, rewards_G, config)), baseline)


def shared_prefix(
    rollouts: Sequence[Rollout], rewards_G: Floats, config: CreditConfig, baseline: Baseline
) -> list[Values]:
    """``shared_prefix``: what the rollouts through a turn came to, less what others came to from the same beginning.

        A_n = Σ_{i through n} (R_i − b_n),    b_n = mean of R over the rollouts of the longest prefix that are not
                                                    through n

    Where nothing branches b_n is the mean of all others and A_n the leave-one-out advantage. The sum, trained once, is
    what the rollouts through n would be trained on together: a shared turn stands for all of them. Values of prefixes
    by continuing them are VinePPO's (arXiv 2410.01679, section 4), to train on the continuations, too, is TreeRL's
    (2506.11902) and Tree-GRPO's (2509.21240). They take the mean of all rollouts of a prefix, the turn's own included.
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
"""Kind by turn → the function: the advantages [T] of each rollout's turns."""
SHARES: Mapping[Baseline, Callable[[int], float]] = MappingProxyType(
    {"mean": lambda size: (size - 1) / size, "leave_one_out": lambda size: 1.0}
)
"""Baseline → of G rollouts, the share of an advantage over the others' mean that it leaves."""


def turn_values(
    sessions: Sequence[tuple[int, Sequence[float]]], rewards: Floats | Values, config: CreditConfig
) -> list[Values]:
    """[T] V of the turns of each session, as its kind has it, before anything is taken off: ``sessions`` are their
    numbers of turns and, where turns are rewarded, the rewards of these.
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
    """[T] of each rollout: its values less the mean of the others' at the same turn, over those that got that far.

    Where no other did, of the last turn that any of them had. 0 where all that are compared are equal, and where there
    is no other.
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
    """[T] of one rollout. ``others`` left at the last branching so far: who shares a turn shares what was before."""
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
    """Σ (R − mean of the others' R) over ``own``; 0 where there are no others, and where all are equal."""
    if not len(others) or ((own == others[0]).all() and (others == others[0]).all()):
        return 0.0  # the mean of equal numbers may not be that number
    return float(own.sum() - len(own) * others.mean())


def _around(values: Sequence[float]) -> Values:
    """[R] each less the mean of the others."""
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
    """The credit of a rollout, 0 where a turn is not trained on: another rollout's, or a summary that is masked."""
    trained_T = own_T
    if config.summaries == "mask":
        trained_T = own_T & np.array([turn.kind is not TurnKind.SUMMARY for turn in rollout.turns], bool)
    return Credit(
        advantages_T=np.where(trained_T, advantages_T, 0).astype(np.float32),
        trained_T=trained_T,
    )
