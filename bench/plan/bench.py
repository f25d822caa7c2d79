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
from pathlib import Path
from types import MappingProxyType

from bench.options import names
from bench.plan.comparison import Comparison, judged
from bench.report import envelope, so_far
from bench.starts import prepared_start, starting_from
from bench.tables import results_page
from bench.trials.trials import finished_run
from etude.cli.actions.plan_run import regions_of, shared_cores
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
    rows: list[Json] = [each.row() for each in compared]
    return envelope("plan", time.perf_counter() - started_s, {"results": rows, "goals": judged(compared)},
                    interrupted=state.interrupted)  # fmt: skip


def _run(recipe: Path, keys: Sequence[str], path: Path) -> RunFolder:
    """A run at its end, without evaluations."""
    config = load_recipe(recipe, (*keys, "eval.enabled=false"))
    return finished_run(path, lambda: RunFolder.create(path, config))


def table(result: dict[str, Json]) -> str:
    """Draw a bench object."""
    measures = ("step_s", "trainer", "engines")
    return results_page(result, ("contestant", *(name + end for name in measures for end in ("", "_predicted"))))
