"""`bench loop --busy`: are trainer and engine both at work all the time, with a core each and a model that fills them?

    core 0: trainer ─┐
    core 1: engine  ─┴─ asynchronous ──▶ busy shares ──▶ loop_busy
                        synchronous  ──▶ time to one held-out pass rate, over the asynchronous one's ──▶ async_vs_sync

The model has 20 million parameters, so that its own work dominates: that of sandboxes, graders, gateway and rollouts is
some per cent of it and takes turns on the same two cores. The recipe is one for which a step's sampling and its
training cost about the same; otherwise one side waits for the other, however well they overlap.

A side is busy while it computes: the trainer while it is not waiting for a batch, the engine while it has sequences to
go on with. The first steps are left out, in which the first batch is sampled, and the last ones, for which nothing more
is admitted. Beside stands what each process had of its core.
"""

import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.loop.contestants import ASYNCHRONOUS, QUICK, STALENESS, SYNCHRONOUS, ContestantRun, LoopOptions, recipe
from bench.loop.heldout import Point, measure_marks, measure_start, target_rate, time_to
from bench.loop.runs import Pins, run_etude, run_midtraining
from bench.report import Goal, envelope, so_far
from bench.starts import prepared_start
from bench.tables import results_of, results_page
from etude.run.folder import RunFolder
from etude.telemetry.events import EngineStats, Logged, StepDone
from etude.telemetry.log import EventReader
from etude.types import Json

BUSY = "loop_busy"
MODEL: Mapping[str, Json] = {
    "hidden_size": 384,
    "layers": 6,
    "heads": 6,
    "kv_heads": 6,
    "head_dim": 64,
    "experts": 8,
    "expert_size": 288,
}
"""20 million parameters, 8 million of them at work for a token."""
RECIPE: Mapping[str, Json] = {
    "model": {"shape": dict(MODEL)},
    "midtrain": {"tokens": 250_000, "batch_tokens": 2_000, "threads": 2},
    "optimiser": {"kind": "muon"},
    "tasks": {"options": {"kinds": ["arith", "slice"], "read_first": 0.15}},
    "rollouts": {"groups_per_step": 16, "group_size": 8, "concurrency": 128},
    "engine": {"max_running": 8},
    "trainer": {"learning_rate": 4e-4},
}
"""Changes from the loop's recipe. The engine decodes so few sequences at a time that a step's sampling takes about as
long as its training; with more of them it waits for the trainer half of the time."""
PINS: Pins = {"train": 0, "serve": 1}
"""Process → its core; all others take what these leave."""
SKIPPED = STALENESS + 1
"""Steps at either end that are left out of the busy shares: the pipeline fills, and runs dry."""
STEPS, MARKS, TASKS = 20, 2, 128
"""Optimiser steps of each, versions of each that are measured, and held-out tasks on which."""
SIDES = ("busy_trainer", "busy_engine")
LEAST_BUSY = Goal(
    BUSY,
    "at least",
    0.9,
    "Share of the time in which trainer and engine compute, with a core each; the lower of the two.",
)
SPEED_UP = Goal(
    "async_vs_sync",
    "at least",
    1.8,
    "Speed of the asynchronous loop to one held-out pass rate, over the synchronous one, with a core for each side.",
)
_COLUMNS = ("contestant", *SIDES, "waits_trainer", "step_s", "time_to_rate_s")


def bench_busy(*, steps: int | None = None, marks: int | None = None, quick: bool = False) -> dict[str, Json]:
    """Run both modes, and return the bench object; a quick call only checks that they run."""
    began_s = time.monotonic()
    options = busy_options(steps=steps, marks=marks, quick=quick)
    rows: list[ContestantRun] = []
    shares: dict[str, dict[str, Json]] = {}
    curves: dict[str, list[Point]] = {}
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch, so_far() as measured:
        options, start = _begin(options, Path(scratch) / "start")
        for contestant in options.chosen:
            row = run_etude(contestant, options, start, Path(scratch) / contestant.name, PINS)
            rows.append(row)
            assert row.folder is not None
            shares[contestant.name] = busy_shares(list(EventReader(row.folder.events).new()))
            sys.stderr.write(f"{contestant.name}: {shares[contestant.name]}\n")
        if options.marks:
            first = measure_start(start, options.tasks)
            for row in rows:
                curves[row.contestant.name] = measure_marks(row, first, options.tasks)
    return envelope(BUSY, time.monotonic() - began_s, figures(rows, shares, curves), interrupted=measured.interrupted)


