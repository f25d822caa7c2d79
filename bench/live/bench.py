"""`bench live`: from a user's signal to better weights in production, part by part.

    signal ─▶ store ─▶ joined ─▶ trained ─▶ gate ─▶ canary ─▶ released        a live run, stage by stage (stages)
    kill -9, duplicates, reordering; events per second on both databases      ingest
    variance of the gradient by baselines without groups                      baselines
    a thousand simulated A/A and A/B tests                                    ab
    a rollback with 64 sessions in flight                                     rollback

The live run is a short day of ``recipes/live``, or one that ran already (``--day``). Each part can be left out.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import cast

from bench.live.stages import measure_signal_to_live
from bench.options import names
from bench.report import Goal, envelope
from bench.tables import draw, page, results_of
from etude.errors import InfrastructureError
from etude.types import Json

DAY = Path("recipes/live/day.py")
DAY_S = 300.0
"""Length of the short day."""
PARTS: Mapping[str, str] = MappingProxyType(
    {
        "stages": "",
        "ingest": "bench.live.ingest:measure_ingest",
        "baselines": "bench.live.baselines:measure_baselines",
        "ab": "bench.live.ab:measure_ab",
        "rollback": "bench.live.rollback:measure_rollback",
    }
)
"""Part → the function that measures it; the first is made of a run."""
GOALS = (
    (
        "stages",
        "signal_to_live_steps",
        Goal(
            "signal_to_live_steps",
            "at most",
            3,
            "Optimiser steps from a user's signal to the released weights that learnt from it; the median.",
        ),
    ),
    (
        "ingest",
        "lost",
        Goal("lost", "at most", 0, "Turns and signals that were confirmed in time and are missing after kills."),
    ),
    ("ingest", "doubled", Goal("doubled", "at most", 0, "Signals that are stored twice after kills.")),
    (
        "ab",
        "false_promotion_rate",
        Goal(
            "false_promotion_rate",
            "at most",
            0.05,
            "Share of simulated tests that end in a promotion, of a version that is the same or worse by the margin.",
        ),
    ),
    (
        "ab",
        "false_rollback_rate",
        Goal(
            "false_rollback_rate",
            "at most",
            0.05,
            "Share of simulated tests that end in a rollback, of a version that is the same or not beyond the margin.",
        ),
    ),
    (
        "rollback",
        "rollback_s",
        Goal(
            "rollback_s",
            "at most",
            5.0,
            "Seconds from the wish to roll back until sessions and engines have the version before.",
        ),
    ),
    (
        "rollback",
        "broken",
        Goal("broken_by_rollback", "at most", 0, "Calls that a rollback breaks, with 64 sessions under way."),
    ),
)
"""Part, the name of its figure, and what that has to be."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    parser.add_argument("--parts", metavar="A,B,…", help=f"only these of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--day", type=Path, metavar="OUT", help="a day of recipes/live that ran (default: a short one)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-live"), help="keeps the short day; goes on")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    started_s = time.perf_counter()
    measured = {part: _measure(part, options) for part in names(options.parts) or tuple(PARTS)}
    results: list[Json] = [{"contestant": part, **figures} for part, figures in measured.items()]
    goals: dict[str, Json] = {goal.name: _judge(goal, measured.get(part), figure) for part, figure, goal in GOALS}
    figures: dict[str, Json] = {"results": results, "goals": goals}
    return envelope("live", time.perf_counter() - started_s, figures)


def table(result: dict[str, Json]) -> str:
    """Each figure of each part in a row, then the goals."""
    rows: list[Mapping[str, Json]] = [
        {"contestant": row["contestant"], "case": name, "value": str(value)}
        for row in results_of(result)
        for name, value in row.items()
        if name != "contestant"
    ]
    return page(result, draw("live", rows, ("contestant", "case", "value")))


def _judge(goal: Goal, figures: Mapping[str, Json] | None, figure: str) -> dict[str, Json]:
    value = None if figures is None else figures.get(figure)
    return goal.judge(float(value) if isinstance(value, int | float) else None)


def _measure(part: str, options: argparse.Namespace) -> dict[str, Json]:
    if part == "stages":
        return measure_signal_to_live((options.day or _short_day(options.out)) / "run")
    module, _, function = PARTS[part].partition(":")
    measure = cast("Callable[[], dict[str, Json]]", getattr(import_module(module), function))
    return measure()


def _short_day(out: Path) -> Path:
    """A short day, run or gone on with; returns its folder."""
    if not (out / "day.json").exists():
        command = [sys.executable, str(DAY), "--out", str(out), "--day-s", str(DAY_S), "--no-plants"]
        status = subprocess.run(command, check=False, stdout=sys.stderr).returncode
        if status:
            raise InfrastructureError(f"{DAY} ended with status {status}: its output is above")
    return out
