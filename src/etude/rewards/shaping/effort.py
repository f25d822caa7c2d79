"""Effort penalty of a rollout, concave as in the Composer 2 report (arXiv 2603.24477, section 4.2).

    C(x) = ((1 + kx)^(1−q) − 1) / (k(1−q)),   C'(x) = (1 + kx)^(−q)
    q = 0: x      q = 1: ln(1 + kx) / k      q > 1: never above 1 / (k(q − 1))

More effort costs most where little was spent, and hardly anything on a hard task that needs much anyway. x is the sum
of the effort of each kind times its price in the recipe.

The penalty is subtracted when rewards are compared, not when they are stored: it does not affect evaluations, and a
rollout with zero reward for cheating is not better off than an honest failure.

Owns the kinds of effort and their prices. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etude.config.training import EffortConfig
from etude.rewards.transcript import continued
from etude.types import Rollout, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Effort of a rollout. Every sampled token is of one kind."""

    thinking_tokens: int
    """Tokens sampled up to the end of a turn's thinking; 0 for a turn whose thinking was truncated."""
    call_tokens: int
    """The other sampled tokens of turns after which the rollout continued."""
    output_tokens: int
    """Tokens of contexts after the reply that they continue. A new context (of the task, a sub-agent, an edited
    history) has none.
    """
    final_tokens: int
    """The other sampled tokens of the last turn."""
    calls: int
    """Calls of tools, malformed ones included."""
    turns: int
    """Calls of the model."""


def effort_of(turns: Sequence[Turn], counts: Mapping[str, int], thinking_end_id: int) -> Effort:
    """Count a rollout's turns and its calls by tool; ``thinking_end_id`` is the token that ends a turn's thinking, −1
    if the model has none.
    """
    thinking = [_thinking(turn, thinking_end_id) for turn in turns]
    others = [len(turn.completion_ids) - count for turn, count in zip(turns, thinking, strict=True)]
    return Effort(
        thinking_tokens=sum(thinking),
        call_tokens=sum(others[:-1]),
        output_tokens=_outputs(turns),
        final_tokens=sum(others[-1:]),
        calls=sum(counts.values()),
        turns=len(turns),
    )


def effort_penalty(rollout: Rollout, config: EffortConfig) -> float:
    """The effort penalty of a rollout: weight · C(x), 0 or more."""
    if not config.weight:
        return 0.0
    effort = effort_of(rollout.turns, rollout.counts, config.thinking_end_id)
    spent = sum(price * getattr(effort, kind) for kind, price in config.prices.items())
    return config.weight * concave_cost(spent, scale=config.scale, curvature=config.curvature)


def concave_cost(spent: float, *, scale: float, curvature: float) -> float:
    """C(x) of x = ``spent`` ≥ 0 with k = ``scale`` > 0 and q = ``curvature`` ≥ 0; exact near q = 1, where the formula
    becomes 0/0.
    """
    logarithm, power = math.log1p(scale * spent), 1 - curvature
    if power == 0:
        return logarithm / scale
    return math.expm1(power * logarithm) / (scale * power)


def _thinking(turn: Turn, end_id: int) -> int:
    """Number of tokens up to and including the last one that ends thinking."""
    ends = np.flatnonzero(turn.completion_ids == end_id)
    return int(ends[-1]) + 1 if len(ends) else 0


def _outputs(turns: Sequence[Turn]) -> int:
    """Tokens after the reply that each context continues; turns of other contexts may be in between."""
    return sum(
        len(turn.prompt_ids) - turns[parent].length
        for turn, parent in zip(turns, continued(turns), strict=True)
        if parent is not None
    )
