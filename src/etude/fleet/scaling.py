"""The number of engines that keeps the trainer busy and no engine idle. Pure.

    a step: how long the trainer worked and waited, how busy the engines were
              │
              └──▶ engines = busy engines · step / work, and a tenth more ──▶ more or fewer, within the bounds

``n`` engines that are busy for a share ``u`` of a step of ``work + wait`` seconds did ``n · u · (work + wait)`` seconds
of rollouts. A trainer that never waits takes a step in ``work`` seconds, so it needs ``n · u · (work + wait) / work``
busy engines, and each is to be busy for ``TARGET``. More are taken while the trainer waits for more than ``WAITS`` and
the engines are full, fewer once they have been idle for more than ``IDLE`` for a while. Where the trainer waits and
engines are idle, something else is slow, and more of them would not help: nothing changes.

Between two changes ``settle`` steps pass, of which the last ones count, for new engines need to start and what was
sampled before a change is still trained on. Money decides where: the cheapest region grows first, the dearest shrinks
first. No clock and no I/O.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

WAITS, IDLE = 0.05, 0.10
"""Shares of a trainer's time that it waits, and of engines' time that they are idle, beyond which numbers change."""
FULL = 1 - 2 * IDLE
"""Share of busy time from which engines count as full when the trainer waits."""
TARGET = 1 - IDLE
ROUNDING = 1e-9
MOST_AT_ONCE = 2.0
"""Factor by which a number grows at most in one change: what a step says of ten times as many is not much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRange:
    """A region's bounds. Raises ``ValueError`` for impossible values."""

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
    """Conditions for changes of the numbers. Raises ``ValueError`` for impossible values."""

    settle: int = 4
    """Steps between two changes."""
    window: int = 2
    """Newest of them that count."""
    calm: int = 6
    """Steps in a row in which engines were idle before there are fewer."""
    cost_per_hour: float = math.inf
    """Maximum cost of engines."""

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.settle or self.calm < 1 or self.cost_per_hour <= 0:
            raise ValueError(f"{self}: window is 1 to settle, calm at least 1, cost_per_hour positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Facts of one step."""

    work_s: float
    """Time in which the trainer computed."""
    wait_s: float
    """Time in which it waited for rollouts."""
    engines_busy: float
    """Share of busy time of all engines, from 0 to 1."""


@final
class ScalingTable:
    """The number of engines of each region."""

    def __init__(
        self, ranges: Sequence[EngineRange], counts: Mapping[str, int], limits: ScalingLimits = ScalingLimits()
    ) -> None:
        """``counts`` are the engines that there are, by region."""
        self._ranges = tuple(ranges)
        self._limits = limits
        self.counts = {each.region: counts[each.region] for each in ranges}
        """Region → engines that there are to be."""
        self._loads = deque[StepLoad](maxlen=limits.window)
        self._since = 0
        """Steps since the last change."""
        self._idle = 0
        """Steps in a row in which engines were idle."""

    @property
    def cost_per_hour(self) -> float:
        """Money for all engines."""
        return sum(each.cost_per_hour * self.counts[each.region] for each in self._ranges)

    def step(self, load: StepLoad) -> bool:
        """Take note of a step; true if :attr:`counts` changed."""
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
        """Engines in all, by the newest steps; as many as there are where nothing is to change."""
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
        """Change numbers one by one until there are as many, or no bound lets another one."""
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
