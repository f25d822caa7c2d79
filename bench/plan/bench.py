"""`bench plan`: what `etude plan run` predicts, beside what then happens on this machine.

    recipe ──▶ run ──▶ events ──▶ calibration ──┬──▶ predicted ┐
      └──▶ the same with some keys changed ─────┼──▶ predicted ├─ busy shares, seconds of a step
                        └──▶ run ───────────────┴──▶ measured  ┘

The calibration knows the first run alone. Run folders are kept, and a call goes on where an earlier one stopped. What
else the machine does meanwhile makes a difference: leave it alone.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bench.options import names
from bench.report import Goal, envelope, so_far
from bench.starts import prepared_start, starting_from
from bench.tables import results_page
from bench.trials.trials import finished_run
from etude.cli.commands.plan_run import regions_of, shared_cores
from etude.config.loading import load_recipe
from etude.errors import UserError
from etude.run.folder import RunFolder
from etude.simulation.figures import RunFigures
from etude.simulation.fit import calibrate
from etude.simulation.run import simulate, skipped_steps
from etude.telemetry.log import EventReader
from etude.types import Json

CASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "as calibrated": (),
        "on policy": ("rollouts.max_staleness=0",),
        "larger groups": ("rollouts.group_size=16", "rollouts.concurrency=256"),
        "two engines": ("engine.replicas=2",),
    }
)
"""Case → what it changes of the recipe."""
BUSY_ERROR = Goal("busy_error", "at most", 0.1)
"""The largest difference between a predicted busy share and the measured one, of trainer or engines."""
STEP_TIME_ERROR = Goal("step_time_error", "at most", 0.1)
"""The largest difference between predicted and measured seconds of a step, as a share of the measured ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One case."""

    case: str
    measured: RunFigures
    predicted: RunFigures

    @property
    def busy_error(self) -> float:
        """In shares of the time."""
        return max(
            abs(self.predicted.trainer_busy - self.measured.trainer_busy),
            abs(self.predicted.engine_busy - self.measured.engine_busy),
        )

    @property
    def step_time_error(self) -> float:
        """Error as a share of the measured time."""
        return abs(self.predicted.step_s / self.measured.step_s - 1)

    def row(self) -> dict[str, Json]:
        """For people and programs."""
        return {
            "contestant": self.case,
            "step_s": round(self.measured.step_s, 3),
            "step_s_predicted": round(self.predicted.step_s, 3),
            "trainer": round(self.measured.trainer_busy, 3),
            "trainer_predicted": round(self.predicted.trainer_busy, 3),
            "engines": round(self.measured.engine_busy, 3),
            "engines_predicted": round(self.predicted.engine_busy, 3),
            "steps": self.measured.steps,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options."""
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart"), help="what runs (quickstart)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-plan"), help="keeps the runs; goes on")
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps of each run (20)")
    parser.add_argument("--cases", metavar="A,B,…", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override the recipe")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure, and return the bench object."""
    started_s, chosen = time.perf_counter(), names(options.cases) or tuple(CASES)
    if strange := sorted(set(chosen) - set(CASES)):
        raise UserError(f"--cases {strange[0]}: there are {', '.join(CASES)}")
    keys = (*options.set, f"trainer.steps={options.steps}")
    start = starting_from(prepared_start(load_recipe(options.recipe, options.set)))
    compared = list[Comparison]()
    with so_far() as state:
        calibrated = _run(options.recipe, (*keys, *start), options.out / "calibrated")
        config = calibrated.config()
        cores = shared_cores(config, 0)
        calibration = calibrate(config, EventReader(calibrated.events).new(), regions_of(config, None, ()), cores=cores)
        for case in chosen:
            ran = calibrated
            if CASES[case]:
                ran = _run(options.recipe, (*keys, *start, *CASES[case]), options.out / case.replace(" ", "-"))
            config, skipped = ran.config(), skipped_steps(ran.config())
            predicted = simulate(config, calibration, regions_of(config, None, ()), seed=1)
            compared.append(
                Comparison(
                    case=case,
                    measured=RunFigures.of_events(EventReader(ran.events).new(), skipped=skipped),
                    predicted=RunFigures.of_events(predicted.logged, skipped=skipped),
                )
            )
    goals: dict[str, Json] = {
        BUSY_ERROR.name: BUSY_ERROR.judge_worst({each.case: each.busy_error for each in compared}),
        STEP_TIME_ERROR.name: STEP_TIME_ERROR.judge_worst({each.case: each.step_time_error for each in compared}),
    }
    rows: list[Json] = [each.row() for each in compared]
    return envelope("plan", time.perf_counter() - started_s, {"results": rows, "goals": goals},
                    interrupted=state.interrupted)  # fmt: skip


def _run(recipe: Path, keys: Sequence[str], path: Path) -> RunFolder:
    """A run at its end, without evaluations."""
    config = load_recipe(recipe, (*keys, "eval.enabled=false"))
    return finished_run(path, lambda: RunFolder.create(path, config))


def table(result: dict[str, Json]) -> str:
    """Draw a bench object."""
    measures = ("step_s", "trainer", "engines")
    return results_page(result, ("contestant", *(name + end for name in measures for end in ("", "_predicted"))))
