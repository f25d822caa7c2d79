"""`bench burst`: a hundred thousand sandboxes asked for at once.

    choices     of each table on the way, at the size of a cluster                   decision_us
    bursts      in virtual time, over 2,000 modelled hosts: all well; hosts that     served, lost_requests
                go down and a slow image store
    crowd       as many real namespaces as are asked for at once, on this machine    (figures alone)

The hosts are this machine, many times: starts take what ``ns`` takes here, as many at a time as it has cores, and a
request costs a client what one costs here over HTTP (:mod:`bench.burst.calibration`). What decides is production's
code; what is modelled is said in :mod:`bench.burst.model`. Virtual machines and their forks, for real, are those of
``bench sandbox``.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.burst.burst import BurstPlan, BurstResult, play_burst
from bench.burst.calibration import measure_request, measure_starts
from bench.burst.choices import PLACES, measure_choices
from bench.burst.model import MachineModel
from bench.report import Goal, envelope, heading, so_far
from bench.sandbox.contestants import NS, ns_provider
from bench.sandbox.measures import Figures, measure_crowd
from bench.tables import draw, page, results_of
from etude.errors import EtudeError, UserError
from etude.sandboxes.remote.placement import SANDBOX_BYTES
from etude.types import Json

MEMORY = Path("/dev/shm")
WELL, TROUBLE = "all well", "hosts go down, slow image store"
"""The cases of bursts."""
FAILING, SLOW = 0.02, 5.0
"""Share of hosts that go down in the second case, and by how much slower it reads images."""
MEMORY_SHARE = 1.2
"""Memory of a modelled host, in sandboxes for which it has places: places run out first."""
CHOICES, BURST, CROWD = "choices", "virtual burst", "real namespaces at once"
_BURST_COLUMNS = ("case", "served", "lost", "failed", "wait_p50_s", "wait_p90_s", "wait_p99_s", "last_s",
                  "most_running", "reads", "fewest_reads", "wall_s")  # fmt: skip
_CROWD_COLUMNS = ("case", "per_s", "ran_ms", "mb_each", "mb_own")


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstOptions:
    """Options of the measurement."""

    requests: int = 100_000
    hosts: int = 2_000
    alive: int = 1_000
    """Real namespaces at once; 0 for none."""
    rounds: int = 15
    """Repetitions of choices; the fastest counts."""
    scale: float = 1.0
    """Scale of the tables whose choices are timed."""
    calibration_s: float = 10.0
    """Time for which starts are measured."""

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("hosts", 2), ("alive", 0)):
            if getattr(self, name) < least:
                raise UserError(f"bench burst: {name} is {getattr(self, name)}; expected at least {least}")
        if self.requests > self.hosts * PLACES // 2:
            raise UserError(
                f"bench burst: {self.requests} requests on {self.hosts} hosts of {PLACES} places leave no room for "
                f"hosts that go down; use --hosts {-(-2 * self.requests // PLACES)}, or fewer --requests"
            )


QUICK = BurstOptions(requests=400, hosts=10, alive=4, rounds=1, scale=0.01, calibration_s=0.2)
"""Options that show that everything runs, in seconds."""
SERVED = Goal(
    "served",
    "at least",
    BurstOptions().requests,
    "Sandboxes that are served when all are asked for at once; the worst burst.",
)
LOST_REQUESTS = Goal("lost_requests", "at most", 0.0, "Requests for a sandbox that got none; the worst burst.")
DECISION_US = Goal(
    "decision_us", "at most", 20.0, "Microseconds of a choice in the tables of a cluster; the slowest choice."
)


@dataclass(slots=True)
class BurstFigures:
    """Measurements."""

    choices: Mapping[str, float] = field(default_factory=dict)
    """Decision → microseconds."""
    starts_s: tuple[float, ...] = ()
    request_s: float = 0.0
    bursts: dict[str, BurstResult] = field(default_factory=dict)
    """Case → what became of it."""
    crowd: Figures = field(default_factory=Figures)
    missing: dict[str, str] = field(default_factory=dict)
    """Omitted measurement → reason."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    parser.add_argument("--quick", action="store_true", help="see that it runs, in seconds")
    parser.add_argument("--requests", type=int, help=f"sandboxes (default: {BurstOptions().requests})")
    parser.add_argument("--hosts", type=int, help=f"modelled hosts (default: {BurstOptions().hosts})")
    parser.add_argument("--alive", type=int, help=f"real namespaces (default: {BurstOptions().alive}); 0: none")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    given = {name: getattr(options, name) for name in ("requests", "hosts", "alive")}
    chosen = {name: value for name, value in given.items() if value is not None}
    return bench_burst(replace(QUICK if options.quick else BurstOptions(), **chosen))


def bench_burst(options: BurstOptions) -> dict[str, Json]:
    """Measure and return the bench object."""
    began_s, figures = time.monotonic(), BurstFigures()
    parent = MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="etude-bench-", dir=parent) as scratch, so_far() as measured:
        Path(scratch).chmod(0o711)  # sandboxes of other users must get to theirs
        _measure(options, figures, Path(scratch))
    calibration: dict[str, Json] = {
        "starts": len(figures.starts_s),
        "start_median_s": round(statistics.median(figures.starts_s), 4) if figures.starts_s else None,
        "request_s": round(figures.request_s, 6),
        "cores": os.cpu_count(),
    }
    return envelope(
        "burst",
        time.monotonic() - began_s,
        {
            "requests": options.requests,
            "hosts": options.hosts,
            "calibration": calibration,
            "results": list(rows_of(figures)),
            "goals": judged(figures, options.requests),
        },
        interrupted=measured.interrupted,
    )


