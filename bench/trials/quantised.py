"""`bench quantised`: does RL learn as much in FP8, MXFP8 and NVFP4 as in bfloat16?

For each seed one model is mid-trained as the recipe's; from that very model RL runs once per format of its experts,
all else equal. Engine, trainer and published weights are in that format throughout, so what is compared is learning,
not conversion. Every run is measured on the same held-out tasks:

    seed ──▶ mid-training ──┬──▶ bfloat16 ──▶ RL ──▶ held-out pass rate   ┐
                            ├──▶ fp8      ──▶ RL ──▶ held-out pass rate   ├─ differences, task by task
                            └──▶ nvfp4    ──▶ RL ──▶ held-out pass rate   ┘

RL is chaotic: two runs of one seed differ by several points although their numbers agree to the last bit within each.
So a difference comes with two standard errors: over the tasks of these very models, and over seeds.
"""

import argparse
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from bench.options import add_trials, names, trial_arguments
from bench.report import Goal, envelope, so_far
from bench.tables import results_page
from bench.trials.trials import finished_run, midtrained, report_of
from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.dashboard.formatting import number_at
from etude.dashboard.statistics import difference_of
from etude.errors import UserError
from etude.ledger.ledger import Ledger
from etude.models.checkpoint import load_checkpoint, load_state
from etude.models.decoder import Decoder
from etude.run.folder import RunFolder
from etude.run.numerics import published_state
from etude.run.publishing import WeightPublishing
from etude.run.stores import open_ledger
from etude.run.weight_log import open_log
from etude.telemetry.log import EventLog
from etude.types import Json

REFERENCE = "plain"
"""The format that others are compared with: experts in bfloat16 like all other weights."""
FORMATS = ("fp8", "mxfp8", "nvfp4")
SHORTFALLS: Mapping[str, Goal] = MappingProxyType(
    {
        experts: Goal(
            f"{experts}_shortfall",
            "at most",
            0.02,
            f"Gain in sampled pass rate by RL that is lost with experts in {experts.upper()}, as a share of the tasks.",
        )
        for experts in FORMATS
    }
)
"""Format → its goal."""
WAYS = ("sampled", "greedy")
TaskRewards: TypeAlias = Mapping[str, tuple[str, float]]
"""Id of a held-out task → its template and its reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run: a seed, a format, and the results."""

    seed: int
    experts: str
    before: Mapping[str, float]
    """Way → pass rate of the start."""
    rewards: Mapping[str, TaskRewards]
    """Way → template and reward of each held-out task after RL."""
    k3: float
    """Mean mismatch over the steps."""
    seconds: float
    """Seconds of RL and both evaluations."""

    def passed(self, way: str) -> float:
        """The pass rate after RL."""
        return mean_reward(self.rewards[way])

    def gain(self, way: str) -> float:
        """Gain from RL."""
        return self.passed(way) - self.before[way]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_trials(parser, "quantised", "quickstart")
    parser.add_argument("--formats", metavar="A,B,…", help="only these (default: all)")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    recipe, out, seeds, overrides = trial_arguments(options)
    formats = names(options.formats) or FORMATS
    return bench_quantised(recipe, out, seeds=seeds, formats=formats, overrides=overrides)


