"""`bench science`: the ablations that papers report, each on several seeds, in one small laboratory.

    seed ──▶ mid-training ──┬──▶ arm ──▶ RL ──▶ held-out pass rate ┐
                            ├──▶ arm ──▶ RL ──▶ held-out pass rate ├─ differences, seed by seed
                            └──▶ arm ──▶ RL ──▶ held-out pass rate ┘

    python -m bench science --name staleness --json > bench/science/results/staleness.json
    python -m bench.science.page                      # docs/science.md and its plots, out of all results

A trial is one arm on one seed, half a minute of :mod:`bench.science.laboratory`, and kept in a file that is named by
its recipes: a call goes on where an earlier one stopped, and arms that several ablations share are trained once. With
other code, have another ``--out``.
Every claim of a paper is judged by the interval of a paired difference over seeds: it agrees where the interval is on
the published side, contradicts where it is on the other, and else shows neither.
"""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.numerics.model import CACHE
from bench.report import Goal, envelope, heading, so_far
from bench.science.ablations import ABLATIONS, ALIKE, FRESH, JUDGED, Arm, Claim, Figure
from bench.science.laboratory import Measurement, TrialCurve, learn
from bench.science.starts import prepared_start
from bench.starts import digest_of
from bench.tables import draw, page, results_of
from etude.config.loading import load_recipe
from etude.dashboard.statistics import mean_over_seeds
from etude.errors import UserError
from etude.types import Json

RECIPE = Path(__file__).with_name("run.toml")
SHORTFALL = Goal(
    "staleness_shortfall",
    "at most",
    ALIKE,
    "Sampled pass rate lost by training on rollouts of up to four versions ago, as a share of the tasks.",
)
BROKEN = 0.5
"""A trial is broken once its rewards are below this share of the best that they were, both of ``WINDOW`` steps."""
WINDOW = 5
LEARNT = 0.4
"""Largest held-out loss of a start, in nats a token, that has learnt to add."""
MOST_SKIPPED = 4
"""Starts that are made for each seed that is wanted, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One arm on one seed."""

    arm: Arm
    seed: int
    start_loss: float
    """Held-out cross-entropy of the start."""
    curve: TrialCurve

    @property
    def end(self) -> Measurement:
        """The last measurement."""
        return self.curve.heldout[-1]

    def figure(self, name: Figure) -> float:
        """A figure of the end."""
        return float(getattr(self.end, name))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    parser.add_argument("--name", default="staleness", metavar="NAME", help=f"the ablation: {', '.join(ABLATIONS)}")
    parser.add_argument("--seeds", type=int, help="how many of every arm (default: the ablation's own numbers)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-science"), help="keeps the trials; goes on")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override the recipe")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    return bench_science(options.name, options.out, seeds=options.seeds, overrides=options.set)


def bench_science(
    name: str,
    out: Path,
    cache: Path = CACHE,
    *,
    seeds: int | None = None,
    learnt: float = LEARNT,
    overrides: Sequence[str] = (),
) -> dict[str, Json]:
    """Run the remaining trials of an ablation and return the bench object.

    Trials are stored in ``out``, their starts in ``cache``. Raises :class:`~etude.errors.UserError` for an unknown
    ablation, and as :func:`usable_seeds` does.
    """
    if name not in ABLATIONS:
        raise UserError(f"bench science: no ablation {name!r}; there are {', '.join(ABLATIONS)}")
    if seeds is not None and seeds < 1:
        raise UserError(f"bench science: --seeds {seeds} measures nothing: ask for 1 or more")
    ablation = ABLATIONS[name]
    trials: list[Trial] = []
    skipped: list[int] = []
    with so_far() as measured:
        most = max(seeds or ablation.seeds_of(arm) for arm in ablation.arms)
        keys = [*overrides, *ablation.arms[0].start]
        for place, seed in enumerate(usable_seeds(most, keys, cache, learnt, skipped)):
            for arm in ablation.arms:
                if place < (seeds or ablation.seeds_of(arm)):
                    trials.append(_trial(arm, seed, out, cache, overrides))
                    _say(f"{arm.name}, seed {seed}: {trials[-1].end.sampled:.3f}")
    figures: dict[str, Json] = {
        "name": name,
        "skipped_seeds": [*skipped],
        "results": [_row(trial) for trial in trials],
        "claims": [_judged(claim, trials) for claim in ablation.claims],
        "goals": _goals(name, trials),
    }
    seconds = sum(trial.curve.seconds for trial in trials)
    return envelope("science", seconds, figures, interrupted=measured.interrupted)


def usable_seeds(count: int, keys: Sequence[str], cache: Path, learnt: float, skipped: list[int]) -> Iterator[int]:
    """The first ``count`` seeds whose start has learnt to add: its loss is at most ``learnt``. Others are ``skipped``:
    from a start at chance every arm ends at chance, and none would seem to cost anything.

    Raises :class:`~etude.errors.UserError` where hardly any start has.
    """
    usable = 0
    for seed in range(MOST_SKIPPED * count):
        start = prepared_start(load_recipe(RECIPE, [*keys, f"seed={seed}"]), cache)
        if start.loss > learnt:
            skipped.append(seed)
            _say(f"seed {seed} is left out: its start's loss is {start.loss:.3f}, above {learnt:g}")
            continue
        yield seed
        usable += 1
        if usable == count:
            return
    raise UserError(
        f"bench science: of {MOST_SKIPPED * count} starts {usable} have a loss of at most {learnt:g}: train them "
        f"longer, such as --set midtrain.tokens=400_000"
    )


