"""`bench lending`: machines of production that rollouts use while they are idle.

    weeks       in virtual time: a product's traffic with and without lending   p95_vs_without, idle_used
    recalls     for real: an engine of a run that is taken back again and again  recall_s, lost

What decides is production's code; what is modelled, and what a week looks like, is said in :mod:`bench.lending.week`.
The table has seen the weeks before the one that counts.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.lending.recalls import RecallResult, measure_recalls
from bench.lending.week import AtNight, ByTable, Nothing, Policy, ProductionModel, Traffic, WeekResult
from bench.report import Goal, envelope, heading, so_far
from bench.tables import draw, page, results_of
from etude.errors import UserError
from etude.types import Json

ETUDE, AT_NIGHT, WITHOUT = "étude", "half of them, at night", "nothing is lent"
P95 = Goal(
    "p95_vs_without",
    "at most",
    1.05,
    "95th percentile of production's time to the first token, over that without lending; the mean over seeds.",
)
IDLE = Goal(
    "idle_used",
    "at least",
    0.8,
    "Share of the idle time of production's machines in which rollouts use them; the mean over seeds.",
)
RECALL = Goal(
    "recall_s", "at most", 2.0, "Seconds from calls that wait until a lent engine is gone; the slowest recall."
)
LOST = Goal("lost", "at most", 0, "Planned rollouts that are missing from the ledger after the recalls.")
_COLUMNS = ("seed", "calls", "p50_s", "p95_s", "p99_s", "worst_p95_s", "waited", "idle_used", "returns")


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingOptions:
    """Options of the measurement."""

    seeds: int = 3
    learnt: int = 2
    """Weeks before the one that counts."""
    machines: int = 16
    lead_s: float = 120.0
    """Time until a machine that was given back serves users."""
    recalls: int = 5
    """Number of recalls of a real engine; 0 for none."""


QUICK = LendingOptions(seeds=1, learnt=1, machines=4, recalls=1)
"""See that it runs, in a minute."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    defaults = LendingOptions()
    parser.add_argument("--quick", action="store_true", help="see that it runs, in a minute")
    parser.add_argument("--seeds", type=int, help=f"weeks that count (default: {defaults.seeds})")
    parser.add_argument("--machines", type=int, help=f"of production (default: {defaults.machines})")
    parser.add_argument("--lead-s", type=float, help=f"until one serves users again (default: {defaults.lead_s:g})")
    parser.add_argument("--recalls", type=int, help=f"of a real engine (default: {defaults.recalls}); 0: none")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    given = {name: getattr(options, name) for name in ("seeds", "machines", "lead_s", "recalls")}
    chosen = {name: value for name, value in given.items() if value is not None}
    return bench_lending(replace(QUICK if options.quick else LendingOptions(), **chosen))


def bench_lending(options: LendingOptions) -> dict[str, Json]:
    """Measure and return the bench object."""
    if options.seeds < 1 or options.machines < 4:
        raise UserError(f"bench lending: --seeds {options.seeds}, --machines {options.machines}: 1 and 4 at least")
    began_s, rows, recalls = time.monotonic(), list[dict[str, Json]](), RecallResult()
    with so_far() as measured:
        if options.recalls:
            sys.stderr.write("recalls\n")
            recalls = measure_recalls(options.recalls)
        rows.extend(_weeks(options))
    figures: dict[str, Json] = {
        "results": list(rows),
        "recalls": {
            "seconds": [round(seconds, 3) for seconds in recalls.recall_s],
            "rollouts": recalls.rollouts,
            "lost": recalls.lost,
            "tokens_of_lent_engine": recalls.tokens,
        },
        "goals": goals(rows, recalls),
    }
    return envelope("lending", time.monotonic() - began_s, figures, interrupted=measured.interrupted)


def goals(rows: Sequence[Mapping[str, Json]], recalls: RecallResult) -> dict[str, Json]:
    """Each goal, judged over the seeds; the slowest recall counts."""
    by = {(row["contestant"], row["seed"]): row for row in rows}
    pairs = [(row, by[WITHOUT, row["seed"]]) for row in rows
             if row["contestant"] == ETUDE and (WITHOUT, row["seed"]) in by]  # fmt: skip
    unmeasured = "no recall was measured"
    return {
        P95.name: P95.judge_seeds([_number(mine, "p95_s") / _number(other, "p95_s") for mine, other in pairs]),
        IDLE.name: IDLE.judge_seeds([_number(mine, "idle_used") for mine, _ in pairs]),
        RECALL.name: RECALL.judge(max(recalls.recall_s, default=None), unmeasured),
        LOST.name: LOST.judge(float(recalls.lost) if recalls.recall_s else None, unmeasured),
    }


def table(result: dict[str, Json]) -> str:
    """The weeks, and what recalls took."""
    recalls = result["recalls"]
    assert isinstance(recalls, dict)
    note = "real recalls: " + ", ".join(f"{name} {value}" for name, value in recalls.items())
    return page(result, draw(heading(result, "weeks in virtual time"), results_of(result), _COLUMNS), notes=[note])


def _weeks(options: LendingOptions) -> Iterator[dict[str, Json]]:
    whole = Traffic()
    own = max(1, round(whole.own * options.machines / whole.machines))
    traffic = replace(whole, machines=options.machines, own=own)
    for seed in range(options.seeds):
        policies: dict[str, tuple[Policy, int]] = {
            ETUDE: (ByTable(traffic, options.lead_s, RECALL.goal), options.learnt),
            AT_NIGHT: (AtNight(traffic), 0),
            WITHOUT: (Nothing(), 0),
        }
        for name, (policy, learnt) in policies.items():
            model = ProductionModel(traffic, policy, options.lead_s, first_week=options.learnt - learnt)
            for week in range(options.learnt - learnt, options.learnt + 1):
                sys.stderr.write(f"seed {seed}, {name}: week {week}\n")
                played = model.play(week, seed)
            yield _row(name, seed, played)


def _row(name: str, seed: int, week: WeekResult) -> dict[str, Json]:
    return {
        "contestant": name,
        "case": "a week",
        "seed": seed,
        "calls": week.calls,
        **{f"p{share}_s": round(week.percentile(share / 100), 4) for share in (50, 95, 99)},
        "worst_p95_s": round(week.worst_p95_s, 3),
        "waited": week.waited,
        "idle_used": round(week.lent_s / week.idle_s, 4) if week.idle_s else None,
        "returns": week.returns,
    }


def _number(row: Mapping[str, Json], name: str) -> float:
    value = row[name]
    assert isinstance(value, int | float)
    return float(value)
