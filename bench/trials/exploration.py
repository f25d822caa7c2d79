"""`bench exploration`: which skills does RL find, by how rarely they were imitated, and what helps it?

    condition × rate ──▶ mid-training, once a seed ──┬──▶ RL                              ┐
                         pass@8 of the start         ├──▶ RL, credit by shared prefixes   ├─ pass rates, calls by turn
                                                     └──▶ RL, groups sampled again        ┘

Each condition takes one skill without which hardly anything is passed, and the agent of mid-training has it in so few
of its sessions as the rate says: it edits again as the failing test says, looks for a file before it reads, or writes a
call again as the error says. All else that the task takes it does every time, so that the skill alone is to be found
out. Run folders are kept, and a call goes on where an earlier one stopped.
"""

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from types import MappingProxyType

from bench.loop.runs import begin_from
from bench.options import add_trials, names, trial_arguments
from bench.report import envelope, heading, so_far
from bench.tables import draw, page, results_of
from bench.trials.trials import finished_run, midtrained, report_of
from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.dashboard.calls import in_words, reported_turns
from etude.dashboard.evaluation import Measure
from etude.dashboard.evaluation import figures as evaluation_figures
from etude.dashboard.formatting import number_at
from etude.dashboard.statistics import mean_over_seeds
from etude.errors import UserError
from etude.run.evaluate import EvalRequest, evaluate
from etude.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A skill that is to be found out."""

    keys: tuple[str, ...]
    """Recipe changes: the task, and the skills that the imitated agent always uses."""
    rate: str
    """Key of the probability with which the imitated agent has the skill."""


CONDITIONS: Mapping[str, Condition] = MappingProxyType(
    {
        "test": Condition(
            keys=(
                'tasks.options.kinds=["arith", "slice", "comp", "range"]',  # a label stands beside a returned result
                "tasks.options.hidden_label=true",
                "tasks.options.read_first=1.0",
                "tasks.options.test_after=1.0",
                "tasks.options.retry=1.0",
            ),
            rate="tasks.options.follow_test",
        ),
        "search": Condition(
            keys=("tasks.options.files=4", "harness.options.find=true", "tasks.options.read_first=1.0"),
            rate="tasks.options.search",
        ),
        "error": Condition(
            keys=("tasks.options.bad_call=1.0", "harness.options.usage=true", "tasks.options.read_first=1.0"),
            rate="tasks.options.correct_call",
        ),
    }
)
"""Condition → source of the missing information: the failing test, a search, the error of a call."""
RATES = (0.05, 0.02, 0.01, 0.0)
"""Shares of sessions in which the skill is imitated, where it applies."""
AIDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "none": (),
        "shared_prefix": ("credit.kind=shared_prefix", "credit.options.branches=4"),
        "resampling": ("rollouts.max_resamples=16",),
    }
)
"""Aid → what it changes of RL. Tasks without end cannot be chosen by their difficulty; groups without a signal can be
sampled again.
"""
TRIES, TRIED_TASKS = 8, 64
"""Tries of the start for pass@8, and held-out tasks of them."""
WINDOW = 5
"""Steps over which rewards are averaged."""
MIN_GAIN = 0.05
"""Rise of the mean reward that counts as one."""
MEASURED = ("pass_before", "pass_after", "greedy_before", "greedy_after")
"""Figures of a report's held-out section, each with its mean and interval over seeds in a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A condition, a rate and an aid, run on every seed."""

    condition: str
    rate: float
    aid: str

    def to_json(self) -> dict[str, Json]:
        """The cell's own columns of a row."""
        return {"contestant": self.aid, "case": self.condition, "rate": self.rate}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A cell on one seed."""

    cell: Cell
    seed: int
    report: Mapping[str, Json]
    start_pass_at_8: float

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step's rollouts."""
        curve = self.report["curve"]
        assert isinstance(curve, list)
        return [number_at(row, "reward_mean") or 0.0 for row in curve if isinstance(row, dict)]

    def rate(self, name: str) -> float:
        """A pass rate of ``MEASURED``."""
        return number_at(self.report, f"heldout.{name}") or 0.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_trials(parser, "exploration", "quickstart")
    parser.add_argument("--conditions", metavar="A,B,…", help=f"only these of {', '.join(CONDITIONS)}")
    parser.add_argument("--rates", metavar="A,B,…", help=f"of imitation (default: {', '.join(map(str, RATES))})")
    parser.add_argument("--aids", metavar="A,B,…", help=f"only these of {', '.join(AIDS)}")
    parser.add_argument("--steps", type=int, help="of RL (default: the recipe's)")
    parser.add_argument("--tokens", type=int, help="of mid-training (default: the recipe's)")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    recipe, out, seeds, overrides = trial_arguments(options)
    lengths = {"trainer.steps": options.steps, "midtrain.tokens": options.tokens}
    keys = [*overrides, *(f"{key}={value}" for key, value in lengths.items() if value is not None)]
    cells = chosen_cells(names(options.conditions), names(options.rates), names(options.aids))
    return bench_exploration(recipe, out, seeds=seeds, cells=cells, overrides=keys)


