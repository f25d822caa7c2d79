"""`bench selection`: are tasks that are chosen, and groups that are sampled again, worth it?

    simulated   the product's selection and weights, and learners of a dozen numbers (:mod:`bench.selection.learners`)
    real        whole runs of a recipe of sums, half of whose training tasks are hopeless, from one mid-trained model

Both say how many steps, and how many rollouts, it takes to the same held-out pass rate, arm by arm, on each seed. Every
arm of a seed has the same tasks, and the real ones the same first weights. ``--quick`` simulates alone: a minute.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from random import Random
from types import MappingProxyType

from bench.loop.runs import begin_from
from bench.options import add_trials, trial_arguments
from bench.report import Goal, envelope, heading, so_far
from bench.selection.learners import GROUPS, Arm, Learner, learn
from bench.tables import draw, page, results_of
from bench.trials.trials import finished_run, midtrained, report_of
from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.config.tasks import PoolsOptions, SelectionConfig, ThompsonOptions
from etude.ledger.changes import TRAIN
from etude.ledger.ledger import Ledger
from etude.ledger.states import GroupState
from etude.run.folder import RunFolder
from etude.run.stores import open_ledger
from etude.types import Json

IN_ORDER = "in order"
TARGET = 0.75
"""Held-out pass rate of simulated learners that is waited for; they begin at a half."""
MOST_RESAMPLES = 2 * GROUPS
"""Groups of a simulated step that may be left out."""
SIMULATED = (
    Arm(name=IN_ORDER, selection=SelectionConfig()),
    Arm(name="pools", selection=SelectionConfig(kind="pools", options=PoolsOptions())),
    Arm(
        name="pools, unweighted",
        selection=SelectionConfig(kind="pools", importance_weights=False, options=PoolsOptions()),
    ),
    Arm(name="thompson", selection=SelectionConfig(kind="thompson", options=ThompsonOptions())),
    Arm(
        name="thompson, unweighted",
        selection=SelectionConfig(kind="thompson", importance_weights=False, options=ThompsonOptions()),
    ),
    Arm(name="in order, resampling", selection=SelectionConfig(), max_resamples=MOST_RESAMPLES),
    Arm(
        name="thompson, resampling",
        selection=SelectionConfig(kind="thompson", options=ThompsonOptions()),
        max_resamples=MOST_RESAMPLES,
    ),
)
REAL: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        IN_ORDER: (),
        "thompson": ("tasks.selection.kind=thompson",),
        "pools": ("tasks.selection.kind=pools",),
        "in order, resampling": ("rollouts.max_resamples=16",),
    }
)
"""Arm → what it changes of the recipe."""
EVERY_STEPS = 5
"""Steps between two held-out measurements of a real run."""
HELDOUT_ROWS = 200
"""Rows of the recipe's set that are held out; of the others every second one is made hopeless."""
LESS = Goal(
    "steps_vs_in_order",
    "at most",
    1.0,
    "Optimiser steps to the held-out pass rate, over those with tasks in order; the mean over seeds.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFigures:
    """One arm on one seed."""

    arm: str
    seed: int
    simulated: bool
    steps: int | None
    """Until the pass rate that is waited for; ``None``: it was not reached."""
    rollouts: int | None
    signal: float
    """Share of groups with a signal among those of batches."""
    target: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_trials(parser, "selection", "arithmetic")
    parser.add_argument("--quick", action="store_true", help="simulated learners alone, in a minute")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    recipe, out, seeds, overrides = trial_arguments(options)
    return bench_selection(seeds, real=None if options.quick else (recipe, out, overrides))


def bench_selection(seeds: Sequence[int], *, real: tuple[Path, Path, Sequence[str]] | None) -> dict[str, Json]:
    """Every arm on every seed, simulated and, where ``real`` names recipe, folder and overrides, as whole runs."""
    started_s = time.monotonic()
    trials: list[TrialFigures] = []
    with so_far() as measured:
        for seed, arm in product(seeds, SIMULATED):
            trials.append(_simulate(arm, seed))
        if real is not None:
            for seed in seeds:
                trials += _real(*real, seed)
    figures: dict[str, Json] = {
        "start": round(statistics.fmean(Learner(seed).heldout_pass() for seed in seeds), 3),
        "results": [_row(trial, trials) for trial in trials],
        "goals": {
            f"{'simulated' if simulated else 'real'}: {arm}": judged(trials, arm, simulated=simulated)
            for simulated in (True, False)
            for arm in dict.fromkeys(trial.arm for trial in trials if trial.simulated == simulated)
            if arm != IN_ORDER
        },
    }
    return envelope("selection", time.monotonic() - started_s, figures, interrupted=measured.interrupted)


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people."""
    ratios = ("steps", "steps_vs_in_order", "rollouts", "rollouts_vs_in_order")
    columns = ("seed", "contestant", "target", *ratios, "signal")
    return page(result, draw(heading(result), results_of(result), columns, under="case"))


def _simulate(arm: Arm, seed: int) -> TrialFigures:
    outcome = learn(arm, seed=seed, target=TARGET)
    return TrialFigures(
        arm=arm.name,
        seed=seed,
        simulated=True,
        steps=outcome.steps,
        rollouts=outcome.rollouts if outcome.steps else None,
        signal=outcome.signal,
        target=TARGET,
    )


def _real(recipe: Path, out: Path, overrides: Sequence[str], seed: int) -> Iterator[TrialFigures]:
    """The arms of one seed as whole runs; compared at half of the gain of tasks in order."""
    train, heldout = task_files(Path(str(load_recipe(recipe).tasks.options.model_dump()["path"])), out)
    common = [*overrides, f"seed={seed}", f"tasks.options.path={train}", f"tasks.options.heldout_path={heldout}"]
    common += [f"eval.every_steps={EVERY_STEPS}"]
    start, target = out / f"s{seed}-start", 0.0
    for arm, changes in REAL.items():
        config = load_recipe(recipe, [*common, *changes])
        path = out / f"s{seed}-{arm.replace(', ', '-').replace(' ', '-')}"
        begin = partial(_begin, start, load_recipe(recipe, common), path, config)
        folder = finished_run(path, begin)
        report = report_of(folder, config)
        curve = pass_curve(report)
        if arm == IN_ORDER:
            target = statistics.fmean((curve[0][1], curve[-1][1]))
        steps = reached(curve, target)
        steps_of = [step for step in _rows(report, "curve") if steps is None or int(str(step["step"])) <= steps]
        signal = statistics.fmean(float(str(step["signal_share"])) for step in steps_of)
        with open_ledger(folder) as ledger:
            rollouts = None if steps is None else _rollouts_until(ledger, steps, config.rollouts.groups_per_step)
        yield TrialFigures(
            arm=arm, seed=seed, simulated=False, steps=steps, rollouts=rollouts, signal=signal, target=target
        )


def _begin(start: Path, trained: RunConfig, path: Path, config: RunConfig) -> RunFolder:
    """A new run of an arm, from the seed's mid-trained model."""
    return begin_from(midtrained(start, trained), path, config)


def task_files(path: Path, out: Path) -> tuple[Path, Path]:
    """The rows of a set with the answer of every second training row made one that is never given, and held-out rows
    as they are.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    Random(0).shuffle(rows)
    out.mkdir(parents=True, exist_ok=True)
    files = out / "train.jsonl", out / "heldout.jsonl"
    hopeless = [row | {"answer": "no number"} if place % 2 else row for place, row in enumerate(rows[HELDOUT_ROWS:])]
    for file, some in zip(files, (hopeless, rows[:HELDOUT_ROWS]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    return files


def pass_curve(report: Mapping[str, Json]) -> list[tuple[int, float]]:
    """Step and held-out pass rate, each the mean of a measurement and its neighbours: one alone is of 64 tasks."""
    rows = [row for row in _rows(report, "heldout_curve") if row.get("phase") == "rl"]
    passes = [float(str(row["sampled_pass"])) for row in rows]
    smooth = [statistics.fmean(passes[max(0, place - 1) : place + 2]) for place in range(len(passes))]
    return [(int(str(row["step"])), value) for row, value in zip(rows, smooth, strict=True)]


def reached(curve: Sequence[tuple[int, float]], target: float) -> int | None:
    """The first step at which a curve is at ``target``; ``None``: it never is."""
    return next((step for step, value in curve if value >= target), None)


def _rollouts_until(ledger: Ledger, steps: int, groups_per_step: int) -> int:
    """Rollouts of all groups up to the last one that a step was trained on, those that were left out included."""
    groups = ledger.groups(TRAIN, [GroupState.CONSUMED])
    *_, last = islice(groups, steps * groups_per_step)
    return sum(len(ledger.group(TRAIN, index).rollouts) for index in range(last.index + 1))


def _rows(report: Mapping[str, Json], name: str) -> list[dict[str, Json]]:
    rows = report[name]
    assert isinstance(rows, list)
    return [row for row in rows if isinstance(row, dict)]


def _row(trial: TrialFigures, trials: Sequence[TrialFigures]) -> dict[str, Json]:
    base = _base(trial, trials)
    return {
        "contestant": trial.arm,
        "case": "simulated learners" if trial.simulated else "real runs",
        "seed": trial.seed,
        "target": round(trial.target, 3),
        "steps": trial.steps,
        "steps_vs_in_order": _ratio(trial.steps, base.steps),
        "rollouts": trial.rollouts,
        "rollouts_vs_in_order": _ratio(trial.rollouts, base.rollouts),
        "signal": round(trial.signal, 3),
    }


def _base(trial: TrialFigures, trials: Sequence[TrialFigures]) -> TrialFigures:
    """The tasks in order, of the same seed."""
    return next(
        each for each in trials if (each.arm, each.seed, each.simulated) == (IN_ORDER, trial.seed, trial.simulated)
    )


def _ratio(value: int | None, base: int | None) -> float | None:
    return None if value is None or not base else round(value / base, 3)


def judged(trials: Sequence[TrialFigures], arm: str, *, simulated: bool) -> dict[str, Json]:
    """Steps of an arm over those of tasks in order, the mean over seeds, with rollouts beside."""
    mine = [trial for trial in trials if trial.arm == arm and trial.simulated == simulated]
    steps = [_ratio(trial.steps, _base(trial, trials).steps) for trial in mine]
    rollouts = [_ratio(trial.rollouts, _base(trial, trials).rollouts) for trial in mine]
    if None in steps:
        return LESS.judge(None, "the pass rate was not reached on every seed")
    paid = [ratio for ratio in rollouts if ratio is not None]
    return LESS.judge_seeds([ratio for ratio in steps if ratio is not None]) | {
        "rollouts_vs_in_order": round(statistics.fmean(paid), 3)
    }
