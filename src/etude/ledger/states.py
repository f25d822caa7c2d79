"""The states of groups, their slots and steps, as tables.

                 ┌──▶ dropped ◀─┐ only where its user asks for deletion
    group   open ┴──▶ ready ────┴▶ claimed ──▶ consumed          step   claimed ──▶ done

A group's slots each end as graded or lost. With the last of them it is ready, or dropped when too few are graded. An
evaluation's groups end as ready or dropped. Pure: how rollouts ended goes
in, attempts that are due and the state of the group come out. The rows themselves are moved by
:mod:`etude.ledger.changes`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, TypeVar

from etude.types import RolloutStatus


class GroupState(StrEnum):
    """State of a group on its way to the trainer."""

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
    """State of an optimiser step."""

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

ERASURE_MOVES: Mapping[GroupState, frozenset[GroupState]] = {GroupState.READY: frozenset({GroupState.DROPPED})}
"""The move of a live session whose user asks for deletion, or whose time is over, before a batch has it. Nothing else
may drop what is ready, since what is dropped could then depend on rewards.
"""

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
    """The state of a group of ``size`` slots when so many of them ended in either way.

    It is dropped as soon as the quorum is out of reach: what still runs could not save it.
    """
    if size - lost < quorum(size):
        return GroupState.DROPPED
    return GroupState.READY if graded + lost == size else GroupState.OPEN


State = TypeVar("State", GroupState, StepState)


def move(moves: Mapping[State, frozenset[State]], state: State, to: State) -> State:
    """The state after a move from ``state`` ``to`` another. Raises ``ValueError`` when the table has no such move."""
    if to not in moves[state]:
        allowed = ", ".join(sorted(moves[state])) or "nothing: that is an end"
        raise ValueError(f"no move from {state!s} to {to!s}; from {state!s} it may become {allowed}")
    return to


class EndedAttempt(NamedTuple):
    """An attempt at a slot that has ended, and how."""

    slot: int
    attempt: int
    status: RolloutStatus
    rollout_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlots:
    """The slots 0 … ``size`` − 1 of a group."""

    size: int
    endings: tuple[EndedAttempt, ...] = ()
    lost: frozenset[int] = frozenset()
    """Slots whose attempts are used up."""

    @property
    def due(self) -> dict[int, int]:
        """Slot → its next attempt, for the slots that are neither graded nor lost."""
        made = Counter(ending.slot for ending in self.endings)
        over = self.lost | self._graded
        return {slot: made[slot] for slot in range(self.size) if slot not in over}

    @property
    def state(self) -> GroupState:
        """The state of a group that is neither claimed nor given up."""
        return settled(self.size, graded=len(self._graded), lost=len(self.lost))

    def has(self, rollout_id: str) -> bool:
        """Return true if a rollout is among the ended ones."""
        return any(ending.rollout_id == rollout_id for ending in self.endings)

    def after(self, ending: EndedAttempt) -> "GroupSlots":
        """The slots when another rollout has ended."""
        return replace(self, endings=(*self.endings, ending))

    def without(self, slot: int) -> "GroupSlots":
        """The slots when one more is lost."""
        return replace(self, lost=self.lost | {slot})

    @property
    def _graded(self) -> frozenset[int]:
        return frozenset(ending.slot for ending in self.endings if ending.status is RolloutStatus.GRADED)
