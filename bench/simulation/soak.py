"""`bench soak`: a run of many hours in virtual time with faults, and the growth of its resources.

    steps of a minute, faults ──▶ FaultyRun ──▶ the rules of `bench simulation`: none may be violated
                                     └── each virtual minute: handles, tasks; each hour: memory, ledger ──▶ growth

The code under test is production's, as in :mod:`bench.simulation.run`: dispatcher, runner, schedule, breaker,
admission, ledger, leases, regions, pools and routers, in processes that are killed and restarted meanwhile. Growth is
measured after a warm-up of an hour. The ledger's rows and files of events grow by design; the records that simulation
and auditor keep are counted separately from the memory of production's code.
"""

import argparse
import asyncio
import gc
import logging
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from prometheus_client import ProcessCollector

from bench.report import Goal, envelope, heading
from bench.simulation.run import MEMORY, FaultyRun, Outcome, Pace, empty_ledger
from bench.simulation.scenario import HOLDS, LEASE_S, Fault, Kind, Scenario, draw
from bench.tables import draw as draw_table
from bench.tables import page, results_of
from etude.config.loading import parse_config
from etude.errors import UserError
from etude.rollouts.fake import run_virtually
from etude.simulation.calibration import TrainerTimes
from etude.simulation.run import RegionModel
from etude.types import Json

HOURS, FEWEST_HOURS, HOUR_S = 8, 4, 3600.0
"""Default virtual hours; the fewest from which growth can be measured; the seconds of one."""
WARM_UP = 1
"""Hours in which caches fill."""
SAMPLES = 60
"""Samples per hour."""
STEP_S, FAULT_S = 45.0, 240.0
"""Virtual time of a step, approximately, and between two faults."""
RECORDS = (
    "/bench/simulation/", "/bench/faults/", "/etude/simulation/", "/etude/rollouts/fake.py", "/etude/clock.py",
    "/tracemalloc.py",
)  # fmt: skip
"""Source files of the simulation, which keep records for the auditor; their times are made by the virtual clock."""
MOST_LISTED = 8
"""Most places in production's code that are listed with their growth."""
VIOLATIONS = Goal("violations", "at most", 0, "Violations of the rules of a run.")
HANDLES = Goal(
    "handles_grown",
    "at most",
    0,
    "Open handles by which lowest and highest count grow from the first third to the last.",
)
TASKS = Goal(
    "tasks_grown", "at most", 0, "Tasks by which lowest and highest count grow from the first third to the last."
)
MEMORY_KIB = Goal(
    "memory_kib_per_hour", "at most", 64, "KiB by which the memory of production's code grows per virtual hour."
)
"""A hundred bytes for each rollout of an hour."""
_COLUMNS = ("hour", "rss_mib", "traced_mib", "handles", "tasks", "ledger_mib", "steps", "restarts")


