"""Whole runs as the trials of a bench: kept in a folder, gone on with where a call was interrupted, read when done."""

import sys
from collections.abc import Callable
from pathlib import Path

from bench.loop.runs import run_midtraining
from etude.config.recipe import RunConfig
from etude.dashboard.report import build_report
from etude.dashboard.run_metrics import RunMetrics
from etude.run.folder import RunFolder
from etude.run.local import run_local
from etude.telemetry.log import EventReader
from etude.types import Json


def finished_run(path: Path, begin: Callable[[], RunFolder]) -> RunFolder:
    """The run at ``path``, at its end: made by ``begin`` if there is none, gone on with if it was interrupted."""
    folder = RunFolder.open(path) if path.exists() else begin()
    if not folder.report_json.exists():
        run_local(folder, out=sys.stderr)
    return folder


def midtrained(path: Path, config: RunConfig) -> RunFolder:
    """The run folder at ``path`` with mid-training behind it, made of ``config`` if there is none."""
    return run_midtraining(RunFolder.open(path) if path.exists() else RunFolder.create(path, config))


def report_of(folder: RunFolder, config: RunConfig) -> dict[str, Json]:
    """Results of a run's events; without machine and date, which the bench adds."""
    metrics = RunMetrics()
    for logged in EventReader(folder.events).new():
        metrics.add(logged)
    return build_report(metrics, config, machine={}, date="", commit="")
