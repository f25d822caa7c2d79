"""Branching: rollouts of a group that share a prefix, and their fork points. Pure.

    slots of a group    0   1   2   3 │ 4   5   6   7          bundles of B = 4
                       parent,┄waiting│parent,┄waiting
                          │           │   │
    the parent …       forks           ends before        has no attempts left
    waiting slots …    fork off it     are copies of it   start separately

The parent forks after a sandbox call that is drawn before it starts, or after its first failed command: never because
of later events. So each slot of a bundle is a fair sample of the policy: it shares its prefix with the parent if the
parent reaches the fork point, and all of it if not. Separate rollouts instead of the copies would prefer long ones
(docs/credit.md). The copies cost nothing.

Owns which slots wait for which parent, and when a parent forks. Does not run rollouts (:mod:`etude.rollouts.runner`) or
replay the parent's calls in a fork (:mod:`etude.rollouts.sandbox`).
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
        """Return true if the parent forks after call number ``call``."""
        return failed if self.call is None else call == self.call


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """Branching settings of a run's rollouts."""

    size: int
    """Slots of a bundle (B)."""
    at: BranchAt
    within: int
    """Last sandbox call after which a parent may fork (``random``)."""
    seed: int

    @classmethod
    def of(cls, config: CreditConfig, seed: int) -> Self | None:
        """Branching of a recipe; ``None`` if no rollouts share a prefix."""
        options = config.options
        if not isinstance(options, SharedPrefixOptions):
            return None
        return cls(size=options.branches, at=options.branch_at, within=options.branch_within, seed=seed)

    def fork_point(self, parent: OpenSlot) -> ForkPoint:
        """The fork point of a parent, the same in every attempt, so that a retry cannot select another."""
        if self.at == "error":
            return ForkPoint(call=None)
        return ForkPoint(call=Random(f"{self.seed}/{parent.group_index}/{parent.slot}").randint(1, self.within))


class Bundles:
    """The slots that wait for their parent rollout."""

    def __init__(self, size: int) -> None:
        """Each ``size`` consecutive slots of a group start as one; 1: no slot waits."""
        self._size = size
        self._waiting: dict[Place, list[OpenSlot]] = {}  # parent → slots; an open parent has a possibly empty entry

    def __len__(self) -> int:
        """Number of slots that wait."""
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
        """The slots that waited for a parent that forked, ended or was lost. Later slots do not wait for it."""
        return self._waiting.pop(place_of(parent), [])

    def abandon(self, group_index: int) -> None:
        """Remove the waiting slots of a dropped group."""
        self._waiting = {parent: slots for parent, slots in self._waiting.items() if parent[0] != group_index}

    def _wait(self, slot: OpenSlot) -> bool:
        parent = self._parent(slot)
        if parent == place_of(slot) or parent not in self._waiting:
            return False
        self._waiting[parent].append(slot)
        return True

    def _parent(self, slot: OpenSlot) -> Place:
        return slot.group_index, slot.slot - slot.slot % self._size