def chosen_cells(
    conditions: Sequence[str] | None = None, rates: Sequence[str] | None = None, aids: Sequence[str] | None = None
) -> list[Cell]:
    """Cells of some conditions, rates and aids, or of all: those without an aid first.

    Raises :class:`~etude.errors.UserError` for one that there is not.
    """
    for option, given, there_are in (("conditions", conditions, CONDITIONS), ("aids", aids, AIDS)):
        for name in given or ():
            if name not in there_are:
                raise UserError(f"bench exploration: --{option} {name}: expected some of {', '.join(there_are)}")
    shares = RATES if rates is None else [_share(text) for text in rates]
    return [
        Cell(condition=condition, rate=rate, aid=aid)
        for aid, condition, rate in product(aids or AIDS, conditions or CONDITIONS, shares)
    ]


def bench_exploration(
    recipe: Path, out: Path, *, seeds: Sequence[int], cells: Sequence[Cell], overrides: Sequence[str] = ()
) -> dict[str, Json]:
    """Run the remaining trials in ``out``, seed by seed, and return the bench object."""
    trials: list[Trial] = []
    with so_far() as measured:
        for seed, cell in product(seeds, cells):
            trials.append(_trial(recipe, out, seed, cell, overrides))
    seconds = sum(number_at(trial.report, "seconds.total") or 0.0 for trial in trials)
    return envelope("exploration", seconds, figures(trials), interrupted=measured.interrupted)


def figures(trials: Sequence[Trial]) -> dict[str, Json]:
    """A row for each trial, and the means over seeds for each cell; nothing is judged: failures to find a skill count
    too.
    """
    by_cell = sorted(trials, key=lambda trial: str(trial.cell))
    cells = {cell: list(members) for cell, members in groupby(by_cell, key=lambda trial: trial.cell)}
    in_order = dict.fromkeys(trial.cell for trial in trials)
    return {
        "results": [_row(trial) for trial in trials],
        "cells": [cell.to_json() | _over_seeds(cells[cell]) for cell in in_order],
        "goals": {},
    }


def table(result: dict[str, Json]) -> str:
    """The bench object as tables for people: cells, then the calls of each trial's sampled sessions."""
    columns = ("rate", "contestant", "seeds", "pass_at_8", *MEASURED, "pass_interval", "greedy_interval")
    cells = draw(heading(result), results_of(result, "cells"), (*columns, "half_at_step"), under="case")
    notes = [
        f"{row['case']} {row['rate']}, {row['contestant']}, seed {row['seed']}, {when}: {_joined(row[f'calls_{when}'])}"
        for row in results_of(result)
        for when in ("before", "after")
    ]
    return page(result, cells, notes=notes)


