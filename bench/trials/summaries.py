"""`bench summaries`: does an agent learn what to keep, and what is it that it learns from?

The recipe's own arm, and three that take something away from it, each from the mid-training of its own harness:

    trained      the recipe: summaries are tokens like any other, and share the advantage of their rollout
    untrained    their tokens are context: the agent may only learn to work with the summaries that it writes anyway
    truncated    no summaries: a full context begins anew with the task and the last result alone
    unlimited    no need for any: a window in which the whole material has its place

Each is measured on the same held-out tasks before and after RL: how many are solved, and of the facts that the answer
takes and that had been seen by then, how many stood in a summary (recall). Run folders are kept, and a call goes on
where an earlier one stopped.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bench.loop.runs import begin_from
from bench.options import add_trials, names, trial_arguments
from bench.report import Goal, envelope, so_far
from bench.tables import results_page
from bench.trials.trials import finished_run, midtrained, report_of
from etude.config.loading import load_recipe, parse_config
from etude.config.recipe import RunConfig
from etude.config.rollouts import CodingOptions
from etude.config.tasks import LookupOptions
from etude.dashboard.formatting import number_at
from etude.errors import UserError
from etude.run.folder import RunFolder
from etude.types import Json

TRAINED, UNTRAINED, TRUNCATED, UNLIMITED = ARMS = ("trained", "untrained", "truncated", "unlimited")
"""The compared arms."""
START_OF = {TRAINED: TRAINED, UNTRAINED: TRAINED, TRUNCATED: TRUNCATED, UNLIMITED: UNLIMITED}
"""Arm → whose mid-training it begins from: what it imitates depends on the harness, and not on how RL learns."""
OF_SUMMARIES = ("summary_request", "max_tokens_per_summary")
OF_RESTARTS = ("summary_at_tokens", "max_summaries", *OF_SUMMARIES)
"""Keys of ``[harness.options]`` that would have no effect in an arm without them."""
LINE_TOKENS = 8
"""Tokens of a line of a page, including its number, its end and its share of the marks around a message; usually six.
"""
LIFT = Goal("lift", "at least", 0.20, "Gain in held-out pass rate by RL with summaries; the worst seed.")
RECALL = Goal(
    "recall_gain", "at least", 0.10, "Gain by RL in the share of needed facts that the summaries keep; the worst seed."
)
_MEASURED = ("pass_before", "pass_after", "stderr", "greedy_before", "greedy_after", "greedy_stderr", "recall_before",
             "recall_after")  # fmt: skip
_COLUMNS = ("contestant", "seed", *_MEASURED, "rl_s", "total_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run: an arm, a seed, and the results."""

    arm: str
    seed: int
    heldout: Mapping[str, float | None]
    """From the run's report: the pass rates of ``_MEASURED`` before and after, sampled at temperature 1 and greedily,
    the standard errors of their differences, and recall, ``None`` if there was no summary that could have kept a
    fact."""
    rl_s: float
    seconds: float
    """All of it, but for mid-training that another arm did."""

    def gain(self, measure: str) -> float | None:
        """Increase of ``pass``, ``greedy`` or ``recall`` by RL."""
        before, after = self.heldout[f"{measure}_before"], self.heldout[f"{measure}_after"]
        return None if before is None or after is None else after - before


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_trials(parser, "summaries", "self-summary")
    parser.add_argument("--contestants", metavar="A,B,…", help="only these arms (default: all)")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    recipe, out, seeds, overrides = trial_arguments(options)
    arms = names(options.contestants) or ARMS
    return bench_summaries(recipe, out, seeds=seeds, arms=arms, overrides=overrides)


def bench_summaries(
    recipe: Path, out: Path, *, seeds: Sequence[int], arms: Sequence[str] = ARMS, overrides: Sequence[str] = ()
) -> dict[str, Json]:
    """Run the remaining trials in ``out``, and return the bench object. Raises :class:`~etude.errors.UserError` for an
    unknown arm.
    """
    for arm in arms:
        if arm not in ARMS:
            raise UserError(f"there is no contestant {arm!r}: expected some of {', '.join(ARMS)}")
    trials: list[Trial] = []
    with so_far() as measured:
        for seed, arm in product(seeds, arms):
            trials.append(_trial(recipe, out, seed, arm, overrides))
    seconds = sum(trial.seconds for trial in trials)
    return envelope("summaries", seconds, figures(trials), interrupted=measured.interrupted)


def arm_config(recipe: RunConfig, arm: str) -> RunConfig:
    """Recipe changes of an arm. Raises :class:`~etude.errors.ConfigError` if they do not fit the recipe."""
    tree: dict[str, Any] = recipe.model_dump(mode="json")
    harness = tree["harness"]["options"]
    match arm:
        case "untrained":
            tree["credit"]["summaries"] = "mask"
        case "truncated":
            harness["context"] = "truncate"
            tree["harness"]["options"] = _without(harness, OF_SUMMARIES)
        case "unlimited":
            harness["context"] = "grow"
            tree["harness"]["options"] = _without(harness, OF_RESTARTS)
            tree["engine"]["max_length"] = unlimited_length(recipe)
    return parse_config(tree, source=f"the arm {arm!r}")


def unlimited_length(recipe: RunConfig) -> int:
    """Tokens of a window that is never full: the task, every page and where it points to, and all that is sampled."""
    options, harness = recipe.tasks.options, recipe.harness.options
    assert isinstance(options, LookupOptions) and isinstance(harness, CodingOptions), "it is one of lookup tasks"
    page = LINE_TOKENS * (options.page_facts + 1) + harness.max_tokens_per_turn
    return LINE_TOKENS + (options.pages + 1) * page


def figures(trials: Sequence[Trial]) -> dict[str, Json]:
    """Rows, and the goals for the worst seed of the recipe's own arm."""
    own = [trial for trial in trials if trial.arm == TRAINED]
    lifts, gains = (
        {f"seed {trial.seed}": gain for trial in own if (gain := trial.gain(measure)) is not None}
        for measure in ("pass", "recall")
    )
    return {
        "results": [_row(trial) for trial in trials],
        "goals": {LIFT.name: LIFT.judge_worst(lifts), RECALL.name: RECALL.judge_worst(gains)},
    }


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people."""
    return results_page(result, _COLUMNS)


def _without(section: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}


def _trial(recipe: Path, out: Path, seed: int, arm: str, overrides: Sequence[str]) -> Trial:
    """Run, continue, or read the stored result."""
    config = arm_config(load_recipe(recipe, [*overrides, f"seed={seed}"]), arm)
    path = out / f"s{seed}-{arm}"
    start = out / f"s{seed}-{START_OF[arm]}-start"
    folder = finished_run(path, lambda: begin_from(midtrained(start, config), path, config))
    return _read(folder, config, seed, arm)


def _read(folder: RunFolder, config: RunConfig, seed: int, arm: str) -> Trial:
    report = report_of(folder, config)
    return Trial(
        arm=arm,
        seed=seed,
        heldout={name: number_at(report, f"heldout.{name}") for name in _MEASURED},
        rl_s=number_at(report, "seconds.rl") or 0.0,
        seconds=number_at(report, "seconds.total") or 0.0,
    )


def _row(trial: Trial) -> dict[str, Json]:
    row: dict[str, Json] = {"contestant": trial.arm, "case": f"seed {trial.seed}", "seed": trial.seed}
    return row | dict(trial.heldout) | {"rl_s": trial.rl_s, "total_s": trial.seconds}
