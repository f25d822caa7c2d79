"""The number of engines that keeps the trainer busy and no engine idle. Pure.

    a step: the trainer's time of work and of waiting, the engines' busy share
              │
              └──▶ engines = busy engines · step / work, and a tenth more ──▶ more or fewer, within the bounds

``n`` engines that are busy for a share ``u`` of a step of ``work + wait`` seconds did ``n · u · (work + wait)`` seconds
of rollouts. A trainer that never waits takes a step in ``work`` seconds, so it needs ``n · u · (work + wait) / work``
busy engines, each of them busy for a share of ``TARGET``. The number grows while the trainer waits for more than
``WAITS`` of its time and the engines are full; it shrinks after the engines were idle for more than ``IDLE`` for
several steps. If the trainer waits and engines are idle, something else is slow: the number does not change.

Between two changes ``settle`` steps pass and only the last of them count, because new engines need time to start and
tokens sampled before a change are still trained on. Prices select the region: the cheapest grows first, the most
expensive shrinks first. No clock and no I/O.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

WAITS, IDLE = 0.05, 0.10
"""Shares beyond which numbers change: of the trainer's time spent waiting, and of the engines' time spent idle."""
FULL = 1 - 2 * IDLE
"""Busy share from which engines count as full when the trainer waits."""
TARGET = 1 - IDLE
ROUNDING = 1e-9
MOST_AT_ONCE = 2.0
"""Maximum growth factor of one change: a step says little about a number ten times as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRange:
    """Bounds of a region. Raises ``ValueError`` for impossible values."""

    region: str
    fewest: int
    most: int
    cost_per_hour: float = 1.0
    """Price of one engine, in any currency."""

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
    """Consecutive steps with idle engines before their number is reduced."""
    cost_per_hour: float = math.inf
    """Maximum cost of all engines."""

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.settle or self.calm < 1 or self.cost_per_hour <= 0:
            raise ValueError(f"{self}: window is 1 to settle, calm at least 1, cost_per_hour positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Measurements of one step."""

    work_s: float
    """Time in which the trainer computed."""
    wait_s: float
    """Time in which it waited for rollouts."""
    engines_busy: float
    """Busy share of all engines, from 0 to 1."""


@final
class ScalingTable:
    """The number of engines of each region."""

    def __init__(
        self, ranges: Sequence[EngineRange], counts: Mapping[str, int], limits: ScalingLimits = ScalingLimits()
    ) -> None:
        """``counts`` are the current engines by region."""
        self._ranges = tuple(ranges)
        self._limits = limits
        self.counts = {each.region: counts[each.region] for each in ranges}
        """Region → desired number of engines."""
        self._loads = deque[StepLoad](maxlen=limits.window)
        self._since = 0
        """Steps since the last change."""
        self._idle = 0
        """Consecutive steps in which engines were idle."""

    @property
    def cost_per_hour(self) -> float:
        """Cost of all engines."""
        return sum(each.cost_per_hour * self.counts[each.region] for each in self._ranges)

    def step(self, load: StepLoad) -> bool:
        """Record a step; true if :attr:`counts` changed."""
        self._loads.append(load)
        self._since += 1
        self._idle = self._idle + 1 if load.engines_busy < TARGET else 0
        if self._since < self._limits.settle:
            return False
        before = dict(self.counts)
        self._toward(self._needed())
        if self.counts == before:
            return False
        self._since = self._idle = 0
        self._loads.clear()
        return True

    def _needed(self) -> int:
        """Desired number of all engines according to the newest steps; the current number if nothing should change."""
        now = sum(self.counts.values())
        work_s = sum(load.work_s for load in self._loads)
        wait_s = sum(load.wait_s for load in self._loads)
        whole_s = work_s + wait_s
        if work_s <= 0:
            return now
        busy = sum(load.engines_busy * (load.work_s + load.wait_s) for load in self._loads) / whole_s
        bound = sum(each.most for each in self._ranges)
        needed = math.ceil(min(bound, now * busy * whole_s / work_s / TARGET - ROUNDING))
        if wait_s > WAITS * whole_s:
            return max(now, min(needed, math.ceil(now * MOST_AT_ONCE))) if busy >= FULL else now
        return min(now, needed) if self._idle >= self._limits.calm else now

    def _toward(self, needed: int) -> None:
        """Change numbers one at a time until ``needed`` engines are reached or the bounds allow no further change."""
        while sum(self.counts.values()) < needed:
            room = [each for each in self._ranges if self.counts[each.region] < each.most]
            cheapest = min(room, key=lambda each: each.cost_per_hour, default=None)
            if cheapest is None or self.cost_per_hour + cheapest.cost_per_hour > self._limits.cost_per_hour:
                return
            self.counts[cheapest.region] += 1
        while sum(self.counts.values()) > needed:
            spare = [each for each in self._ranges if self.counts[each.region] > each.fewest]
            dearest = max(spare, key=lambda each: each.cost_per_hour, default=None)
            if dearest is None:
                return
            self.counts[dearest.region] -= 1
