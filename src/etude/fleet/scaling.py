"""The number of replicas that keeps the trainer busy and none of them idle. Pure.

    a step: the trainer's time of work and of waiting, the busy share of the replicas
              │
              └──▶ replicas = busy replicas · step / work, and a tenth more ──▶ more or fewer, within the bounds

``n`` replicas that are busy for a share ``u`` of a step of ``work + wait`` seconds did ``n · u · (work + wait)``
seconds of the work for a step. A trainer that never waits takes a step in ``work`` seconds, so it needs
``n · u · (work + wait) / work`` busy replicas, each of them busy for a share ``target``. The number grows while the
trainer waits for more than ``WAITS`` of its time and the replicas are full; it shrinks after they were less busy than
``target`` for several steps in which the trainer did not wait. If the trainer waits and the replicas are idle,
something else is slow: the number does not change.

Replicas are engines, gateways, hosts of sandboxes, or rollouts processes; each kind has a table. The busy share of
engines and gateways is one of time. That of rollouts and sandboxes is one of places, at the moment of the step when
most were in use: fewer places than that would be missed, even if they are empty on average.

Between two changes ``settle`` steps pass and only the last of them count, because new replicas need time to start and
tokens sampled before a change are still trained on. Prices select the region: the cheapest grows first, the most
expensive shrinks first. No clock and no I/O.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

WAITS = 0.05
"""Share of the trainer's time spent waiting from which numbers grow."""
ROUNDING = 1e-9
MOST_AT_ONCE = 2.0
"""Maximum growth factor of one change: a step says little about a number ten times as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRange:
    """Bounds of a region. Raises ``ValueError`` for impossible values."""

    region: str
    fewest: int
    most: int
    cost_per_hour: float = 1.0
    """Price of one replica, in any currency."""

    def __post_init__(self) -> None:
        if not 0 <= self.fewest <= self.most or not 0 <= self.cost_per_hour < math.inf:
            raise ValueError(f"{self}: fewest is at least 0 and at most most, and cost_per_hour is not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """Conditions for changing the numbers. Raises ``ValueError`` for impossible values."""

    settle: int = 4
    """Steps between two changes."""
    window: int = 2
    """Number of newest steps that count."""
    calm: int = 6
    """Consecutive steps with idle replicas before their number is reduced."""
    full: float = 0.8
    """Busy share from which replicas count as full when the trainer waits."""
    target: float = 0.9
    """Busy share of the number that is aimed at."""

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.settle or self.calm < 1 or not 0 < self.full <= self.target <= 1:
            raise ValueError(
                f"{self}: window is 1 to settle, calm at least 1, full at most target, both within 0 and 1"
            )


USUAL_LIMITS = ScalingLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Measurements of one step."""

    work_s: float
    """Time in which the trainer computed."""
    wait_s: float
    """Time in which it waited for rollouts."""
    busy: float
    """Busy share of all replicas, from 0; above 1 where more places were asked for than there are."""


@final
class ScalingTable:
    """The number of replicas of each region."""

    def __init__(
        self, ranges: Sequence[ReplicaRange], counts: Mapping[str, int], limits: ScalingLimits = USUAL_LIMITS
    ) -> None:
        """``counts`` are the current replicas by region."""
        self._ranges = tuple(ranges)
        self._limits = limits
        self.counts = {each.region: counts[each.region] for each in ranges}
        """Region → desired number of replicas."""
        self.is_full = False
        """True if the trainer waits for these replicas: more of anything that uses them would not help."""
        self._loads = deque[StepLoad](maxlen=limits.window)
        self._since = 0
        """Steps since the last change."""
        self._idle = 0
        """Consecutive steps in which replicas were idle."""

    @property
    def cost_per_hour(self) -> float:
        """Cost of all replicas."""
        return sum(each.cost_per_hour * self.counts[each.region] for each in self._ranges)

    def step(self, load: StepLoad, *, may_grow: bool = True, budget_per_hour: float = math.inf) -> bool:
        """Record a step; true if :attr:`counts` changed.

        Args:
            load: Measurements of the step.
            may_grow: False while replicas of another kind, which these use, are full.
            budget_per_hour: Maximum cost of all replicas after growth.
        """
        self._loads.append(load)
        self.is_full = self._is_waiting and self._busy >= self._limits.full
        self._since += 1
        self._idle = self._idle + 1 if load.busy < self._limits.target else 0
        if self._since < self._limits.settle:
            return False
        before = dict(self.counts)
        needed = self._needed()
        self._toward(needed if may_grow else min(needed, sum(before.values())), budget_per_hour)
        if self.counts == before:
            return False
        self._since = self._idle = 0
        self._loads.clear()
        return True

    @property
    def _work_s(self) -> float:
        return sum(load.work_s for load in self._loads)

    @property
    def _wait_s(self) -> float:
        return sum(load.wait_s for load in self._loads)

    @property
    def _whole_s(self) -> float:
        return self._work_s + self._wait_s

    @property
    def _busy(self) -> float:
        """Busy share in the newest steps; 0 without any."""
        busy_s = sum(load.busy * (load.work_s + load.wait_s) for load in self._loads)
        return busy_s / self._whole_s if self._whole_s else 0.0

    @property
    def _is_waiting(self) -> bool:
        """True if the trainer waited for too long in the newest steps."""
        return self._wait_s > WAITS * self._whole_s

    def _needed(self) -> int:
        """Desired number of all replicas according to the newest steps; the current number if nothing should change."""
        now = sum(self.counts.values())
        if self._work_s <= 0:
            return now
        bound = sum(each.most for each in self._ranges)
        busy_replicas = now * self._busy * self._whole_s / self._work_s
        needed = math.ceil(min(bound, busy_replicas / self._limits.target - ROUNDING))
        if self.is_full:
            return max(now, min(needed, math.ceil(now * MOST_AT_ONCE)))
        return min(now, needed) if self._idle >= self._limits.calm and not self._is_waiting else now

    def _toward(self, needed: int, budget_per_hour: float) -> None:
        """Change numbers one at a time until ``needed`` replicas are reached or nothing may change any more."""
        while sum(self.counts.values()) < needed:
            room = [each for each in self._ranges if self.counts[each.region] < each.most]
            cheapest = min(room, key=lambda each: each.cost_per_hour, default=None)
            if cheapest is None or self.cost_per_hour + cheapest.cost_per_hour > budget_per_hour:
                return
            self.counts[cheapest.region] += 1
        while sum(self.counts.values()) > needed:
            spare = [each for each in self._ranges if self.counts[each.region] > each.fewest]
            dearest = max(spare, key=lambda each: each.cost_per_hour, default=None)
            if dearest is None:
                return
            self.counts[dearest.region] -= 1
