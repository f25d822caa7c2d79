"""Comparison of a suite's results: a table, and a page with the frontier of quality against cost, tokens and time.

    results of many models ──▶ a row each ──▶ table, page        results of one model on several days ──▶ plot

The page is self-contained: no script, no font, no network. Figures are over all tasks that each model attempted; if
these differ, a note says so. Owns the layout; every figure is :mod:`etude.dashboard.evaluation`'s.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from etude.dashboard.evaluation import figures
from etude.dashboard.formatting import MISSING, count, number_at, percent, small
from etude.dashboard.page import html_page
from etude.dashboard.plots import EstimateMark, FrontierDot, Line, estimate_plot, frontier_plot, line_plot
from etude.dashboard.suite_results import SuiteResults
from etude.dashboard.terminal import ACCENT, DIM
from etude.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One figure of a report."""

    title: str
    path: str
    """Path in the figures of ``sampled`` tries; ``{k}`` is the largest k of pass@k."""
    write: Callable[[float | None], str]


COLUMNS = (
    Column(title="pass@1", path="pass.1.value", write=percent),
    Column(title="pass@{k}", path="pass.{k}.value", write=percent),
    Column(title="cost", path="cost.value", write=small),
    Column(title="tokens read", path="prompt_tokens.value", write=count),
    Column(title="tokens sampled", path="sampled_tokens.value", write=count),
    Column(title="seconds", path="seconds.value", write=small),
    Column(title="seconds per call", path="call_s.value", write=small),
    Column(title="calls", path="turns.value", write=small),
    Column(title="tool errors", path="tool_errors.value", write=small),
)
"""Figures per attempt, in the order of columns."""
FRONTIERS = (
    ("Quality against cost of a try", "cost.value"),
    ("Quality against tokens sampled in a try", "sampled_tokens.value"),
    ("Quality against seconds of a try", "seconds.value"),
)
"""Titles of plots, and the figure on the horizontal axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """The results of one model, and their figures."""

    results: SuiteResults
    figures: Mapping[str, Json]

    def number(self, path: str) -> float | None:
        """A figure of its attempts."""
        return number_at(self.figures, "sampled." + path.format(k=self.results.passes))

    @property
    def interval(self) -> str:
        """The 95 % interval of pass@1."""
        return f"{percent(self.number('pass.1.low'))} to {percent(self.number('pass.1.high'))}"


def report_rows(every: Sequence[SuiteResults]) -> list[ReportRow]:
    """One row per result, ordered by pass rate, highest first."""
    rows = [ReportRow(results=each, figures=figures(each.evaluation(), each.measure())) for each in every]
    return sorted(rows, key=lambda row: -(row.number("pass.1.value") or 0.0))


def report_table(rows: Sequence[ReportRow]) -> RenderableType:
    """The text table of several results of a suite."""
    table = Table(box=box.SIMPLE_HEAD, border_style=DIM, header_style=DIM, show_edge=False, pad_edge=False)
    table.add_column("model", overflow="fold")
    columns = _columns(rows)
    for head in (columns[0].title, "95 % interval", *(column.title for column in columns[1:])):
        table.add_column(head.format(k=_most_passes(rows)), justify="right")
    for row in rows:
        first, *others = [column.write(row.number(column.path)) for column in columns]
        table.add_row(row.results.title, Text(first, "bold"), row.interval, *others)
    title = Text(_suites(rows), f"bold {ACCENT}")
    return Group(
        title.append(f" · {_extent(rows)}", DIM), Text(), table, Text(), *(Text(note, DIM) for note in _notes(rows))
    )


def report_page(rows: Sequence[ReportRow]) -> str:
    """The HTML page of several results of a suite."""
    best = rows[0]
    marks = [_mark(row.results.title, row) for row in rows]
    parts = [
        f"<header><p>étude · suite {escape(_suites(rows))}</p>"
        f"<h1>{escape(best.results.title)} solves {percent(best.number('pass.1.value'))}</h1>"
        f"<p>{escape(_extent(rows))}</p></header>",
        f'<h2>pass@1</h2><div class="wide">{estimate_plot("pass@1", marks)}</div>{_legend(rows)}',
    ]
    plots = [frontier_plot(title, _dots(rows, path)) for title, path in FRONTIERS]
    if any(plots):
        parts.append(
            "<h2>Quality, cost and speed</h2>" + "".join(f'<div class="below">{plot}</div>' for plot in plots if plot)
        )
        parts.append('<p class="note">Bars are 95 % intervals; a line joins what no other beats in both.</p>')
    if days := _days(rows):
        parts.append(f"<h2>Over time</h2>{days}")
    parts.append(f"<h2>Everything</h2>{_html_table(rows)}")
    parts += [f'<p class="note">{escape(note)}</p>' for note in _notes(rows)]
    return html_page(f"suite {_suites(rows)}", "\n".join(parts))


def _columns(rows: Sequence[ReportRow]) -> list[Column]:
    """The columns that have a figure; pass@k only if there were several passes."""
    several = _most_passes(rows) > 1
    return [
        column
        for column in COLUMNS
        if (several or "{k}" not in column.path) and any(row.number(column.path) is not None for row in rows)
    ]


def _mark(label: str, row: ReportRow) -> EstimateMark:
    share, error = row.number("pass.1.value"), row.number("pass.1.stderr")
    return EstimateMark(label=label, share=share, stderr=error, style="main")


def _dots(rows: Sequence[ReportRow], path: str) -> list[FrontierDot]:
    dots = []
    for row in rows:
        amount, share = row.number(path), row.number("pass.1.value")
        low, high = row.number("pass.1.low"), row.number("pass.1.high")
        if amount is not None and share is not None and low is not None and high is not None:
            dots.append(FrontierDot(label=row.results.title, amount=amount, share=share, low=low, high=high))
    return dots


def _days(rows: Sequence[ReportRow]) -> str:
    """A plot over days for each model with results of several days."""
    plots = []
    by_title = sorted(rows, key=lambda row: (row.results.title, row.results.date))
    for title, each in groupby(by_title, key=lambda row: row.results.title):
        dated = list(each)
        if len({row.results.date for row in dated}) > 1:
            first = date.fromisoformat(dated[0].results.date)
            points = [
                (float((date.fromisoformat(row.results.date) - first).days), 100 * (row.number("pass.1.value") or 0.0))
                for row in dated
            ]
            plots.append(
                line_plot(
                    f"{title}: pass@1 in %, over days since {first}", [Line(points=points, label="", style="main")]
                )
            )
    return "".join(f'<div class="below">{plot}</div>' for plot in plots)


def _html_table(rows: Sequence[ReportRow]) -> str:
    columns = _columns(rows)
    titles = ("model", "day", columns[0].title, "95 % interval", *(column.title for column in columns[1:]))
    heads = "".join(f'<th scope="col">{escape(title.format(k=_most_passes(rows)))}</th>' for title in titles)
    lines = []
    for row in rows:
        first, *others = [column.write(row.number(column.path)) for column in columns]
        cells = "".join(f"<td>{escape(text)}</td>" for text in (row.results.date, first, row.interval, *others))
        lines.append(f'<tr><th scope="row">{escape(row.results.title)}</th>{cells}</tr>')
    return f'<table class="figures"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _legend(rows: Sequence[ReportRow]) -> str:
    return f'<p class="note">A bar is one standard error; {escape(_extent(rows))}.</p>'


def _suites(rows: Sequence[ReportRow]) -> str:
    return ", ".join(sorted({f"{row.results.suite} {row.results.version}" for row in rows}))


def _extent(rows: Sequence[ReportRow]) -> str:
    tasks = sorted({len(row.results.tasks) for row in rows})
    numbers = count(tasks[0]) if len(tasks) == 1 else f"{count(tasks[0])} to {count(tasks[-1])}"
    return f"{numbers} tasks, tried {_most_passes(rows)} times at most"


def _most_passes(rows: Sequence[ReportRow]) -> int:
    return max(row.results.passes for row in rows)


def _notes(rows: Sequence[ReportRow]) -> list[str]:
    notes = ["figures are per try; intervals are over templates of tasks, or over tasks where there is one template"]
    if len({row.results.digest for row in rows}) > 1:
        notes.append("not all were tried at the same tasks: compare two by `etude suite compare`, which pairs them")
    missing = [(row.results.title, len(row.results.missing())) for row in rows]
    notes += [f"{title}: {count(number)} tries are missing" for title, number in missing if number]
    unpriced = [row.results.title for row in rows if row.results.prices is None]
    if 0 < len(unpriced) < len(rows):
        notes.append(f"no cost without prices ({MISSING}): {', '.join(unpriced)}")
    return notes
