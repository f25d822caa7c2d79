"""The lives of groups and steps, as tables.

                 ┌──▶ dropped
    group   open ┴──▶ ready ──▶ claimed ──▶ consumed          step   claimed ──▶ done

An evaluation's groups end as ready or dropped. Pure: the rows themselves are moved by :mod:`etude.ledger.ledger`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class GroupState(StrEnum):
    """Where a group is on its way to the trainer."""

    OPEN = "open"
    """Some slot has no graded rollout yet."""
    READY = "ready"
    """Every slot has one."""
    CLAIMED = "claimed"
    """Belongs to an optimiser step that is not committed."""
    CONSUMED = "consumed"
    """Was trained on, once and for all."""
    DROPPED = "dropped"
    """Given up for a counted reason; never trained on."""


class StepState(StrEnum):
    """Where an optimiser step is."""

    CLAIMED = "claimed"
    """Its groups are fixed."""
    DONE = "done"
    """Its weights are published and its groups consumed."""


GROUP_MOVES: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.OPEN: frozenset({GroupState.READY, GroupState.DROPPED}),
    GroupState.READY: frozenset({GroupState.CLAIMED}),
    GroupState.CLAIMED: frozenset({GroupState.CONSUMED}),
    GroupState.CONSUMED: frozenset(),
    GroupState.DROPPED: frozenset(),
}
"""State of a group → where it may go."""

STEP_MOVES: Mapping[StepState, frozenset[StepState]] = {
    StepState.CLAIMED: frozenset({StepState.DONE}),
    StepState.DONE: frozenset(),
}
"""State of a step → where it may go."""

State = TypeVar("State", GroupState, StepState)


def move(moves: Mapping[State, frozenset[State]], state: State, to: State) -> State:
    """Where something in ``state`` is after moving ``to``. Raises ``ValueError`` when the table has no such move."""
    if to not in moves[state]:
        allowed = ", ".join(sorted(moves[state])) or "nothing: that is an end"
        raise ValueError(f"no move from {state!s} to {to!s}; from {state!s} it may become {allowed}")
    return to
