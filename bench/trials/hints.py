"""`bench hints`: is a bad habit gone sooner when single turns are taught than by the reward alone?

For each seed one model is mid-trained on sessions of an agent that mostly writes its edits as ``edit FILE:N``, which
no tool understands, and then again rightly: a call is lost, the work is not. From that very model RL runs twice, on as
many rollouts. The reward knows what a call costs in both; in one of them a turn that was written like that is distilled
from the same policy with a short reminder before its eyes.

    seed ──▶ mid-training with the habit ──┬──▶ RL                      ──▶ malformed calls and passes, step by step
                                           └──▶ RL + hints on the turns ──▶ malformed calls and passes, step by step

What a reminder means the model has to know beforehand: a fifth of all that it learns to say follows one, and edits
among it are as they should be. A model of the usual size has learnt that from the world; this one has 0.6 million
parameters.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

from bench.loop.runs import begin_from
from bench.options import add_trials, trial_arguments
from bench.report import Goal, envelope, heading, so_far
from bench.tables import draw, page, results_of
from bench.trials.trials import finished_run, midtrained, report_of
from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.dashboard.formatting import number_at
from etude.dashboard.statistics import mean_over_seeds
from etude.errors import UserError
from etude.ledger.changes import TRAIN
from etude.ledger.states import GroupState
from etude.run.folder import RunFolder
from etude.run.stores import open_ledger
from etude.tasks.corpora.transcripts import REMINDER
from etude.types import Group, Json, Rollout

HABIT = ("tasks.options.bad_call=0.8", "tasks.options.reminded=0.2")
"""The agent of mid-training: most edits are written wrongly at first, none of those right behind a reminder."""
COST = ("effort.weight=0.05", "effort.prices.calls=1.0")
"""Reward terms, with and without hints: a malformed call costs a twentieth of a passed task."""
RULE = f'{{name = "edit style", where = "said", pattern = "^edit [^ ]+:[0-9]", text = "{REMINDER}"}}'
"""Rule that selects the hinted turns, and the teacher's hint."""
ALONE, HINTED = "reward alone", "hints"
"""The contestants."""
GONE = 0.05
"""Share of malformed calls below which the habit counts as gone."""
LASTING = 3
"""Steps in a row over which that is measured: one batch may be lucky."""
FEWER_STEPS = Goal(
    "habit_steps_vs_reward_alone",
    "at most",
    1.0,
    "Optimiser steps until the habit is gone with hints, over those with the reward alone; all seeds.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The rollouts of one optimiser step."""

    malformed: float
    """Share of their calls."""
    malformed_stderr: float
    """Over groups."""
    passed: float
    """Mean reward."""
    passed_stderr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run: a seed, a weight, and the results."""

    seed: int
    weight: float
    steps: tuple[StepFigures, ...]
    before: float
    """Held-out pass rate, sampled."""
    after: float
    seconds: float
    """Seconds of RL and its evaluations."""

    @property
    def contestant(self) -> str:
        """Name of the arm."""
        return HINTED if self.weight else ALONE

    @property
    def steps_until_gone(self) -> int | None:
        """Number of steps until the habit was gone for ``LASTING`` steps; ``None``: it never was."""
        return gone_after([step.malformed for step in self.steps])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_trials(parser, "hints", "quickstart")
    parser.add_argument("--weight", type=float, default=0.1, help="of hints, beside reward (default: 0.1)")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    recipe, out, seeds, overrides = trial_arguments(options)
    return bench_hints(recipe, out, seeds=seeds, weight=options.weight, overrides=overrides)


def bench_hints(
    recipe: Path, out: Path, *, seeds: Sequence[int], weight: float, overrides: Sequence[str] = ()
) -> dict[str, Json]:
    """Run every seed without hints and with hints of ``weight``, and return the bench object.

    Run folders are stored in ``out``; finished runs are read, unfinished ones are continued.
    """
    if not weight > 0:
        raise UserError(f"bench hints: a weight of {weight:g} teaches nothing; it must be above 0")
    trials: list[Trial] = []
    with so_far() as measured:
        for seed, chosen in product(seeds, (0.0, weight)):
            trials.append(_trial(recipe, out, seed, chosen, overrides))
    figures: dict[str, Json] = {
        "results": [row for trial in trials for row in _rows(trial)],
        "goals": {FEWER_STEPS.name: judged(trials)},
    }
    seconds = sum(trial.seconds for trial in trials)
    return envelope("hints", seconds, figures, interrupted=measured.interrupted)


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people: every tenth step."""
    columns = ("seed", "contestant", "step", "malformed", "malformed_stderr", "passed", "passed_stderr")
    steps = [row for row in results_of(result) if int(str(row["step"])) % 10 == 1]
    return page(result, draw(heading(result), steps, columns))


def gone_after(shares: Sequence[float]) -> int | None:
    """Number of steps before the first ``LASTING`` ones whose mean is below ``GONE``."""
    starts = range(len(shares) - LASTING + 1)
    return next((start for start in starts if statistics.fmean(shares[start : start + LASTING]) < GONE), None)


def _trial(recipe: Path, out: Path, seed: int, weight: float, overrides: Sequence[str]) -> Trial:
    """Run, continue, or read the stored result."""
    common = [*HABIT, *COST, *overrides, f"seed={seed}"]
    distilled = [f"hints.weight={weight}", "hints.tools=false", f"hints.rules=[{RULE}]"] if weight else []
    config = load_recipe(recipe, [*common, *distilled])
    path = out / f"s{seed}-hints-{weight:g}"
    start = out / f"s{seed}-start"
    folder = finished_run(path, lambda: begin_from(midtrained(start, load_recipe(recipe, common)), path, config))
    return _read(folder, config, seed, weight)


def _read(folder: RunFolder, config: RunConfig, seed: int, weight: float) -> Trial:
    report = report_of(folder, config)
    with open_ledger(folder) as ledger:
        batches = _batches(ledger.groups(TRAIN, [GroupState.CONSUMED]), config.rollouts.groups_per_step)
        steps = tuple(step_figures(batch) for batch in islice(batches, config.trainer.steps))
    return Trial(
        seed=seed,
        weight=weight,
        steps=steps,
        before=number_at(report, "heldout.pass_before") or 0.0,
        after=number_at(report, "heldout.pass_after") or 0.0,
        seconds=number_at(report, "seconds.total") or 0.0,
    )


def _batches(groups: Iterator[Group], size: int) -> Iterator[list[Group]]:
    """The groups of one step after the other: they are trained on in the order in which they were admitted."""
    while batch := list(islice(groups, size)):
        yield batch


def step_figures(groups: Sequence[Group]) -> StepFigures:
    """Statistics of some groups' rollouts; errors are over groups, since the rollouts of a group have one task."""
    malformed = [_malformed(group.rollouts) for group in groups]
    passed = [statistics.fmean(rollout.reward or 0.0 for rollout in group.rollouts) for group in groups]
    return StepFigures(
        malformed=statistics.fmean(malformed),
        malformed_stderr=_stderr(malformed),
        passed=statistics.fmean(passed),
        passed_stderr=_stderr(passed),
    )


def _malformed(rollouts: Sequence[Rollout]) -> float:
    """Share of all calls."""
    calls = sum(sum(rollout.counts.values()) for rollout in rollouts)
    return sum(rollout.counts.get("malformed", 0) for rollout in rollouts) / max(1, calls)


def _stderr(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _rows(trial: Trial) -> Iterator[dict[str, Json]]:
    for number, step in enumerate(trial.steps, 1):
        yield {
            "contestant": trial.contestant,
            "case": f"seed {trial.seed}",
            "seed": trial.seed,
            "weight": trial.weight,
            "step": number,
            "malformed": round(step.malformed, 4),
            "malformed_stderr": round(step.malformed_stderr, 4),
            "passed": round(step.passed, 4),
            "passed_stderr": round(step.passed_stderr, 4),
        }


def judged(trials: Sequence[Trial]) -> dict[str, Json]:
    """Steps until the habit is gone, with hints over without, summed over seeds; a run in which it never was counts all
    of its steps, which makes the ratio an upper bound where only the reward alone did not get there.
    """
    taken = {name: [trial for trial in trials if trial.contestant == name] for name in (ALONE, HINTED)}
    steps = {name: [_steps(trial) for trial in chosen] for name, chosen in taken.items()}
    never = {name: sum(trial.steps_until_gone is None for trial in chosen) for name, chosen in taken.items()}
    ratio = sum(steps[HINTED]) / max(1, sum(steps[ALONE])) if not never[HINTED] else None
    judged = FEWER_STEPS.judge(ratio, "with hints the habit was not gone by the end")
    judged["met"] = ratio is not None and ratio < FEWER_STEPS.goal
    return judged | {
        "steps": _listed(steps),
        "never_gone": dict(never),
        "passed_more": _over_seeds([t.after - a.after for a, t in zip(taken[ALONE], taken[HINTED], strict=True)]),
        "passed_in_the_end": _listed({name: [trial.after for trial in chosen] for name, chosen in taken.items()}),
    }


def _over_seeds(values: Sequence[float]) -> Json:
    """Mean and the ends of its interval; without one of fewer than two seeds."""
    if len(values) < 2:
        return None
    mean = mean_over_seeds(values)
    interval: list[Json] = [round(mean.low, 4), round(mean.high, 4)]
    return {"value": round(mean.value, 4), "interval": interval, "method": mean.method}


def _steps(trial: Trial) -> int:
    until_gone = trial.steps_until_gone
    return len(trial.steps) if until_gone is None else until_gone


def _listed(figures: Mapping[str, Sequence[float]]) -> dict[str, Json]:
    return {name: [round(value, 4) for value in values] for name, values in figures.items()}