def table(result: dict[str, Json]) -> str:
    """The bench object as tables for people: all trials, then the claims about the arms."""
    columns = (
        "contestant",
        "seed",
        "start_loss",
        "before",
        "sampled",
        "greedy",
        "tokens",
        "entropy",
        "k3",
        "broken_at",
    )
    claims = ("claim", "difference", "interval", "seeds", "verdict")
    title = heading(result, str(result["name"]))
    trials = draw(title, results_of(result), columns)
    return page(result, trials, draw("what is published", results_of(result, "claims"), claims))


def _trial(arm: Arm, seed: int, out: Path, cache: Path, overrides: Sequence[str]) -> Trial:
    """Train, or read the stored result."""
    start_keys = [*overrides, f"seed={seed}", *arm.start]
    start_config, config = load_recipe(RECIPE, start_keys), load_recipe(RECIPE, [*start_keys, *arm.changes])
    start = prepared_start(start_config, cache)
    decides = json.dumps([config.model_dump(mode="json"), digest_of(start_config), arm.router_noise], sort_keys=True)
    file = out / f"{hashlib.sha256(decides.encode()).hexdigest()[:16]}.json"
    if not file.exists():
        curve = learn(config, start.folder, router_noise=arm.router_noise)
        out.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(curve)) + "\n", encoding="utf-8")
        partial.rename(file)
    return Trial(arm=arm, seed=seed, start_loss=start.loss, curve=_read(file))


def _read(file: Path) -> TrialCurve:
    """The curve that a trial left."""
    fields = json.loads(file.read_text(encoding="utf-8"))
    heldout = tuple(Measurement(**one) for one in fields.pop("heldout"))
    return TrialCurve(heldout=heldout, rewards=tuple(fields.pop("rewards")), **fields)


def _row(trial: Trial) -> dict[str, Json]:
    """A trial as printed."""
    curve, end = trial.curve, trial.end
    return {
        "contestant": trial.arm.name,
        "seed": trial.seed,
        "start_loss": round(trial.start_loss, 4),
        "before": round(curve.heldout[0].sampled, 4),
        "sampled": round(end.sampled, 4),
        "greedy": round(end.greedy, 4),
        "tokens": round(end.tokens, 2),
        "entropy": round(curve.entropy, 3),
        "masked": round(curve.masked, 4),
        "k3": float(f"{curve.k3:.3g}"),
        "broken_at": broken_at(curve.rewards),
        "heldout": [[one.step, round(one.sampled, 4), round(one.greedy, 4)] for one in curve.heldout],
        "rewards": [round(reward, 3) for reward in curve.rewards],
        "seconds": round(curve.seconds, 1),
    }


def broken_at(rewards: Sequence[float]) -> int | None:
    """The first step at which the mean of the last ``WINDOW`` rewards is below ``BROKEN`` of the best such mean before;
    ``None``: learning never broke.
    """
    smooth = [statistics.fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    best = 0.0
    for place, mean in enumerate(smooth):
        if mean < BROKEN * best:
            return place + WINDOW
        best = max(best, mean)
    return None


def differences(trials: Sequence[Trial], arm: str, than: str, figure: Figure) -> list[float]:
    """A figure of one arm less that of another, seed by seed, as far as both were measured."""
    by_seed = {trial.seed: trial.figure(figure) for trial in trials if trial.arm.name == than}
    return [
        trial.figure(figure) - by_seed[trial.seed]
        for trial in trials
        if trial.arm.name == arm and trial.seed in by_seed
    ]


def _judged(claim: Claim, trials: Sequence[Trial]) -> dict[str, Json]:
    """A claim beside the paired difference over seeds."""
    measured = differences(trials, claim.arm, claim.than, claim.figure)
    judged: dict[str, Json] = {
        "claim": claim.text,
        "seeds": len(measured),
        "difference": round(statistics.fmean(measured), 4) if measured else None,
    }
    if len(measured) < 2:
        return judged | {"interval": None, "verdict": "not measured"}
    mean = mean_over_seeds(measured)
    return judged | {
        "interval": [round(mean.low, 4), round(mean.high, 4)],
        "verdict": verdict(claim, mean.low, mean.high),
    }


def verdict(claim: Claim, low: float, high: float) -> str:
    """``agrees``, ``contradicts`` or ``not shown``, by the interval of the difference."""
    if claim.expected == "alike":
        if low >= -ALIKE and high <= ALIKE:
            return "agrees"
        return "contradicts" if high < -ALIKE or low > ALIKE else "not shown"
    above, below = ("agrees", "contradicts") if claim.expected == "more" else ("contradicts", "agrees")
    return above if low > 0 else below if high < 0 else "not shown"


def _goals(name: str, trials: Sequence[Trial]) -> dict[str, Json]:
    """Cost of staleness with the default correction, if it was measured."""
    if name != "staleness":
        return {}
    shortfalls = {arm: [-each for each in differences(trials, arm, FRESH, "sampled")] for arm in JUDGED}
    return {f"{SHORTFALL.name}: {arm}": SHORTFALL.judge_seeds(values) for arm, values in shortfalls.items()}


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