@dataclass(slots=True)
class Samples:
    """Samples of a run's resources: handles and tasks by the minute, the others by the hour."""

    hour_s: float
    handles: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)
    hours: list[dict[str, float]] = field(default_factory=list)
    memory: list[tracemalloc.Snapshot] = field(default_factory=list)
    """At the end of the warm-up, and of the newest hour."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    parser.add_argument("--hours", type=int, default=HOURS, help=f"virtual hours (default: {HOURS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: 0)")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    return bench_soak(options.hours, options.seed)


def bench_soak(hours: int, seed: int = 0, hour_s: float = HOUR_S) -> dict[str, Json]:
    """Simulate the given virtual hours and return the bench object. Raises :class:`~etude.errors.UserError` for too
    few.
    """
    if hours < FEWEST_HOURS:
        raise UserError(f"bench soak: --hours {hours}: growth can only be measured from {FEWEST_HOURS} hours on")
    began_s, samples = time.monotonic(), Samples(hour_s)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # production logs every injected fault
    tracemalloc.start()
    try:
        with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None, prefix="etude-soak-") as name:
            outcome = run_virtually(_play(long_run(hours * hour_s, seed), Path(name), samples))
    finally:
        tracemalloc.stop()
        logging.disable(disabled)
    return envelope("soak", time.monotonic() - began_s, figures(samples, outcome))


def long_run(seconds: float, seed: int) -> Scenario:
    """A run of the given duration on engines in two regions, with all kinds of faults except permanent ones."""
    random, small = Random(f"soak {seed}"), draw(seed)
    kinds = [kind for kind in Kind if kind is not Kind.LOSE_ROLLOUTS]
    drawn = [(kinds[number % len(kinds)], number + random.random()) for number in range(round(seconds / FAULT_S))]
    faults = [Fault(kind=kind, at_s=at * FAULT_S, hold_s=random.uniform(*HOLDS[kind]), pick=random.random(),
                    moment=random.randint(0, 3), is_kept=random.random() < 0.5) for kind, at in drawn]  # fmt: skip
    rollouts = {"groups_per_step": 2, "group_size": 4, "max_staleness": 1, "concurrency": 16, "timeout_s": 600.0}
    recipe = {"rollouts": rollouts, "trainer": {"steps": 1 + round(seconds / STEP_S)}, "ledger": {"lease_s": LEASE_S}}
    times = TrainerTimes(fixed_s=STEP_S, token_s=1e-4, save_s=1.0, publish_s=2.0)
    regions = (RegionModel(name="home", engines=2), RegionModel(name="far", engines=2, rtt_s=0.1, arrival_s=1.0))
    config, calibration = parse_config(recipe, source="bench soak"), replace(small.calibration, trainer=times)
    return replace(small, config=config, calibration=calibration, regions=regions, processes=2, faults=tuple(faults))


async def _play(scenario: Scenario, folder: Path, samples: Samples) -> Outcome:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # of killed processes
    pace = Pace(look_s=samples.hour_s / SAMPLES, poll_s=1.0, longest_s=100 * STEP_S * scenario.config.trainer.steps)
    (folder / "run").mkdir()
    soaked = FaultyRun(scenario, folder / "run", empty_ledger(folder), pace)
    sampling = asyncio.ensure_future(_sample(soaked, folder / "run", samples))
    outcome = await soaked.play()
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    return outcome


async def _sample(soaked: FaultyRun, folder: Path, samples: Samples) -> None:
    while True:
        for _ in range(SAMPLES):
            await asyncio.sleep(samples.hour_s / SAMPLES)
            samples.handles.append(round(_process()["process_open_fds"]))
            samples.tasks.append(len(asyncio.all_tasks()))
        samples.hours.append(hour := _hour(soaked, folder, samples))
        sys.stderr.write(f"{hour}\n")


def _process() -> dict[str, float]:
    return {metric.name: metric.samples[0].value for metric in ProcessCollector(registry=None).collect()}


def _hour(soaked: FaultyRun, folder: Path, samples: Samples) -> dict[str, float]:
    """The resources of the whole process at the end of an hour."""
    gc.collect()
    if len(samples.hours) + 1 >= WARM_UP:
        samples.memory[1:] = [tracemalloc.take_snapshot()]
    return {
        "hour": len(samples.hours) + 1,
        "rss_mib": _process()["process_resident_memory_bytes"] / 2**20,
        "traced_mib": tracemalloc.get_traced_memory()[0] / 2**20,
        "handles": min(samples.handles[-SAMPLES:]),
        "tasks": min(samples.tasks[-SAMPLES:]),
        "ledger_mib": sum(file.stat().st_size for file in folder.glob("ledger.db*")) / 2**20,
        "steps": soaked.newest,
        "restarts": soaked.restarts,
    }


def figures(samples: Samples, outcome: Outcome) -> dict[str, Json]:
    """The figures of the bench object."""
    first, *_, last = samples.memory
    spent, hours = len(samples.hours) - WARM_UP, samples.hours
    lines = last.compare_to(first, "lineno")
    of_production = [line for line in lines if not any(part in line.traceback[0].filename for part in RECORDS)]
    of_production.sort(key=lambda line: -line.size_diff)
    kib, of_production_kib = (sum(line.size_diff for line in each) / 1024 / spent for each in (lines, of_production))
    return {
        "hours": len(hours),
        "seed": outcome.seed,
        "virtual_s": round(outcome.seconds),
        "injected": len(outcome.injected),
        "restarts": outcome.restarts,
        "violations": [f"{each.rule}: {each.what}" for each in outcome.violations],
        **{f"{name}_per_hour": round((hours[-1][name] - hours[WARM_UP - 1][name]) / spent, 3)
           for name in ("rss_mib", "ledger_mib")},
        "recorded_kib_per_hour": round(kib - of_production_kib, 1),
        "grown": [
            f"{'/'.join(line.traceback[0].filename.split('/')[-3:])}:{line.traceback[0].lineno}: "
            f"{line.size_diff / 1024 / spent:.1f} KiB, {line.count_diff / spent:.0f} objects an hour"
            for line in of_production[:MOST_LISTED]
        ],
        "results": [{"contestant": "etude"} | {key: round(value, 2) for key, value in hour.items()} for hour in hours],
        "goals": {
            VIOLATIONS.name: VIOLATIONS.judge(float(len(outcome.violations))),
            HANDLES.name: HANDLES.judge(float(rise_of(samples.handles))),
            TASKS.name: TASKS.judge(float(rise_of(samples.tasks))),
            MEMORY_KIB.name: MEMORY_KIB.judge(of_production_kib),
        },
    }  # fmt: skip


def rise_of(minutes: Sequence[int]) -> int:
    """Growth from the first third after the warm-up to the last third, of the lowest count or the highest, whichever
    grew less: resources in use go up and down, by chance to a lower or a higher count; leaked ones raise both.
    """
    warm = minutes[SAMPLES * WARM_UP :]
    third = len(warm) // 3
    first, last = warm[:third], warm[-third:]
    return min(min(last) - min(first), max(last) - max(first))


def table(result: dict[str, Json]) -> str:
    """Hour by hour, then what grew and the goals."""
    grown = result["grown"]
    assert isinstance(grown, list)
    title = heading(result, f"{result['hours']} virtual hours", f"{result['injected']} faults")
    return page(result, draw_table(title, results_of(result), _COLUMNS), notes=[f"grown: {each}" for each in grown])
