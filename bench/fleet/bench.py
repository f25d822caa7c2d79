"""`bench fleet`: one run over five regions on one machine, and six things that go wrong while it trains.

    home: trainer on two machines, rollouts, ledger ══ 20 · 80 · 150 · 250 ms, 0.1 % lost, 100 Mb/s ══▶ four regions

Machines are network namespaces (:mod:`bench.fleet.machines`). Each region has a store that speaks S3, a Ray cluster, a
relay and one beside it, a gateway, an engine and a supervisor of its own. The recipe is the quickstart's. Goals are of
the whole; a short version has two regions, two faults and a tiny model, and judges what that can tell.

``loop_busy`` wants a core each for trainer and engines and a model whose own work dominates: `bench loop --busy`
measures that. Here a hundred processes share the cores with an emulated network.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from bench.faults.audit import NEVER, Wrong
from bench.fleet import figures, ray_nodes
from bench.fleet.demo import LAUNCHERS, MACHINES, RAY, RECIPE, Demo, DemoLog
from bench.fleet.expected import expected
from bench.fleet.figures import FaultRecord
from bench.fleet.machines import Fleet
from bench.fleet.observed import of_kind
from bench.fleet.page import CURVE_S, render_page
from bench.fleet.plan import FaultKind, FleetPlan, short_plan, whole_plan
from bench.fleet.prediction import prediction
from bench.plan.comparison import judged
from bench.report import Goal, envelope
from bench.starts import prepared_start
from bench.tables import results_page
from etude.config.loading import load_recipe
from etude.errors import UserError
from etude.telemetry.events import StepDone
from etude.types import Json

DEADLINE_S = 3600.0
"""Longest time for the run; on two free cores it takes a fifth of it."""
BOUND = 1
"""``rollouts.max_staleness`` of the recipe."""
COPIES = Goal(
    "wan_copies_per_region",
    "at most",
    1.05,
    "Bytes of weights sent to a region, over those published; the worst region.",
)
LAG = Goal(
    "served_lag_s",
    "at most",
    0.0,
    "Seconds by which a version is served later than distance and size explain; the worst region, outside of faults.",
)
MISMATCH = Goal("k3", "at most", 0.0, "Mismatch k3 between trainer and engine, in nats; the largest of all steps.")
MISMATCH_OF_RANKS = replace(MISMATCH, goal=1e-9)
"""Several ranks add up in another order than an engine (fast arithmetic, docs/numerics.md)."""
STALENESS = Goal("staleness_over_bound", "at most", 0.0, "Steps that trained on tokens older than allowed.")
AUDITED = tuple(goal for goal in NEVER if goal.name != Wrong.UNBOUNDED_WAITS)
OTHERS = Goal(
    "others_during_cut",
    "at least",
    0.9,
    "Tokens per second of the other regions while one is cut off, over those before.",
)
OVER: Mapping[FaultKind, Goal] = {
    FaultKind.REGION_CUT: Goal(
        "back_after_cut_s", "at most", 5.0, "Seconds from the end of a region's cut until it works again."
    ),
    FaultKind.MACHINE_KILLED: Goal(
        "machine_lost_s", "at most", 15.0, "Seconds from the loss of a machine until its work goes on."
    ),
    FaultKind.TRAINER_NODE_LOST: Goal(
        "trainer_node_lost_s",
        "at most",
        30.0,
        "Seconds from the loss of one of the trainer's machines until steps go on.",
    ),
}
BALANCE = Goal(
    "region_balance", "at least", 0.8, "Busy share of the least busy region's engine, over that of the busiest."
)
GAP = Goal(
    "pass_rate_gap", "at most", 2.0, "Difference of the final pass rate from that of one machine, in standard errors."
)
PLACED: Mapping[str, str] = {
    MACHINES: "a launcher of the demo's own over namespaces, not Ray",
    RAY: "Ray, a cluster in each region",
}
_COLUMNS = ("case", "region", "at_s", "lasted_s", "over_s")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    parser.add_argument("--seed", type=int, default=0, help="of the run")
    parser.add_argument("--short", action="store_true", help="two regions, a kill and a cut, a tiny model: minutes")
    parser.add_argument("--calm", action="store_true", help="without faults, and with what a plan predicts of it")
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, default=RAY, help="who places processes: Ray, or the demo's own"
    )
    parser.add_argument("--page", type=Path, default=Path("runs/fleet-demo.html"), help="the page to write")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line, and write the page."""
    plan = short_plan() if options.short else whole_plan()
    result = bench_fleet(plan.calm if options.calm else plan, seed=options.seed, launcher=options.launcher)
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(render_page(result), encoding="utf-8")
    return result | {"page": str(options.page)}


def bench_fleet(plan: FleetPlan, *, seed: int = 0, launcher: str = RAY) -> dict[str, Json]:
    """Run the demo and return the bench object; progress is printed on stderr.

    Raises :class:`~etude.errors.UserError` if it cannot run here, and :class:`~etude.errors.InfrastructureError` if the
    run ends with an error.
    """
    if seed < 0:
        raise UserError(f"bench fleet: --seed {seed}: expected 0 or more")
    began_s = time.monotonic()

    def tell(line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began_s:6.1f} s  {line}\n")

    if launcher == RAY and (reason := ray_nodes.missing()) is not None:
        raise UserError(f"bench fleet: {reason}")
    variables = ray_nodes.environment() if launcher == RAY else {}
    start = prepared_start(load_recipe(RECIPE, (*plan.start, f"seed={seed}")))
    tell("there is a model to start from")
    with tempfile.TemporaryDirectory(prefix="etude-fleet-") as name:
        scratch = Path(name)
        with Fleet(plan, scratch, variables) as fleet:
            tell(f"{len(plan.sites)} machines are up")
            if launcher == RAY:
                ray_nodes.start_nodes(fleet, scratch)
                tell("a Ray cluster is up in each region")
            demo = Demo(fleet, scratch, launcher=launcher, start=start, seed=seed, deadline_s=DEADLINE_S, tell=tell)
            log = demo.run()
    measured = summary(log, plan) | {"launcher": PLACED[launcher]}
    return envelope("fleet", time.monotonic() - began_s, measured, interrupted=log.interrupted)


