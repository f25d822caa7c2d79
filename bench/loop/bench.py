"""`bench loop`: the same RL run by étude's asynchronous loop, by its synchronous mode, and by TRL.

    mid-training ──▶ one model ──┬──▶ asynchronous            ┐
                                 ├──▶ synchronous             ├─ weight versions ──▶ held-out pass rates ──▶ time to
                                 ├──▶ synchronous, all cores  │  (afterwards, outside of everybody's time)   one rate
                                 └──▶ TRL's GRPOTrainer       ┘

All start from one model, mid-trained as the quickstart's, and train on the same tasks with the same limits, loss,
optimiser and schedule, one after the other on an otherwise idle machine. étude's contestants run the same processes and
differ in ``rollouts.max_staleness``: with 0, trainer and rollouts take turns, since nothing is admitted until the
step's weights are served. Taking turns, whichever side is at work can have every core, which is what a person would do;
the ratio is against the better of the two. TRL has every core, too (``loop_trl_worker.py`` says how it is set up).

What is judged is the time to one held-out pass rate, where both sides reached it, and rollouts per second where not.
Whether staleness costs quality takes more runs and hours: ``quality.py``. Whether both sides are busy all the time
takes a larger model: ``busy.py``.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.loop.busy import BUSY, bench_busy
from bench.loop.busy import table as busy_table
from bench.loop.contestants import ASYNCHRONOUS, SYNCHRONOUS, TRL, ContestantRun, LoopOptions, loop_options, recipe
from bench.loop.heldout import Point, measure_marks, measure_start, target_rate, time_to
from bench.loop.quality import QUALITY, bench_quality
from bench.loop.quality import table as quality_table
from bench.loop.runs import run_etude, run_midtraining
from bench.loop.trl import run_trl
from bench.options import add_contestants, names
from bench.report import Goal, envelope, so_far
from bench.tables import results_of, results_page
from etude.run.folder import RunFolder
from etude.types import Json

ASYNC_VS_SYNC = Goal(
    "async_vs_sync",
    "at least",
    1.8,
    "Speed of the asynchronous loop over the synchronous one: to one held-out pass rate, else in rollouts per second.",
)
ASYNC_VS_TRL = Goal(
    "async_vs_trl",
    "at least",
    3.0,
    "Speed of the asynchronous loop over TRL's GRPOTrainer: to one held-out pass rate, else in rollouts per second.",
)
BUSY_TRAINER = Goal(
    "busy_trainer", "at least", 0.9, "Share of the time in which the trainer of the asynchronous loop computes."
)
BUSY_ENGINE = Goal(
    "busy_engine", "at least", 0.9, "Share of the time in which the engine of the asynchronous loop computes."
)
_COLUMNS = ("contestant", "rollouts_per_s", "trained_tokens_per_s", "busy_trainer", "busy_engine", "time_to_rate_s")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_contestants(parser)
    parser.add_argument("--steps", type=int, help="optimiser steps per contestant (default: 60)")
    parser.add_argument("--marks", type=int, help="versions of each that are measured (default: 6); 0: speed alone")
    parser.add_argument("--quality", action="store_true", help="instead: what staleness costs, over seeds, in hours")
    parser.add_argument("--busy", action="store_true", help="instead: a model that fills a core on each side, an hour")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart"), help="of --quality")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-loop"), help="of --quality: keeps its runs")
    parser.add_argument("--seeds", type=int, default=3, help="of --quality: how many")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    if options.quality:
        return bench_quality(options.recipe, options.out, seeds=range(options.seeds))
    if options.busy:
        return bench_busy(steps=options.steps, marks=options.marks, quick=options.quick)
    contestants = names(options.contestants)
    return bench_loop(loop_options(contestants, steps=options.steps, marks=options.marks, quick=options.quick))


def bench_loop(options: LoopOptions | None = None) -> dict[str, Json]:
    """Run all contestants, evaluate their versions, and return the bench object."""
    chosen = options or LoopOptions()
    started_s = time.monotonic()
    outcomes: list[ContestantRun] = []
    curves: dict[str, list[Point]] = {}
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch, so_far() as measured:
        start = run_midtraining(RunFolder.create(Path(scratch) / "start", recipe(chosen.chosen[0], chosen)))
        for contestant in chosen.chosen:
            run_one = run_trl if contestant.name == TRL else run_etude
            outcomes.append(run_one(contestant, chosen, start, Path(scratch) / contestant.name))
        if chosen.marks:
            first = measure_start(start, chosen.tasks)
            for outcome in outcomes:
                if outcome.folder is not None:
                    curves[outcome.contestant.name] = measure_marks(outcome, first, chosen.tasks)
    return envelope("loop", time.monotonic() - started_s, figures(outcomes, curves), interrupted=measured.interrupted)


def figures(outcomes: Sequence[ContestantRun], curves: Mapping[str, Sequence[Point]]) -> dict[str, Json]:
    """Rows and goals from the runs and the evaluations of their versions, by contestant."""
    leader = curves.get(ASYNCHRONOUS)
    rate = None if leader is None else target_rate(leader)
    times = {} if rate is None else {name: time_to(rate, points) for name, points in curves.items()}
    rows: list[Json] = [
        outcome.to_json()
        | {
            "time_to_rate_s": _tenth(times.get(outcome.contestant.name)),
            "curve": [point.to_json() for point in curves.get(outcome.contestant.name, ())],
        }
        for outcome in outcomes
    ]
    by_name = {outcome.contestant.name: outcome for outcome in outcomes if outcome.missing is None}
    return {
        "rate": None if rate is None else round(rate, 4),
        "results": rows,
        "goals": {
            ASYNC_VS_SYNC.name: judge_ratio(ASYNC_VS_SYNC, by_name, times, _named(by_name, SYNCHRONOUS)),
            ASYNC_VS_TRL.name: judge_ratio(ASYNC_VS_TRL, by_name, times, _named(by_name, TRL)),
            BUSY_TRAINER.name: BUSY_TRAINER.judge(_busy(by_name, "busy_trainer")),
            BUSY_ENGINE.name: BUSY_ENGINE.judge(_busy(by_name, "busy_engine")),
        },
    }


def judge_ratio(
    goal: Goal, outcomes: Mapping[str, ContestantRun], times: Mapping[str, float | None], others: Sequence[str]
) -> dict[str, Json]:
    """Speed of the asynchronous run relative to the fastest of ``others``: by time to the rate, and by rollouts.

    For a contestant that never reached the rate, the ratio of times is unknown: rollouts are compared instead.
    """
    ours = outcomes.get(ASYNCHRONOUS)
    if ours is None or not others:
        return goal.judge(None)
    in_rollouts = min(_ratio(ours.rollouts_per_s, outcomes[name].rollouts_per_s) for name in others)
    reached = [seconds for name in others if (seconds := times.get(name))]
    mine = times.get(ASYNCHRONOUS)
    in_time = min(reached) / mine if reached and mine else None
    return goal.judge(in_rollouts if in_time is None else in_time) | {
        "by": "rollouts per second" if in_time is None else "time to the rate",
        "in_rollouts": round(in_rollouts, 3),
        "in_time": None if in_time is None else round(in_time, 3),
    }


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people, and what each contestant spent its time on."""
    if result["bench"] == QUALITY:
        return quality_table(result)
    if result["bench"] == BUSY:
        return busy_table(result)
    spent = [
        f"{row['contestant']}: share of the time {row['phases']}, CPU seconds a step {row['cpu_s_per_step']}"
        for row in results_of(result)
        if not row["missing"]
    ]
    return results_page(result, _COLUMNS, notes=spent)


def _named(outcomes: Mapping[str, ContestantRun], prefix: str) -> list[str]:
    return [name for name in outcomes if name.startswith(prefix)]


def _busy(outcomes: Mapping[str, ContestantRun], side: str) -> float | None:
    ours = outcomes.get(ASYNCHRONOUS)
    return None if ours is None else getattr(ours, side)


def _ratio(ours: float | None, theirs: float | None) -> float:
    return ours / theirs if ours and theirs else 0.0


def _tenth(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
