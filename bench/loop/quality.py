"""`python -m bench loop --quality`: does RL learn as much from rollouts that are up to four versions old?

For each seed one model is mid-trained as the recipe's; from that very model RL runs once with ``max_staleness`` 0 and
once with 4, all else equal, and both ends are measured on the same held-out tasks:

    seed ──▶ mid-training ──┬──▶ staleness 0 ──▶ RL ──▶ held-out pass rate  ┐
                            └──▶ staleness 4 ──▶ RL ──▶ held-out pass rate  ┴─ difference, task by task

RL is chaotic: two runs of one seed differ by several points. So the difference comes with two standard errors, over
the templates of the tasks of these very models and over seeds, and the goal is judged by the far end of the interval
over seeds. All seeds have the same held-out tasks: that interval says nothing of other ones. Run folders are kept, and
a call goes on where an earlier one stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.loop.runs import begin_from
from bench.report import Goal, envelope, so_far
from bench.tables import results_page
from bench.trials.quantised import WAYS, TaskRewards, mean_reward, paired, task_rewards
from bench.trials.trials import finished_run, midtrained, report_of
from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.dashboard.formatting import number_at
from etude.run.folder import RunFolder
from etude.run.stores import open_ledger
from etude.types import Json

QUALITY = "loop-quality"
"""Name in the bench object."""
FRESH, STALE = 0, 4
"""Weight versions that a trained token may be old."""
SHORTFALL = Goal(
    "staleness_shortfall",
    "at most",
    0.02,
    "Sampled pass rate lost by training on rollouts of up to four versions ago, as a share of the tasks.",
)
_COLUMNS = ("seed", "max_staleness", "staleness_mean", "sampled", "greedy", "sampled_minus_fresh", "rl_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run: a seed, a staleness bound, and the results."""

    seed: int
    max_staleness: int
    rewards: Mapping[str, TaskRewards]
    """Way → template and reward of each held-out task after RL."""
    staleness_mean: float
    rl_s: float
    seconds: float
    """Seconds of RL and both evaluations."""


def bench_quality(recipe: Path, out: Path, *, seeds: Sequence[int], overrides: Sequence[str] = ()) -> dict[str, Json]:
    """Run the remaining trials in ``out``, and return the bench object."""
    trials: list[Trial] = []
    with so_far() as measured:
        for seed, bound in product(seeds, (FRESH, STALE)):
            trials.append(_trial(recipe, out, seed, bound, overrides))
    seconds = sum(trial.seconds for trial in trials)
    return envelope(QUALITY, seconds, figures(trials), interrupted=measured.interrupted)


def figures(trials: Sequence[Trial]) -> dict[str, Json]:
    """Rows, and the goal over all seeds."""
    fresh = {trial.seed: trial for trial in trials if trial.max_staleness == FRESH}
    stale = [trial for trial in trials if trial.max_staleness == STALE]
    pairs = [(fresh[trial.seed].rewards["sampled"], trial.rewards["sampled"]) for trial in stale]
    judged = SHORTFALL.judge_seeds([paired([pair])[0] for pair in pairs])
    judged["stderr_templates"] = round(paired(pairs)[1], 4) if pairs else None
    return {
        "results": [_row(trial, fresh[trial.seed]) for trial in trials],
        "goals": {SHORTFALL.name: judged},
    }


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people."""
    return results_page(result, _COLUMNS)


def _trial(recipe: Path, out: Path, seed: int, bound: int, overrides: Sequence[str]) -> Trial:
    """Run, continue, or read the stored result."""
    config = load_recipe(recipe, [*overrides, f"seed={seed}", f"rollouts.max_staleness={bound}"])
    path = out / f"s{seed}-staleness{bound}"
    start = out / f"s{seed}-start"
    folder = finished_run(path, lambda: begin_from(midtrained(start, config), path, config))
    return _read(folder, config, seed, bound)


def _read(folder: RunFolder, config: RunConfig, seed: int, bound: int) -> Trial:
    report = report_of(folder, config)
    with open_ledger(folder) as ledger:
        rewards = {way: task_rewards(ledger, f"after-{way}") for way in WAYS}
    return Trial(
        seed=seed,
        max_staleness=bound,
        rewards=rewards,
        staleness_mean=number_at(report, "staleness.mean") or 0.0,
        rl_s=number_at(report, "seconds.rl") or 0.0,
        seconds=number_at(report, "seconds.total") or 0.0,
    )


def _row(trial: Trial, fresh: Trial) -> dict[str, Json]:
    difference, error = paired([(trial.rewards["sampled"], fresh.rewards["sampled"])])
    return {
        "contestant": f"staleness {trial.max_staleness}",
        "case": f"seed {trial.seed}",
        "seed": trial.seed,
        "max_staleness": trial.max_staleness,
        "staleness_mean": trial.staleness_mean,
        "tasks": len(trial.rewards["sampled"]),
        **{way: round(mean_reward(trial.rewards[way]), 4) for way in WAYS},
        "sampled_minus_fresh": round(difference, 4),
        "sampled_minus_fresh_stderr": round(error, 4),
        "rl_s": trial.rl_s,
    }