def trial_config(recipe: Path, seed: int, cell: Cell, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe of a trial."""
    condition = CONDITIONS[cell.condition]
    keys = [*condition.keys, f"{condition.rate}={cell.rate}", *AIDS[cell.aid]]
    return load_recipe(recipe, [*keys, *overrides, f"seed={seed}"])


def half_at(rewards: Sequence[float]) -> int | None:
    """The first step at which the mean reward of ``WINDOW`` steps has gained half of what it gains in the end; ``None``
    where that is less than ``MIN_GAIN``, which chance may give.
    """
    smooth = [statistics.fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    if not smooth or smooth[-1] - smooth[0] < MIN_GAIN:
        return None
    return next(place + WINDOW for place, mean in enumerate(smooth) if mean >= (smooth[0] + smooth[-1]) / 2)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"bench exploration: --rates {text}: expected numbers from 0 to 1, such as 0.05,0.01")
    return share


def _trial(recipe: Path, out: Path, seed: int, cell: Cell, overrides: Sequence[str]) -> Trial:
    """Run, continue, or read the stored result."""
    config = trial_config(recipe, seed, cell, overrides)
    unaided = Cell(condition=cell.condition, rate=cell.rate, aid="none")
    name = f"s{seed}-{cell.condition}-{cell.rate:g}"
    start = midtrained(out / f"{name}-start", trial_config(recipe, seed, unaided, overrides))
    request = EvalRequest(version=0, tasks=min(TRIED_TASKS, config.eval.tasks), passes=TRIES, greedy=False)
    tried = evaluation_figures(evaluate(start, request), Measure(pass_at=config.eval.pass_at, ks=(TRIES,)))
    path = out / f"{name}-{cell.aid}"
    folder = finished_run(path, lambda: begin_from(start, path, config))
    return Trial(
        cell=cell,
        seed=seed,
        report=report_of(folder, config),
        start_pass_at_8=number_at(tried, f"sampled.pass.{TRIES}.value") or 0.0,
    )


def _row(trial: Trial) -> dict[str, Json]:
    heldout = trial.report["heldout"]
    assert isinstance(heldout, dict)
    return {
        **trial.cell.to_json(),
        "seed": trial.seed,
        "pass_at_8": round(trial.start_pass_at_8, 4),
        **{name: trial.rate(name) for name in MEASURED},
        "gain_interval": heldout.get("interval"),
        "greedy_gain_interval": heldout.get("greedy_interval"),
        "half_at_step": half_at(trial.rewards),
        **{f"calls_{label}": list(_calls(trial.report, label)) for label in ("before", "after")},
        "rewards": [round(reward, 4) for reward in trial.rewards],
        "rl_s": number_at(trial.report, "seconds.rl"),
    }


def _calls(report: Mapping[str, Json], label: str) -> Iterator[str]:
    """The calls of each turn of sampled sessions, in words."""
    for number, turn in enumerate(reported_turns(report, label), 1):
        yield f"{number}: {in_words(turn)}"


def _over_seeds(trials: Sequence[Trial]) -> dict[str, Json]:
    """Means over seeds; intervals of the ends by Student's t, of two seeds or more."""
    halves = [half for trial in trials if (half := half_at(trial.rewards)) is not None]
    return {
        "seeds": len(trials),
        "pass_at_8": round(statistics.fmean(trial.start_pass_at_8 for trial in trials), 4),
        **{name: round(statistics.fmean(trial.rate(name) for trial in trials), 4) for name in MEASURED},
        "pass_interval": _interval([trial.rate("pass_after") for trial in trials]),
        "greedy_interval": _interval([trial.rate("greedy_after") for trial in trials]),
        "half_at_step": statistics.median(halves) if halves else None,
    }


def _joined(value: Json) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else ""


def _interval(values: Sequence[float]) -> Json:
    if len(values) < 2:
        return None
    mean = mean_over_seeds(values)
    return [round(mean.low, 4), round(mean.high, 4)]
