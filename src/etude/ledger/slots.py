"""What became of the slots of one group, and what that makes of the group.

Pure: how rollouts ended goes in, attempts that are due and the state of the group come out.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from etude.ledger.states import GroupState, settled
from etude.types import RolloutStatus


class Ending(NamedTuple):
    """Which attempt at which slot ended how."""

    slot: int
    attempt: int
    status: RolloutStatus
    rollout_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The slots 0 … ``size`` − 1 of a group."""

    size: int
    endings: tuple[Ending, ...] = ()
    lost: frozenset[int] = frozenset()
    """Those whose attempts are used up."""

    @property
    def due(self) -> dict[int, int]:
        """Slot → its next attempt, for the slots that are neither graded nor lost."""
        made = Counter(ending.slot for ending in self.endings)
        over = self.lost | self._graded
        return {slot: made[slot] for slot in range(self.size) if slot not in over}

    @property
    def state(self) -> GroupState:
        """What they make of a group that is neither claimed nor given up."""
        return settled(self.size, graded=len(self._graded), lost=len(self.lost))

    def has(self, rollout_id: str) -> bool:
        """Whether a rollout is among the ended ones."""
        return any(ending.rollout_id == rollout_id for ending in self.endings)

    def after(self, ending: Ending) -> "Slots":
        """The slots when another rollout has ended."""
        return replace(self, endings=(*self.endings, ending))

    def without(self, slot: int) -> "Slots":
        """The slots when one more is lost."""
        return replace(self, lost=self.lost | {slot})

    @property
    def _graded(self) -> frozenset[int]:
        return frozenset(ending.slot for ending in self.endings if ending.status is RolloutStatus.GRADED)
