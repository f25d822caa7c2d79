"""The tab *Run*: figures of now, and curves over steps."""

from dataclasses import asdict

from etude.clock import date_utc
from etude.dashboard.report import build_report
from etude.run.machine_info import describe_machine, source_commit
from etude.telemetry.metrics import METRICS
from etude.types import Json
from etude.ui.curves import Curves
from etude.ui.routes import Routes, RunQuery


def report(query: RunQuery) -> Json:
    """The report of now, without the steps."""
    run = query.run
    figures = build_report(run.metrics, run.config, machine=describe_machine(), date=date_utc(), commit=source_commit())
    return {key: value for key, value in figures.items() if key != "curve"}


def curves(query: RunQuery) -> Json:
    """Columns over steps after ``since``; the whole again for who has an older ``revision``."""
    folded = query.run.fold(Curves)
    since = query.number("since", -1) if query.number("revision", -1) == folded.revision else -1
    return folded.columns(since)


def metric_table() -> Json:
    """Titles, units and notations by name, in the order of the table."""
    return {name: {**asdict(metric), "notation": str(metric.notation)} for name, metric in METRICS.items()}


ROUTES: Routes = {"GET /report": report, "GET /curves": curves}
