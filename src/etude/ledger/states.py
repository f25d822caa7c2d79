"""The states of groups, their slots and steps, as tables.

                 ┌──▶ dropped ◀─┐ only where its user asks for deletion
    group   open ┴──▶ ready ────┴▶ claimed ──▶ consumed          step   claimed ──▶ done

Each slot of a group ends as graded or lost. When all have ended, the group is ready; it is dropped if too few can be
graded. An evaluation's groups end as ready or dropped. Pure: ended attempts in, due attempts and the group's state out.
:mod:`etude.ledger.changes` updates the rows.
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
    """At least one slot is neither graded nor lost."""
    READY = "ready"
    """Every slot is graded or lost, and enough are graded."""
    CLAIMED = "claimed"
    """Belongs to an optimiser step that is not committed."""
    CONSUMED = "consumed"
    """Was trained on; final."""
    DROPPED = "dropped"
    """Given up for a recorded reason; never trained on."""


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
"""State of a group → permitted next states."""

ERASURE_MOVES: Mapping[GroupState, frozenset[GroupState]] = {GroupState.READY: frozenset({GroupState.DROPPED})}
"""The move of a live session that is deleted, by its user's request or after the retention time, before a batch has it.
No other ready group may be dropped, since the choice could then depend on rewards.
"""

UNSETTLED = (GroupState.OPEN, GroupState.READY, GroupState.CLAIMED)
"""States in which a group may still be trained on."""

STEP_MOVES: Mapping[StepState, frozenset[StepState]] = {
    StepState.CLAIMED: frozenset({StepState.DONE}),
    StepState.DONE: frozenset(),
}
"""State of a step → permitted next states."""


def quorum(size: int) -> int:
    """The minimum number of graded slots for a group of ``size`` to be used.

    It is half of the slots, and at least two if there are two: a single reward cannot be compared.
    """
    return max(min(size, 2), (size + 1) // 2)


def settled(size: int, *, graded: int, lost: int) -> GroupState:
    """The state of a group of ``size`` slots with these numbers of ``graded`` and ``lost`` slots.

    It is dropped as soon as the quorum is unreachable, since the remaining slots cannot change that.
    """
    if size - lost < quorum(size):
        return GroupState.DROPPED
    return GroupState.READY if graded + lost == size else GroupState.OPEN


State = TypeVar("State", GroupState, StepState)


def move(moves: Mapping[State, frozenset[State]], state: State, to: State) -> State:
    """The state after a move from ``state`` ``to`` another. Raises ``ValueError`` if the table has no such move."""
    if to not in moves[state]:
        allowed = ", ".join(sorted(moves[state])) or "nothing: that is an end"
        raise ValueError(f"no move from {state!s} to {to!s}; from {state!s} it may become {allowed}")
    return to


class EndedAttempt(NamedTuple):
    """An ended attempt at a slot, with its status."""

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
    """Slots that have no attempts left."""

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
        """The slots after another attempt has ended."""
        return replace(self, endings=(*self.endings, ending))

    def without(self, slot: int) -> "GroupSlots":
        """The slots after one more is lost."""
        return replace(self, lost=self.lost | {slot})

    @property
    def _graded(self) -> frozenset[int]:
        return frozenset(ending.slot for ending in self.endings if ending.status is RolloutStatus.GRADED)
