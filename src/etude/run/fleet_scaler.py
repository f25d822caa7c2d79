"""Automatic scaling of a live run: a fleet's numbers of processes follow the trainer.

    consumes   the run's steps, and how busy its processes were, as read by the supervisor at home
    produces   a fleet with other numbers, to be declared as the desired state

:mod:`etude.fleet.scaling` decides the numbers: of engines, of each region's gateways, of hosts of sandboxes and of
rollouts processes, in this order. None of them grows while others that it uses are full: rollouts do not become faster
by being more while they wait for engines.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import final

from etude.config.fleet import SCALED, FleetConfig, RegionConfig, ReplicaBounds
from etude.dashboard.run_metrics import E, RunMetrics, Timed
from etude.fleet.scaling import USUAL_LIMITS, ReplicaRange, ScalingLimits, ScalingTable, StepLoad
from etude.run.process_name import GATEWAY, ProcessName
from etude.telemetry.events import RolloutsStats

GATEWAY_LIMITS = ScalingLimits(full=0.5, target=0.6)
"""A gateway is one event loop: calls wait for it long before its processor time is used up."""


@final
class FleetScaler:
    """Adapts the numbers of processes to the trainer's speed, if the fleet enables it."""

    def __init__(
        self, fleet: FleetConfig, change: Callable[[FleetConfig], object], notify: Callable[[str], None]
    ) -> None:
        """``change`` declares a new fleet as the desired state."""
        self._change, self._notify = change, notify
        self._fleet = self._followed = fleet
        """The newest fleet, and the one that the supervisor follows: equal once a change has arrived there."""
        self._steps: int | None = None
        """Number of steps already evaluated; ``None`` before the first look."""
        self._since_s = 0.0
        self._kinds = _kinds_of(fleet)

    def look(self, run: RunMetrics, followed: FleetConfig) -> None:
        """Evaluate the run's steps since the previous look, and change the fleet if needed. The first look evaluates
        none: the steps before a run was resumed say nothing about the present numbers. ``followed`` is the fleet that
        the supervisor follows; a change by a user is the new starting point.
        """
        if followed != self._followed:
            self._followed = followed
            if followed != self._fleet:
                self._fleet, self._kinds = followed, _kinds_of(followed)
        new = [] if self._steps is None else run.steps[self._steps :]
        self._steps = len(run.steps)
        for step in new:
            window, self._since_s = _StepWindow(run, self._since_s, step.at_s), step.at_s
            metrics = step.event.metrics
            if self._step(window, work_s=metrics["busy_s"], wait_s=metrics["wait_s"]):
                self._follow()

    def _step(self, window: "_StepWindow", *, work_s: float, wait_s: float) -> bool:
        """Evaluate one step; true if a number changed."""
        may_grow, is_changed = True, False
        for kind in self._kinds:
            busy = kind.busy(window)
            if busy is None:
                continue
            others_cost = self._cost_per_hour - kind.table.cost_per_hour
            budget = (self._fleet.scaling.cost_per_hour or math.inf) - others_cost
            load = StepLoad(work_s=work_s, wait_s=wait_s, busy=busy)
            is_changed |= kind.table.step(load, may_grow=may_grow, budget_per_hour=budget)
            may_grow = may_grow and not kind.table.is_full
        return is_changed

    @property
    def _cost_per_hour(self) -> float:
        return sum(kind.table.cost_per_hour for kind in self._kinds)

    def _follow(self) -> None:
        """Change the fleet to the numbers of the tables."""
        before = self._fleet
        for kind in self._kinds:
            self._fleet = kind.applied(self._fleet)
        cost = f", {self._cost_per_hour:g} an hour" if self._cost_per_hour else ""
        self._notify(f"{', '.join(_changes(before, self._fleet))}{cost}")
        self._change(self._fleet)


@dataclass(frozen=True, slots=True)
class _StepWindow:
    """The reports of a run's processes during one step."""

    run: RunMetrics
    since_s: float
    until_s: float

    def of(self, timeline: Sequence[Timed[E]]) -> list[E]:
        """The events of a timeline in it."""
        recent = takewhile(lambda timed: timed.at_s > self.since_s, reversed(timeline))
        return [timed.event for timed in recent if timed.at_s <= self.until_s]