def busy_options(*, steps: int | None, marks: int | None, quick: bool) -> LoopOptions:
    """The options of a call; ``None`` stands for the default."""
    steps = steps or (2 * SKIPPED + 1 if quick else STEPS)
    marks = min(MARKS, steps) if marks is None else marks
    ways = (ASYNCHRONOUS, SYNCHRONOUS)
    chosen = {**RECIPE, **QUICK} if quick else RECIPE
    return LoopOptions(contestants=ways, steps=steps, marks=marks, tasks=8 if quick else TASKS, recipe=chosen)


def _begin(options: LoopOptions, path: Path) -> tuple[LoopOptions, RunFolder]:
    """The start of all contestants, whose mid-training is done once on a machine, and options that begin with it."""
    model = prepared_start(recipe(options.chosen[0], options))
    begun: Mapping[str, Json] = {**options.recipe, "model": {"checkpoint": str(model)}, "midtrain": {"tokens": 0}}
    options = replace(options, recipe=begun)
    return options, run_midtraining(RunFolder.create(path, recipe(options.chosen[0], options)))


def busy_shares(events: Iterable[Logged]) -> dict[str, Json]:
    """Busy shares of both sides in the counted steps, waiting time of the trainer, and seconds of a step.

    Empty if there are too few steps.
    """
    logged = list(events)
    steps = {each.event.step: each for each in logged if isinstance(each.event, StepDone)}
    counted = sorted(steps)[SKIPPED : len(steps) - SKIPPED]
    if not counted:
        return {}
    begin_s, end_s = steps[counted[0] - 1].at_s, steps[counted[-1]].at_s
    events_of = [steps[step].event for step in counted]
    trained = [event.metrics for event in events_of if isinstance(event, StepDone)]
    sampled = [each.event for each in logged if isinstance(each.event, EngineStats) and begin_s < each.at_s <= end_s]
    window_s = sum(stats.window_s for stats in sampled)
    return {
        "busy_trainer": _share(sum(step["busy_s"] for step in trained), end_s - begin_s),
        "busy_engine": _share(sum(stats.busy_s for stats in sampled), window_s),
        "waits_trainer": _share(sum(step["wait_s"] for step in trained), end_s - begin_s),
        "step_s": round((end_s - begin_s) / len(counted), 2),
    }


def figures(
    rows: Sequence[ContestantRun], shares: Mapping[str, dict[str, Json]], curves: Mapping[str, Sequence[Point]]
) -> dict[str, Json]:
    """Rows and goals."""
    rate = target_rate(curves[ASYNCHRONOUS]) if ASYNCHRONOUS in curves else None
    times = {} if rate is None else {name: time_to(rate, points) for name, points in curves.items()}
    results: list[Json] = [
        row.to_json()
        | shares.get(row.contestant.name, {})
        | {"time_to_rate_s": times.get(row.contestant.name)}
        | {"curve": [point.to_json() for point in curves.get(row.contestant.name, ())]}
        for row in rows
    ]
    ours = shares.get(ASYNCHRONOUS, {})
    both = {side: float(str(ours[side])) for side in SIDES if ours.get(side) is not None}
    return {
        "rate": None if rate is None else round(rate, 4),
        "shared": "sandboxes, graders, gateway, rollouts and this program take turns with both on the same two cores",
        "results": results,
        "goals": {
            LEAST_BUSY.name: LEAST_BUSY.judge_worst(both, "the asynchronous run had too few steps"),
            SPEED_UP.name: _speed_up(rows, times),
        },
    }


def _speed_up(rows: Sequence[ContestantRun], times: Mapping[str, float | None]) -> dict[str, Json]:
    """Time to the rate, synchronous over asynchronous; beside it the same of rollouts per second."""
    speeds = {row.contestant.name: row.rollouts_per_s for row in rows}
    ours, theirs = times.get(ASYNCHRONOUS), times.get(SYNCHRONOUS)
    fast, slow = speeds.get(ASYNCHRONOUS), speeds.get(SYNCHRONOUS)
    judged = SPEED_UP.judge(theirs / ours if ours and theirs else None, "one of the two did not get to the rate")
    return judged | {"in_rollouts": round(fast / slow, 3) if fast and slow else None}


def table(result: dict[str, Json]) -> str:
    """The bench object for people, with what each process had of a core."""
    notes = [f"{row['contestant']}: CPU seconds a step {row['cpu_s_per_step']}" for row in results_of(result)]
    return results_page(result, _COLUMNS, notes=[*notes, str(result["shared"])])


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None
