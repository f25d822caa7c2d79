"""`etude bench loop`: the same RL phase, asynchronous and synchronous, on this machine, in one call.

The contestants start from one model, mid-trained as the quickstart's (two minutes), so that rollouts and batches are
those of real training. They do the same number of steps of the quickstart's size through the same processes and differ
in ``rollouts.max_staleness`` alone: with 0, trainer and rollouts take turns, since nothing is admitted until the step's
weights are served. The synchronous contestant also runs once with every core given to whichever side is at work, which
is what a person would do; the ratio is against the better of the two.
"""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from etude.benchmarks.envelope import Goal, envelope, heading
from etude.config import RunConfig, parse_config
from etude.dashboard.report import build_report, figure
from etude.dashboard.story import RunStory
from etude.run.folder import RunFolder
from etude.run.local import run_local
from etude.telemetry.log import EventReader
from etude.types import Json

ASYNC_VS_SYNC = Goal("async_vs_sync", "at least", 1.5)
"""Asynchronous over synchronous rollouts per second, below which the asynchrony does not pay for itself."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to run the loop."""

    name: str
    max_staleness: int
    concurrency: int
    threads: int
    """CPU threads of the engine and of the trainer."""


CONTESTANTS = (
    Contestant("asynchronous", max_staleness=2, concurrency=128, threads=1),
    Contestant("synchronous", max_staleness=0, concurrency=128, threads=1),
    Contestant("synchronous-all-cores", max_staleness=0, concurrency=128, threads=2),
)


def bench_loop(*, steps: int) -> dict[str, Json]:
    """Run all contestants and return the bench object: rows measured in this call, and the goal."""
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        start = _midtrained(Path(scratch))
        rows = [_measure(contestant, start, steps) for contestant in CONTESTANTS]
    rates = {str(row["contestant"]): float(str(row["rollouts_per_s"])) for row in rows}
    best_synchronous = max(rate for name, rate in rates.items() if name.startswith("synchronous"))
    judged = ASYNC_VS_SYNC.judge(rates["asynchronous"] / best_synchronous)
    seconds = sum(float(str(row["seconds"])) for row in rows)
    return envelope("loop", seconds, {"results": list(rows), "goals": {ASYNC_VS_SYNC.name: judged}})


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people."""
    rows = result["results"]
    assert isinstance(rows, list)
    drawing = Table(title=heading(result))
    columns = ("contestant", "rollouts_per_s", "trained_tokens_per_s", "busy_trainer", "busy_engine", "seconds")
    for column in columns:
        drawing.add_column(column.replace("_", " "), justify="left" if column == "contestant" else "right")
    for row in rows:
        assert isinstance(row, dict)
        drawing.add_row(*(str(row[column]) for column in columns))
    console = Console(width=110)
    with console.capture() as capture:
        console.print(drawing)
        console.print(f"goals: {result['goals']}")
    return capture.get()


def _config(contestant: Contestant, steps: int) -> RunConfig:
    tree = {
        "name": "bench-loop",
        "rollouts": {"max_staleness": contestant.max_staleness, "concurrency": contestant.concurrency},
        "engine": {"max_running": contestant.concurrency, "threads": contestant.threads},
        "trainer": {"steps": steps, "threads": contestant.threads, "mismatch_share": 0.0},
        "eval": {"enabled": False},
    }
    return parse_config(tree, source="bench loop")


def _midtrained(scratch: Path) -> RunFolder:
    """A run folder with nothing but a mid-trained model and weight version 0."""
    from etude.run.midtrain import run_midtraining

    folder = RunFolder.create(scratch / "start", _config(CONTESTANTS[0], 1))
    run_midtraining(folder)
    return folder


def _measure(contestant: Contestant, start: RunFolder, steps: int) -> dict[str, Json]:
    config = _config(contestant, steps)
    folder = RunFolder.create(start.path.with_name(contestant.name), config)
    shutil.copytree(start.model, folder.model)
    shutil.copytree(start.store, folder.store)
    run_local(folder, resumed=False, out=sys.stderr)
    story = RunStory()
    for logged in EventReader(folder.events).new():
        story.add(logged)
    report = build_report(story, config, machine={}, date="", commit="")
    seconds = figure(report, "seconds.rl") or 0.0
    rollouts = steps * config.rollouts.rollouts_per_step
    return {
        "contestant": contestant.name,
        "case": f"{steps} steps of {config.rollouts.rollouts_per_step} rollouts",
        "threads": contestant.threads,
        "rollouts_per_s": round(rollouts / seconds, 2),
        "trained_tokens_per_s": round((figure(report, "tokens.trained") or 0.0) / seconds, 1),
        "busy_trainer": figure(report, "busy.trainer"),
        "busy_engine": figure(report, "busy.engine"),
        "staleness_max": figure(report, "staleness.max"),
        "seconds": seconds,
    }
