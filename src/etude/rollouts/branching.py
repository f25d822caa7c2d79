"""Branching: rollouts of a group that share a prefix, and their fork points. Pure.

    slots of a group    0   1   2   3 │ 4   5   6   7          bundles of B = 4
                       parent,┄waiting│parent,┄waiting
                          │           │   │
    the parent …       forks           ends before        its attempts are used up
    waiting slots …    fork off it     are copies of it   start by themselves

The parent forks behind a call to its sandbox that was drawn before it began, or that it comes to by itself: never for
how it went on. A slot of a bundle is thus a fair draw of the policy, whichever it is: it shares its beginning with the
parent where the parent came that far, and all of it where it did not. To play other rollouts in place of the copies
would prefer long ones (docs/credit.md). The copies cost nothing.

Owns which slots wait for which parent, and when a parent is to fork. Does not run anything
(:mod:`etude.rollouts.runner`) nor know how a fork goes through its parent's calls (:mod:`etude.rollouts.sandbox`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Self

from etude.config.credit import BranchAt, CreditConfig, SharedPrefixOptions
from etude.ledger.ledger import OpenSlot
from etude.rollouts.schedule import Place, place_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPoint:
    """The sandbox call after which a parent rollout forks."""

    call: int | None
    """The number of the call, from 1; ``None``: the first command that fails."""

    def is_due(self, call: int, *, failed: bool) -> bool:
        """True behind the call that is number ``call``, if the parent forks there."""
        return failed if self.call is None else call == self.call


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """Branching state of a run's rollouts."""

    size: int
    """Slots of a bundle (B)."""
    at: BranchAt
    within: int
    """The last call to the sandbox behind which a parent may fork (``random``)."""
    seed: int

    @classmethod
    def of(cls, config: CreditConfig, seed: int) -> Self | None:
        """Branching of a recipe; ``None`` where no rollouts begin as one."""
        options = config.options
        if not isinstance(options, SharedPrefixOptions):
            return None
        return cls(size=options.branches, at=options.branch_at, within=options.branch_within, seed=seed)

    def fork_point(self, parent: OpenSlot) -> ForkPoint:
        """The fork point of a parent: the same in every attempt, or a retry would have a choice."""
        if self.at == "error":
            return ForkPoint(call=None)
        return ForkPoint(call=Random(f"{self.seed}/{parent.group_index}/{parent.slot}").randint(1, self.within))


class Bundles:
    """The slots that wait for their parent rollout."""

    def __init__(self, size: int) -> None:
        """``size`` slots of a group, from the first on, begin as one; 1: none wait for any."""
        self._size = size
        self._waiting: dict[Place, list[OpenSlot]] = {}  # by parent; an open parent has an entry, be it empty

    def __len__(self) -> int:
        """Slots that wait."""
        return sum(map(len, self._waiting.values()))

    def __contains__(self, slot: OpenSlot) -> bool:
        """True for a slot that waits."""
        return any(place_of(other) == place_of(slot) for other in self._waiting.get(self._parent(slot), ()))

    def admit(self, slots: Iterable[OpenSlot]) -> list[OpenSlot]:
        """The ``slots`` that may start: parents, and slots whose parent is not open. The others wait."""
        slots = list(slots)
        if self._size > 1:
            for slot in slots:
                if place_of(slot) == self._parent(slot):
                    self._waiting.setdefault(place_of(slot), [])
        return [slot for slot in slots if not self._wait(slot)]

    def waiting_for(self, parent: OpenSlot) -> int:
        """Number of slots that wait for a parent to fork."""
        return len(self._waiting.get(place_of(parent), ()))

    def release(self, parent: OpenSlot) -> list[OpenSlot]:
        """The slots that waited for a parent: it has forked, ended or been lost. Later ones do not wait for it."""
        return self._waiting.pop(place_of(parent), [])

    def abandon(self, group_index: int) -> None:
        """A group was dropped: none of its slots waits any more."""
        self._waiting = {parent: slots for parent, slots in self._waiting.items() if parent[0] != group_index}

    def _wait(self, slot: OpenSlot) -> bool:
        parent = self._parent(slot)
        if parent == place_of(slot) or parent not in self._waiting:
            return False
        self._waiting[parent].append(slot)
        return True

    def _parent(self, slot: OpenSlot) -> Place:
        return slot.group_index, slot.slot - slot.slot % self._size