def table(result: dict[str, Json]) -> str:
    """Faults and how long each was felt, then goals, and what each region did."""
    regions = result["regions"]
    assert isinstance(regions, list)
    notes = [f"{row['region']}: {_words(row)}" for row in regions if isinstance(row, dict)]
    if isinstance(plan := result["plan"], dict):
        notes.append(f"planned: {_words(plan)}")
    return results_page(result, _COLUMNS, notes=[*notes, f"placed by: {result['launcher']}", f"page: {result['page']}"])


def summary(log: DemoLog, plan: FleetPlan) -> dict[str, Json]:
    """The figures of the bench object."""
    lags = figures.served_lags(log.events, log.records, plan)
    shares = figures.busy_shares(log.events, log.records, plan)
    published = figures.published_bytes(log.events)
    cut = figures.around_cut(log.events, log.records, plan)
    predicted = prediction(log, plan)
    return {
        "finished": log.status is not None,
        "run_seconds": round(log.seconds, 1),
        "results": [_row(record, log) for record in log.records],
        "skipped": [f"{fault.kind} ({fault.region})" for fault in log.skipped],
        "cut": None if cut is None else {name: round(value, 1) for name, value in asdict(cut).items()},
        "regions": [
            {
                "region": region.name,
                "rtt_ms": round(region.rtt_s * 1e3),
                "busy": _rounded(shares.get(region.name)),
                "worst_excess_s": _rounded(max(lags[region.name], default=None)),
                "versions": len(lags[region.name]),
                "weight_copies": _rounded(log.weights_sent.get(region.name, 0) / published if published else None),
                "link_bytes": log.link_bytes.get(region.name),
                "tokens_per_s": _curve(log, region.name),
            }
            for region in plan.regions
        ],
        "plan": None if predicted is None else predicted.row(),
        "findings": [f"{goal}: {text}" for goal, texts in log.findings.items() for text in texts],
        "goals": _goals(log, plan, lags, shares, published) | (judged([predicted]) if predicted else {}),
    }


def _goals(
    log: DemoLog, plan: FleetPlan, lags: Mapping[str, list[float]], shares: Mapping[str, float], published: int
) -> dict[str, Json]:
    copies = {name: size / published for name, size in log.weights_sent.items()} if published else {}
    excess = {name: max(values) for name, values in lags.items() if values}
    stepped = bool(of_kind(log.events, StepDone))
    unaudited = "the run was not finished, so it was not audited"
    cut = figures.around_cut(log.events, log.records, plan)
    goals: dict[str, Json] = {
        COPIES.name: COPIES.judge_worst(copies, "no version was published"),
        LAG.name: LAG.judge_worst(excess, "no version was served outside of the time of faults"),
        MISMATCH.name: (MISMATCH if plan.trainer_nodes == 1 else MISMATCH_OF_RANKS).judge(
            figures.largest_metric(log.events, "k3"), "no step compared tokens of both"
        ),
        STALENESS.name: STALENESS.judge(
            float(figures.steps_beyond(log.events, "staleness_max", BOUND)) if stepped else None, "there was no step"
        ),
        **{
            goal.name: goal.judge(float(len(log.findings[goal.name])) if log.findings else None, unaudited)
            for goal in AUDITED
        },
        OTHERS.name: OTHERS.judge(None if cut is None else cut.share, "no cut with as long a calm before it"),
        **{goal.name: goal.judge(*_over(kind, log, plan)) for kind, goal in OVER.items()},
        BALANCE.name: BALANCE.judge(
            min(shares.values()) / max(shares.values()) if any(shares.values()) else None, "no engine was busy"
        ),
        GAP.name: GAP.judge(
            figures.pass_rate_gap(log.events, expected()) if plan.is_whole else None,
            "it was not evaluated at the end" if plan.is_whole else "a tiny model that learns next to nothing",
        ),
    }
    return goals


def _over(kind: FaultKind, log: DemoLog, plan: FleetPlan) -> tuple[float | None, str]:
    """Duration of a fault's effect; without a figure, the reason."""
    if not any(fault.kind is kind for fault in plan.faults):
        return None, "not in this demo"
    record = next((each for each in log.records if each.fault.kind is kind), None)
    if record is None:
        return None, "the run was over before"
    return record.over_s, "the fleet did not get over it in time"


def _row(record: FaultRecord, log: DemoLog) -> dict[str, Json]:
    return {
        "contestant": "etude",
        "case": record.fault.kind.value,
        "region": record.fault.region,
        "at_s": round(record.struck_s - log.began_s, 1),
        "lasted_s": _rounded(None if record.healed_s is None else record.healed_s - record.struck_s),
        "over_s": _rounded(record.over_s),
    }


def _curve(log: DemoLog, region: str) -> list[Json]:
    """Tokens per second of a region, every :data:`CURVE_S` seconds since the begin."""
    ends = range(CURVE_S, int(log.seconds) + 1, CURVE_S)
    return [
        round(figures.tokens_per_s(log.events, [region], (log.began_s + end - CURVE_S, log.began_s + end)), 1)
        for end in ends
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _words(row: Mapping[str, Json]) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("region", "tokens_per_s"))