def bench_quantised(
    recipe: Path, out: Path, *, seeds: Sequence[int], formats: Sequence[str] = FORMATS, overrides: Sequence[str] = ()
) -> dict[str, Json]:
    """Run every seed in every format, the reference first, and return the bench object.

    Run folders are stored in ``out``; finished runs are read, unfinished ones are continued.
    """
    if unknown := sorted(set(formats) - set(FORMATS)):
        raise UserError(f"bench quantised: no format {unknown[0]!r}; there are {', '.join(FORMATS)}")
    trials: list[Trial] = []
    with so_far() as measured:
        for seed, experts in product(seeds, (REFERENCE, *formats)):
            trials.append(_trial(recipe, out, seed, experts, overrides))
    figures: dict[str, Json] = {
        "results": [_row(trial, _reference(trials, trial.seed)) for trial in trials],
        "goals": {SHORTFALLS[experts].name: _judged(trials, experts) for experts in formats},
    }
    seconds = sum(trial.seconds for trial in trials)
    return envelope("quantised", seconds, figures, interrupted=measured.interrupted)


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people."""
    columns = ("seed", "experts", "sampled_before", "sampled", "sampled_gain", "greedy", "greedy_gain", "k3")
    return results_page(result, columns)


def _trial(recipe: Path, out: Path, seed: int, experts: str, overrides: Sequence[str]) -> Trial:
    """Run, continue, or read the stored result."""
    settings = [*overrides, f"seed={seed}", "numerics.dtype=bfloat16", f"numerics.experts={experts}"]
    config = load_recipe(recipe, settings)
    path = out / f"s{seed}-{experts}"
    folder = finished_run(path, lambda: _prepared(path, config, midtrained(out / f"s{seed}-start", config)))
    return _read(folder, config, seed, experts)


def _prepared(path: Path, config: RunConfig, start: RunFolder) -> RunFolder:
    """A new run whose version 0 is the mid-trained model in the format of ``config``."""
    partial = path.with_name(f".{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    folder = RunFolder.create(partial, config)
    shutil.copytree(start.model, folder.model)
    spec, state = load_checkpoint(folder.model)
    model = Decoder(spec)
    load_state(model, state)
    log = open_log(folder)
    with EventLog(folder.events, "midtrain") as events, WeightPublishing(log, config.name, events) as publishing:
        publishing.start(published_state(model, config.numerics), 0)
        publishing.land()
    partial.rename(path)
    return RunFolder.open(path)


def _read(folder: RunFolder, config: RunConfig, seed: int, experts: str) -> Trial:
    report = report_of(folder, config)
    ledger = open_ledger(folder)
    try:
        rewards = {way: task_rewards(ledger, f"after-{way}") for way in WAYS}
    finally:
        ledger.close()
    return Trial(
        seed=seed,
        experts=experts,
        before={
            "sampled": number_at(report, "heldout.pass_before") or 0.0,
            "greedy": number_at(report, "heldout.greedy_before") or 0.0,
        },
        rewards=rewards,
        k3=number_at(report, "mismatch.k3") or 0.0,
        seconds=number_at(report, "seconds.total") or 0.0,
    )


def _reference(trials: Sequence[Trial], seed: int) -> Trial:
    return next(trial for trial in trials if (trial.seed, trial.experts) == (seed, REFERENCE))


def _row(trial: Trial, reference: Trial) -> dict[str, Json]:
    row: dict[str, Json] = {
        "contestant": "bfloat16" if trial is reference else trial.experts,
        "case": f"seed {trial.seed}",
        "seed": trial.seed,
        "experts": trial.experts,
        "tasks": len(trial.rewards["sampled"]),
        "k3": trial.k3,
    }
    for way in WAYS:
        difference, error = paired([(trial.rewards[way], reference.rewards[way])])
        row |= {
            f"{way}_before": round(trial.before[way], 4),
            way: round(trial.passed(way), 4),
            f"{way}_gain": round(trial.gain(way), 4),
            f"{way}_minus_bf16": round(difference, 4),
            f"{way}_minus_bf16_stderr": round(error, 4),
        }
    return row


def _judged(trials: Sequence[Trial], experts: str) -> dict[str, Json]:
    """Mean difference of the reference's and a format's gain in sampled pass rate; negative: the format gains more.

    The gain is what RL teaches: rounding a model that was mid-trained in float32 costs some points before RL begins.
    The final pass rate is printed beside it.
    """
    pairs = [(trial, _reference(trials, trial.seed)) for trial in trials if trial.experts == experts]
    end, error = paired([(other.rewards["sampled"], trial.rewards["sampled"]) for trial, other in pairs])
    gains = [other.gain("sampled") - trial.gain("sampled") for trial, other in pairs]
    return SHORTFALLS[experts].judge_seeds(gains) | {
        "in_the_end": round(end, 4),
        "in_the_end_stderr_templates": round(error, 4),
    }


def task_rewards(ledger: Ledger, purpose: str) -> TaskRewards:
    """The reward of each task of an evaluation that has one."""
    groups = [group for group in ledger.groups(purpose) if group.rollouts]
    return {
        group.task.task_id: (group.task.template or group.task.task_id, group.rollouts[0].reward or 0.0)
        for group in groups
    }


def mean_reward(rewards: TaskRewards) -> float:
    """Over tasks."""
    return statistics.fmean(reward for _, reward in rewards.values())


def paired(seeds: Sequence[tuple[TaskRewards, TaskRewards]]) -> tuple[float, float]:
    """The mean difference, first − second, over the tasks that all have, and its standard error over templates.

    Seeds are measured on the same held-out tasks, so they are averaged task by task first: more of them are no further
    tasks. Raises :class:`~etude.errors.UserError` where no task is in all of them.
    """
    runs = [run for pair in seeds for run in pair]
    common = [task for task in runs[0] if all(task in run for run in runs)]
    if not common:
        raise UserError("the runs were measured on different tasks: not comparable")
    first, second = ([statistics.fmean(pair[place][task][1] for pair in seeds) for task in common] for place in (0, 1))
    difference = difference_of(second, first, [runs[0][task][0] for task in common])
    return difference.value, difference.stderr
