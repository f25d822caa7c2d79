"""The tab *Run*: current figures, and curves over steps."""

from dataclasses import asdict
from typing import cast

from etude.clock import date_utc
from etude.dashboard.learning import warnings
from etude.dashboard.report import build_figures
from etude.dashboard.text import summary
from etude.rewards.judge.budget import Spend, SpendFile
from etude.run.machine_info import describe_machine, source_commit
from etude.telemetry.metrics import METRICS
from etude.types import Json
from etude.ui.curves import Curves, RolloutCurves
from etude.ui.routes import Routes, RunQuery
from etude.ui.runs import RunReader

CURVES = ("midtrain_curve", "sft_curve", "heldout_curve")
"""Sections of a report that the page gets from its curves instead."""


def report(query: RunQuery) -> Json:
    """The current figures of ``report.json`` without its curves, the report page's table, current warnings, and the
    judges' spending. They are of the newest phase, and some minutes old for a long run.
    """
    return query.run.figures(f"report {query.options.get('phase', '')}", lambda: _report(query))


def curves(query: RunQuery) -> Json:
    """Columns over steps after ``since``, all or those of ``names``; complete columns if the client's ``revision`` is
    old.
    """
    with query.run.folded(Curves) as folded:
        since = query.number("since", -1) if query.number("revision", -1) == folded.revision else -1
        return folded.columns(since, frozenset(filter(None, query.options.get("names", "").split(","))))


def read_ahead(run: RunReader) -> None:
    """Read the data for :func:`curves` in advance."""
    with run.folded(Curves):
        pass


def rollout_curves(query: RunQuery) -> Json:
    """Sums over training rollouts by weight version, from ``since``."""
    with query.run.folded(RolloutCurves) as folded:
        return folded.columns(query.number("since", 0))


def metric_table() -> Json:
    """Titles, units and notations by name, in the order of the table."""
    return {name: {**asdict(metric), "notation": str(metric.notation)} for name, metric in METRICS.items()}


def _report(query: RunQuery) -> Json:
    run, metrics = query.run, query.run.metrics
    figures = build_figures(metrics, run.config, machine=describe_machine(), date=date_utc(), commit=source_commit())
    cheating = figures["cheating"]
    assert isinstance(cheating, dict)
    del cheating["by_step"]
    table = cast("list[Json]", [[label, text] for label, text in summary(figures)])
    plain = {name: value for name, value in figures.items() if name not in CURVES}
    return plain | {"summary": table, "warnings": list(warnings(metrics)), "judges": _judges(query)}


def _judges(query: RunQuery) -> Json:
    """Calls and tokens of the judges of all processes; ``None`` if there are none."""
    spent = SpendFile(query.run.folder.path, worker_id=-1).others()
    return None if spent == Spend() else asdict(spent)


ROUTES: Routes = {"GET /report": report, "GET /curves": curves, "GET /rollout-curves": rollout_curves}