def table(result: dict[str, Json]) -> str:
    """Tables of decisions, bursts and real sandboxes, then the hosts' parameters and the goals."""
    calibration = result["calibration"]
    assert isinstance(calibration, dict)
    note = "modelled hosts: " + ", ".join(f"{name} {value}" for name, value in calibration.items())
    rows = [row for row in results_of(result) if not row.get("missing")]
    tables = (
        (heading(result, "microseconds of a choice"), CHOICES, ("case", "us")),
        (heading(result, "bursts in virtual time"), BURST, _BURST_COLUMNS),
        (heading(result, "this machine"), NS, _CROWD_COLUMNS),
    )
    drawn = [
        draw(title, [row for row in rows if row["contestant"] == contestant], columns)
        for title, contestant, columns in tables
    ]
    return page(result, *drawn, notes=[note])


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _measure(options: BurstOptions, figures: BurstFigures, scratch: Path) -> None:
    sys.stderr.write("choices\n")
    figures.choices = measure_choices(rounds=options.rounds, scale=options.scale)
    sys.stderr.write("starts and requests of this machine\n")
    figures.request_s = asyncio.run(measure_request(max(2, options.requests // 200)))
    try:
        for name in ("starts", "crowd"):
            (scratch / name).mkdir()
        figures.starts_s = asyncio.run(measure_starts(scratch / "starts", options.calibration_s))
    except (EtudeError, OSError) as error:
        figures.missing |= dict.fromkeys((WELL, TROUBLE, CROWD), f"no start could be measured: {error}")
        return
    for case, plan in plans(options, figures).items():
        sys.stderr.write(f"burst: {case}\n")
        figures.bursts[case] = play_burst(plan)
        sys.stderr.write("\n")
    if options.alive:
        sys.stderr.write(f"{options.alive} real namespaces\n")
        try:
            asyncio.run(_crowd(figures, scratch / "crowd", options.alive))
        except* (EtudeError, OSError) as group:
            figures.missing[CROWD] = str(group.exceptions[0])


def plans(options: BurstOptions, figures: BurstFigures) -> Mapping[str, BurstPlan]:
    """The bursts to be played, by case."""
    machine = MachineModel(
        places=PLACES,
        cores=os.cpu_count() or 1,
        starts_s=figures.starts_s,
        memory_bytes=MEMORY_SHARE * PLACES * SANDBOX_BYTES,
    )
    well = BurstPlan(requests=options.requests, machines=options.hosts, machine=machine, request_s=figures.request_s)
    return {WELL: well, TROUBLE: replace(well, failing=FAILING, read_s=SLOW * well.read_s)}


async def _crowd(figures: BurstFigures, folder: Path, count: int) -> None:
    provider = ns_provider(folder)
    try:
        await measure_crowd(figures.crowd, NS, provider, count)
    finally:
        await provider.close()


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def rows_of(figures: BurstFigures) -> Iterator[Json]:
    """Rows of decisions, then bursts, then real sandboxes, then omitted measurements."""
    for case, us in figures.choices.items():
        yield {"contestant": CHOICES, "case": case, "us": round(us, 1)}
    for case, result in figures.bursts.items():
        yield {"contestant": BURST, "case": case, **_burst_row(result)}
    yield from ({**row, "case": CROWD} for row in figures.crowd.others)
    for case, reason in figures.missing.items():
        yield {"contestant": BURST if case in (WELL, TROUBLE) else NS, "case": case, "missing": reason}


def _burst_row(result: BurstResult) -> dict[str, Json]:
    in_order = sorted(result.queue_times_s)

    def share(part: float) -> float | None:
        return round(in_order[min(len(in_order) - 1, int(part * len(in_order)))], 2) if in_order else None

    return {
        "served": result.served,
        "lost": result.lost,
        "failed": result.failed,
        "wait_p50_s": share(0.5),
        "wait_p90_s": share(0.9),
        "wait_p99_s": share(0.99),
        "last_s": share(1.0),
        "most_running": result.most_running,
        "reads": result.reads,
        "fewest_reads": result.fewest_reads,
        "virtual_s": round(result.seconds, 1),
        "wall_s": round(result.wall_s, 1),
    }


def judged(figures: BurstFigures, requests: int) -> dict[str, Json]:
    """Goals over all bursts, and over all choices."""
    bursts, why, served = figures.bursts, figures.missing.get(WELL), replace(SERVED, goal=requests)
    return {
        served.name: served.judge_worst({case: float(each.served) for case, each in bursts.items()}, why),
        LOST_REQUESTS.name: LOST_REQUESTS.judge_worst({case: float(each.lost) for case, each in bursts.items()}, why),
        DECISION_US.name: DECISION_US.judge_worst(figures.choices),
    }
