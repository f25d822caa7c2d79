"""Which rollouts of a group begin as one, and where they part: the pure core of branching.

    slots of a group    0   1   2   3 │ 4   5   6   7          bundles of B = 4
                        trunk, ┄held┄ │ trunk, ┄held┄
                          │           │   │
    the trunk …        forks           ends before        its attempts are used up
    held slots …       branch off it   are copies of it   start by themselves

The trunk forks behind a call to its sandbox that was drawn before it began, or that it comes to by itself: never for
how it went on. A slot of a bundle is thus a fair draw of the policy, whichever it is: it shares its beginning with the
trunk where the trunk came that far, and all of it where it did not. To play other rollouts in place of the copies would
prefer long ones (docs/credit.md). The copies cost nothing.

Owns which slots are held back, and for whom, and when a trunk is to fork. Does not run anything
(:mod:`etude.rollouts.runner`) nor know how a rollout is continued by another (:mod:`etude.rollouts.replays`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Self

from etude.config.credit import BranchAt, CreditConfig
from etude.ledger.ledger import OpenSlot
from etude.rollouts.schedule import Place, place_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPoint:
    """Behind which call to its sandbox a trunk forks."""

    call: int | None
    """The number of the call, from 1; ``None``: the first command that fails."""

    def is_due(self, call: int, *, failed: bool) -> bool:
        """Whether it is now, behind call number ``call``."""
        return failed if self.call is None else call == self.call


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """How rollouts of a run branch."""

    size: int
    """Slots of a bundle (B)."""
    at: BranchAt
    within: int
    """The last call to the sandbox behind which a trunk may fork (``random``)."""
    seed: int

    @classmethod
    def of(cls, config: CreditConfig, seed: int) -> Self | None:
        """As a recipe says; ``None`` where no rollouts begin as one."""
        if config.branches == 1:
            return None
        return cls(size=config.branches, at=config.branch_at, within=config.branch_within, seed=seed)

    def fork_point(self, trunk: OpenSlot) -> ForkPoint:
        """Where a trunk forks: the same in every attempt, or a retry would have a choice."""
        if self.at == "error":
            return ForkPoint(call=None)
        return ForkPoint(call=Random(f"{self.seed}/{trunk.group_index}/{trunk.slot}").randint(1, self.within))


class Bundles:
    """The slots that wait for a trunk."""

    def __init__(self, size: int) -> None:
        """``size`` slots of a group, from the first on, begin as one; 1: none wait for any."""
        self._size = size
        self._held: dict[Place, list[OpenSlot]] = {}  # by trunk; an open trunk has an entry, be it empty

    def __len__(self) -> int:
        """Slots that are held."""
        return sum(map(len, self._held.values()))

    def __contains__(self, slot: OpenSlot) -> bool:
        """Whether a slot is held."""
        return any(place_of(held) == place_of(slot) for held in self._held.get(self._trunk(slot), ()))

    def admit(self, slots: Iterable[OpenSlot]) -> list[OpenSlot]:
        """Those of ``slots`` that may start: trunks, and slots whose trunk is not open. The others are held."""
        slots = list(slots)
        if self._size > 1:
            for slot in slots:
                if place_of(slot) == self._trunk(slot):
                    self._held.setdefault(place_of(slot), [])
        return [slot for slot in slots if not self._hold(slot)]

    def waiting_for(self, trunk: OpenSlot) -> int:
        """How many slots wait for a trunk to fork."""
        return len(self._held.get(place_of(trunk), ()))

    def release(self, trunk: OpenSlot) -> list[OpenSlot]:
        """The slots that waited for a trunk: it has forked, ended or been lost. Later ones do not wait for it."""
        return self._held.pop(place_of(trunk), [])

    def abandon(self, group_index: int) -> None:
        """A group was dropped: none of its slots waits any more."""
        self._held = {trunk: slots for trunk, slots in self._held.items() if trunk[0] != group_index}

    def _hold(self, slot: OpenSlot) -> bool:
        trunk = self._trunk(slot)
        if trunk == place_of(slot) or trunk not in self._held:
            return False
        self._held[trunk].append(slot)
        return True

    def _trunk(self, slot: OpenSlot) -> Place:
        return slot.group_index, slot.slot - slot.slot % self._size
