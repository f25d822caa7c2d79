"""The work of a run's parts, which its events do not contain, fitted until a simulation reproduces the recorded times.

    recorded events ──▶ calibration ──▶ simulation ──▶ seconds that its parts took ┐
                            ▲                                                      ├─ recorded / simulated
                            └──── each part's work, scaled ◀───────────────────────┘

If parts share processors, the recorded seconds of a part are more than its work: the work is the amount with which the
simulated seconds equal the recorded ones.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from etude.config.recipe import RunConfig
from etude.simulation.calibration import RunCalibration
from etude.simulation.figures import RunFigures
from etude.simulation.run import RegionModel, simulate, skipped_steps
from etude.simulation.workload import STAGES, Workload
from etude.telemetry.events import Logged

ROUNDS = 8
"""Number of simulations in a calibration."""
STEPS = 16
"""Maximum number of counted steps in each of them."""
DAMPING = 0.7
"""Exponent of each factor, and share of the missing time that is added to calls: parts that share processors or engines
slow each other down.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSeconds:
    """Seconds that each part of a run took."""

    engine_s: float
    """Seconds of all engines per step."""
    trainer_s: float
    """Seconds of the trainer per step."""
    step_s: float
    """Seconds of a whole step."""
    workload: Workload

    @classmethod
    def of_events(cls, logged: Sequence[Logged], *, skipped: int) -> Self:
        """Read a real or simulated run. Raises :class:`~etude.errors.UserError` if it is too short."""
        figures = RunFigures.of_events(logged, skipped=skipped)
        return cls(
            engine_s=figures.engine_s,
            trainer_s=figures.trainer_busy * figures.step_s,
            step_s=figures.step_s,
            workload=Workload.of_events(logged),
        )


def calibrate(
    config: RunConfig,
    logged: Iterable[Logged],
    regions: Sequence[RegionModel],
    *,
    cores: float = math.inf,
    rounds: int = ROUNDS,
) -> RunCalibration:
    """Fit all modelled speeds to the events of a run of ``config``.

    ``cores`` is the number of processors that all parts shared. ``call_s`` covers the time by which turns waited longer
    than in the simulation, and ``trainer.save_s`` the time of a step that no part explains. Raises
    :class:`~etude.errors.UserError` if the run is too short.
    """
    ordered = sorted(logged, key=lambda each: each.at_s)
    calibration = RunCalibration.of_events(ordered, config.engine, cores=cores)
    skipped = skipped_steps(config)
    recorded = PartSeconds.of_events(ordered, skipped=skipped)
    rollouts = config.rollouts.groups_per_step * config.rollouts.group_size
    calibration = replace(calibration, workload=calibration.workload.scaled(_affordable(recorded, cores, rollouts)))
    steps = min(config.trainer.steps, STEPS + 2 * skipped)
    short = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})
    for _ in range(rounds):
        simulated = PartSeconds.of_events(simulate(short, calibration, regions).all, skipped=skipped)
        calibration = _corrected(calibration, recorded, simulated)
    return calibration


def _affordable(recorded: PartSeconds, cores: float, rollouts: int) -> dict[str, float]:
    """Stage → factor with which the agents of a step have no more work than its processors had time for.

    A first guess: seconds that were recorded while many shared the processors are waiting for the most part.
    """
    left_s = cores * recorded.step_s - recorded.engine_s - recorded.trainer_s
    stages_s = rollouts * sum(recorded.workload.mean(name) for name in STAGES)
    share = min(1.0, left_s / stages_s) if left_s > 0 and stages_s else 1.0
    return dict.fromkeys(STAGES, share)


def _corrected(calibration: RunCalibration, recorded: PartSeconds, simulated: PartSeconds) -> RunCalibration:
    """The calibration, corrected so that its simulation comes closer to the recorded times."""
    stages = {name: _factor(recorded.workload.mean(name), simulated.workload.mean(name)) for name in STAGES}
    lacking_s = recorded.workload.wait_s - simulated.workload.wait_s
    gap_s = DAMPING * (recorded.step_s - simulated.step_s)
    trainer = calibration.trainer.scaled(_factor(recorded.trainer_s, simulated.trainer_s))
    pace = min(1.0, calibration.workload.mean("tools_s") / (recorded.workload.mean("tools_s") or math.inf))
    return replace(
        calibration,
        engine=calibration.engine.scaled(_factor(recorded.engine_s, simulated.engine_s)),
        trainer=replace(trainer, save_s=max(0.0, trainer.save_s + gap_s)),
        workload=calibration.workload.scaled(stages),
        call_s=max(0.0, calibration.call_s + DAMPING * pace * lacking_s),
    )


def _factor(recorded_s: float, simulated_s: float) -> float:
    return (recorded_s / simulated_s) ** DAMPING if recorded_s and simulated_s else 1.0
