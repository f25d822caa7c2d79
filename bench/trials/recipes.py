"""`bench recipes`: does a recipe still do what its ``expected.json`` says?

The recipe is run whole, at a seed that is not among the committed ones, and its result is held against where the
committed seeds lead one to expect the next one:

    expected.json ──▶ a gain for each seed ──▶ interval for one more seed ──┐
    recipe, another seed ──▶ run ──▶ its gain ──────────────────────────────┴──▶ inside, above or below

All runs share their held-out tasks, so what differs between them is the seed's doing alone. A recipe that was measured
with one seed has no spread: its own interval over templates stands for it.
"""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from bench.options import names
from bench.report import Goal, envelope, so_far
from bench.tables import results_page
from bench.trials.trials import finished_run, report_of
from etude.config.loading import load_recipe
from etude.dashboard.formatting import number_at
from etude.dashboard.heldout import comparison
from etude.dashboard.statistics import student
from etude.errors import UserError
from etude.run.folder import RunFolder
from etude.types import Json

RECIPES = Path("recipes")
EXPECTED = "expected.json"
WAYS = ("sampled", "greedy")
BELOW = Goal(
    "below",
    "at most",
    0,
    "Figures of recipes that were run again and are below the interval that the committed seeds predict.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The 95 % interval for the next seed's gain."""

    low: float
    high: float
    seeds: int
    """Committed seeds that it is made of."""

    def place(self, gain: float) -> str:
        """Position of a gain relative to its interval."""
        return "below" if gain < self.low else "above" if gain > self.high else "inside"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    parser.add_argument("--recipes", metavar="A,B,…", default="quickstart", help="which (default: quickstart)")
    parser.add_argument("--seed", type=int, help="that they are run at (default: the first that is not committed)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-recipes"), help="keeps the runs; goes on")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    return bench_recipes(names(options.recipes) or (), options.out, options.seed)


def bench_recipes(
    recipes: Sequence[str], out: Path, seed: int | None = None, *, place: Path = RECIPES
) -> dict[str, Json]:
    """Run recipes of a folder, and return the bench object. Runs are stored in ``out`` and continued there.

    Raises :class:`~etude.errors.UserError` for a recipe without committed reports, and for a committed seed.
    """
    committed = {name: _committed(place / name) for name in recipes}
    for name, reports in committed.items():
        if seed in [report["seed"] for report in reports]:
            raise UserError(f"bench recipes: seed {seed} of {name} is committed in its {EXPECTED}: choose another one")
    rows: list[Json] = []
    seconds = 0.0
    with so_far() as measured:
        for name, reports in committed.items():
            report = _rerun(place / name, out, _next_seed(reports) if seed is None else seed)
            seconds += number_at(report, "seconds.total") or 0.0
            rows += [_row(name, report, reports, way) for way in WAYS if _gains(reports, way)]
    below = sum(isinstance(row, dict) and row["place"] == "below" for row in rows)
    figures: dict[str, Json] = {"results": rows, "goals": {"below": BELOW.judge(below if rows else None)}}
    return envelope("recipes", seconds, figures, interrupted=measured.interrupted)


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people."""
    return results_page(result, ("contestant", "way", "seed", "gain", "low", "high", "place", "seconds"))


def expectation(reports: Sequence[Mapping[str, Json]], way: str) -> Expectation:
    """The 95 % prediction interval of one more seed: mean ± t(n − 1) · s · √(1 + 1/n)."""
    gains = _gains(reports, way)
    if len(gains) < 2:
        interval = comparison(reports[0], way).interval
        low, high = interval or (gains[0], gains[0])
        return Expectation(low=low, high=high, seeds=len(gains))
    mean, spread = statistics.fmean(gains), statistics.stdev(gains)
    half = student(len(gains) - 1) * spread * math.sqrt(1 + 1 / len(gains))
    return Expectation(low=mean - half, high=mean + half, seeds=len(gains))


def _committed(recipe: Path) -> list[dict[str, Json]]:
    file = recipe / EXPECTED
    if not file.is_file():
        raise UserError(f"bench recipes: {file} is not there: nothing is known of what {recipe.name} comes to")
    reports = orjson.loads(file.read_bytes())
    if not isinstance(reports, list):
        raise UserError(f"bench recipes: {file} has no reports of runs; it is measured by a bench of its own")
    return reports


def _next_seed(reports: Sequence[Mapping[str, Json]]) -> int:
    return 1 + max(int(number_at(report, "seed") or 0) for report in reports)


def _rerun(recipe: Path, out: Path, seed: int) -> dict[str, Json]:
    config = load_recipe(recipe, [f"seed={seed}"])
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{recipe.name}-s{seed}"
    folder = finished_run(path, lambda: RunFolder.create(path, config))
    return report_of(folder, config)


def _gains(reports: Sequence[Mapping[str, Json]], way: str) -> list[float]:
    return [gain for report in reports if (gain := comparison(report, way).gain) is not None]


def _row(name: str, report: Mapping[str, Json], reports: Sequence[Mapping[str, Json]], way: str) -> dict[str, Json]:
    expected, result = expectation(reports, way), comparison(report, way)
    gain = result.gain
    return {
        "contestant": name,
        "way": way,
        "seed": report["seed"],
        "before": result.before,
        "after": result.after,
        "gain": None if gain is None else round(gain, 4),
        "low": round(expected.low, 4),
        "high": round(expected.high, 4),
        "committed_seeds": expected.seeds,
        "place": "below" if gain is None else expected.place(gain),
        "seconds": number_at(report, "seconds.total"),
    }