@dataclass(frozen=True, slots=True)
class _ScaledProcesses:
    """Processes of one kind: their numbers, and how busy they are."""

    key: str
    """Their number in the fleet file: one of ``SCALED``, or ``rollouts``."""
    table: ScalingTable
    busy: Callable[[_StepWindow], float | None]
    """Busy share in a window; ``None`` if nothing was reported."""

    def applied(self, fleet: FleetConfig) -> FleetConfig:
        """``fleet`` with the numbers of the table."""
        counts = self.table.counts
        if self.key == "rollouts":
            return fleet.model_copy(update={"rollouts": counts[fleet.home]})
        regions = [
            region.model_copy(update={self.key: counts[region.name] + _lent(self.key, region)})
            if region.name in counts
            else region
            for region in fleet.regions
        ]
        return fleet.model_copy(update={"regions": tuple(regions)})


def _kinds_of(fleet: FleetConfig) -> tuple[_ScaledProcesses, ...]:
    """All kinds of processes, those first that others use; none if all numbers are fixed.

    A number that is fixed has a table too, which says if others wait for these processes.
    """
    if not fleet.scaling.rollouts.most and all(region.scaling.is_fixed for region in fleet.regions):
        return ()
    rollouts = ScalingTable([_range(fleet.home, fleet.rollouts, fleet.scaling.rollouts)], {fleet.home: fleet.rollouts})
    gateways = (
        _ScaledProcesses("gateways", table, partial(_gateways_busy, fleet, region.name))
        for region in fleet.regions
        if (table := _table("gateways", [region], GATEWAY_LIMITS)).counts[region.name]
    )
    return (
        _ScaledProcesses("engines", _table("engines", fleet.regions), _engines_busy),
        *gateways,
        _ScaledProcesses("sandbox_hosts", _table("sandbox_hosts", fleet.regions), _sandboxes_used),
        _ScaledProcesses("rollouts", rollouts, _rollouts_used),
    )


def _table(key: str, regions: Sequence[RegionConfig], limits: ScalingLimits = USUAL_LIMITS) -> ScalingTable:
    counts = {region.name: getattr(region, key) - _lent(key, region) for region in regions}
    ranges = [_range(region.name, counts[region.name], region.bounds(key)) for region in regions]
    return ScalingTable(ranges, counts, limits)


def _range(region: str, count: int, bounds: ReplicaBounds) -> ReplicaRange:
    if not bounds.most:
        return ReplicaRange(region=region, fewest=count, most=count, cost_per_hour=0.0)
    return ReplicaRange(region=region, **bounds.model_dump())


def _lent(key: str, region: RegionConfig) -> int:
    """Engines that come and go with production's load: they are not counted."""
    return region.lent_engines if key == "engines" else 0


def _changes(before: FleetConfig, after: FleetConfig) -> Iterator[str]:
    """The numbers that differ, for people."""
    for old, new in zip(before.regions, after.regions, strict=True):
        for key in SCALED:
            if getattr(old, key) != getattr(new, key):
                yield f"{key.replace('_', ' ')} of {old.name}: {getattr(old, key)} → {getattr(new, key)}"
    if before.rollouts != after.rollouts:
        yield f"rollouts processes: {before.rollouts} → {after.rollouts}"


def _engines_busy(window: _StepWindow) -> float | None:
    reports = window.of(window.run.engine)
    return _share(sum(each.busy_s for each in reports), sum(each.window_s for each in reports))


def _gateways_busy(fleet: FleetConfig, region: str, window: _StepWindow) -> float | None:
    """Share of processor time of the gateways of a region."""
    names = {ProcessName.parse(process): timeline for process, timeline in window.run.gateways.items()}
    reports = [
        report
        for name, timeline in names.items()
        if name.command == GATEWAY.command and (name.region or fleet.home) == region
        for report in window.of(timeline)
    ]
    return _share(sum(each.cpu_s for each in reports), sum(each.window_s for each in reports))


def _rollouts_used(window: _StepWindow) -> float | None:
    """Share of places for rollouts that were in use when most were, of all processes together."""
    reports = _places(window)
    used = sum(max(each.running for each in places) for places in reports)
    return _share(used, sum(places[0].capacity for places in reports))


def _sandboxes_used(window: _StepWindow) -> float | None:
    """The same of places for sandboxes, whose free ones all processes share."""
    reports = _places(window)
    used = sum(max(each.sandboxes for each in places) for places in reports)
    free = min((each.sandbox_room for places in reports for each in places), default=0)
    return _share(used, used + free)


def _places(window: _StepWindow) -> list[list[RolloutsStats]]:
    """The reports of each rollouts process that has any."""
    return [places for timeline in window.run.places.values() if (places := window.of(timeline))]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
