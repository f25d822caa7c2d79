"""What single turns earn by themselves: less than nothing, where a tool had to turn their call away.

A turn whose call could not be read, or named what is not there, cost a call and moved nothing, whatever came of the
rollout. That is known at the turn, so it can be credited to the turn (``[credit] kind = "shaped"``). It is a reward of
its own and no potential: a model that makes no calls at all makes no bad ones, so ``credit.shaping`` has to be small
against what is at stake in a rollout. Pure.
"""

from collections.abc import Sequence

from etude.rewards.shaping.hints import TOOL_RULES
from etude.rewards.transcript import SpokenTurn


def slip_rewards(turns: Sequence[SpokenTurn]) -> tuple[float, ...]:
    """One for each turn: −1 where the built-in tools turned its call away, else 0."""
    return tuple(-1.0 if any(rule.applies(turn) for rule in TOOL_RULES) else 0.0 for turn in turns)
