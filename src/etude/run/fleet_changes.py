"""Changes of the fleet of a live run: by a user (`etude fleet apply`) or by automatic scaling.

    consumes   the run's steps and its engines' busy time, as read by the supervisor at home
    produces   a new desired state, which each region's supervisor follows within seconds

:mod:`etude.fleet.scaling` decides the number of engines.
"""

from collections.abc import Callable
from itertools import takewhile
from typing import final

from etude.config.fleet import FleetConfig
from etude.dashboard.run_metrics import RunMetrics
from etude.fleet.scaling import EngineRange, ScalingLimits, ScalingTable, StepLoad
from etude.fleet.state import Desired
from etude.run.folder import FLEET_FILE, RunFolder
from etude.run.placement import desired_of, fleet_objects, remember_fleet
from etude.run.working_folder import keep


def change_fleet(folder: RunFolder, fleet: FleetConfig) -> tuple[int, Desired]:
    """Declare ``fleet`` as the desired state and save it with the run; returns the generation and the desired state.

    Raises :class:`~etude.errors.ConfigError` as :func:`~etude.run.fleet_plan.plan_loop` does.
    """
    desired = desired_of(folder, fleet)
    remember_fleet(folder, fleet)
    keep(folder, FLEET_FILE)
    return fleet_objects(folder).declare(desired), desired


@final
class EngineScaler:
    """Adapts the number of engines to the trainer's speed, if the fleet enables it."""

    def __init__(
        self, fleet: FleetConfig, change: Callable[[FleetConfig], object], notify: Callable[[str], None]
    ) -> None:
        """``change`` declares a new fleet as the desired state."""
        self._change, self._notify = change, notify
        self._fleet = self._followed = fleet
        """The newest fleet, and the one that the supervisor follows: equal once a change has arrived there."""
        self._steps = 0
        """Number of steps already evaluated."""
        self._since_s = 0.0
        self._table = _table_of(fleet)

    def look(self, run: RunMetrics, followed: FleetConfig) -> None:
        """Evaluate the run's new steps, and change the fleet if needed. ``followed`` is the fleet that the supervisor
        follows; a change by a user is the new starting point.
        """
        if followed != self._followed:
            self._followed = followed
            if followed != self._fleet:
                self._fleet, self._table = followed, _table_of(followed)
        if self._table is None:
            return
        new, self._steps = run.steps[self._steps :], len(run.steps)
        for step in new:
            recent = takewhile(lambda timed: timed.at_s > self._since_s, reversed(run.engine))
            windows = [timed.event for timed in recent if timed.at_s <= step.at_s]
            seconds = sum(window.window_s for window in windows)
            self._since_s = step.at_s
            if seconds and self._table.step(
                StepLoad(
                    work_s=step.event.metrics["busy_s"],
                    wait_s=step.event.metrics["wait_s"],
                    engines_busy=sum(window.busy_s for window in windows) / seconds,
                )
            ):
                self._follow(self._table)

    def _follow(self, table: ScalingTable) -> None:
        """Change the fleet to the engine counts of the table."""
        changed, words = [], []
        for region in self._fleet.regions:
            engines = table.counts.get(region.name, region.engines)
            changed.append(region.model_copy(update={"engines": engines}))
            if engines != region.engines:
                words.append(f"{region.name} {region.engines} → {engines}")
        self._fleet = self._fleet.model_copy(update={"regions": tuple(changed)})
        self._notify(f"engines: {', '.join(words)}, {table.cost_per_hour:g} an hour")
        self._change(self._fleet)


def _table_of(fleet: FleetConfig) -> ScalingTable | None:
    """The scaling table of the regions whose number of engines may change; ``None`` if there are none."""
    regions = [region for region in fleet.regions if region.scaling.most]
    ranges = [
        EngineRange(
            region=region.name,
            fewest=region.scaling.fewest,
            most=region.scaling.most,
            cost_per_hour=region.scaling.cost_per_hour,
        )
        for region in regions
    ]
    limits = ScalingLimits(cost_per_hour=fleet.cost_per_hour) if fleet.cost_per_hour else ScalingLimits()
    return ScalingTable(ranges, {region.name: region.engines for region in regions}, limits) if regions else None
