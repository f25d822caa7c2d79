"""The lives of groups and steps, as tables.

                 ┌──▶ dropped
    group   open ┴──▶ ready ──▶ claimed ──▶ consumed          step   claimed ──▶ done

A group's slots each end as graded or lost. With the last of them it is ready, or dropped when too few are graded. An
evaluation's groups end as ready or dropped. Pure: the rows themselves are moved by :mod:`etude.ledger.changes`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class GroupState(StrEnum):
    """Where a group is on its way to the trainer."""

    OPEN = "open"
    """Some slot is neither graded nor lost yet."""
    READY = "ready"
    """Every slot is, and enough are graded."""
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

UNSETTLED = (GroupState.OPEN, GroupState.READY, GroupState.CLAIMED)
"""States in which a group may still be trained on."""

STEP_MOVES: Mapping[StepState, frozenset[StepState]] = {
    StepState.CLAIMED: frozenset({StepState.DONE}),
    StepState.DONE: frozenset(),
}
"""State of a step → where it may go."""


def quorum(size: int) -> int:
    """Slots of a group of ``size`` that must be graded for it to be used.

    Half of them, and at least two where there are two: one reward has nothing to be compared with.
    """
    return max(min(size, 2), (size + 1) // 2)


def settled(size: int, *, graded: int, lost: int) -> GroupState:
    """What a group of ``size`` slots is when so many of them ended in either way.

    It is dropped as soon as the quorum is out of reach: what still runs could not save it.
    """
    if size - lost < quorum(size):
        return GroupState.DROPPED
    return GroupState.READY if graded + lost == size else GroupState.OPEN


State = TypeVar("State", GroupState, StepState)


def move(moves: Mapping[State, frozenset[State]], state: State, to: State) -> State:
    """Where something in ``state`` is after moving ``to``. Raises ``ValueError`` when the table has no such move."""
    if to not in moves[state]:
        allowed = ", ".join(sorted(moves[state])) or "nothing: that is an end"
        raise ValueError(f"no move from {state!s} to {to!s}; from {state!s} it may become {allowed}")
    return to
