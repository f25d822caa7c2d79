"""How the object of a bench is shown to people: its results row by row, then its goals and what else is to be said.

    bench summaries · 2026-11-22 · 1a2b3c4
    ┃ contestant ┃ seed ┃ pass before ┃ pass after ┃
    │ trained    │    0 │        0.14 │       0.81 │

    lift: 0.672, goal at least 0.2, met

Owns the drawing alone. What is measured, and the goals, are the bench's; machine, date and commit are
:mod:`bench.report`'s.
"""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from bench.report import heading
from etude.types import Json

WIDTH = 150
"""Columns of a page; tables are as wide as their contents."""
NOTHING = "–"
"""Placeholder for a missing value of a row."""
_WORDS = ("case", "contestant", "experts")
"""Columns of words, which begin at the left; figures end at the right."""

Row = Mapping[str, Json]


def results_of(result: Row, name: str = "results") -> list[Row]:
    """The rows of a bench object under ``name``."""
    rows = result[name]
    assert isinstance(rows, list)
    return [row for row in rows if isinstance(row, dict)]


def draw(title: str, rows: Iterable[Row], columns: Sequence[str], *, under: str = "") -> Table:
    """A table of ``columns``; with ``under``, sections with the values of that column as their headings."""
    drawing = Table(title=title)
    for column in columns:
        drawing.add_column(_label(column), justify="left" if column in _WORDS else "right")
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(str(row[under]) if under else "", []).append(row)
    for section, members in sections.items():
        if under:
            drawing.add_section()
            drawing.add_row(f"[bold]{section}")
        for row in members:
            drawing.add_row(*(shown(column, row.get(column)) for column in columns))
    return drawing


def page(result: Row, *tables: Table, notes: Iterable[str] = ()) -> str:
    """``tables``, the goals of a bench object, ``notes``, and the reasons for missing contestants."""
    goals = result["goals"]
    assert isinstance(goals, dict)
    console = Console(width=WIDTH)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
        lines = [f"{name}: {_judged(goal)}" for name, goal in goals.items() if isinstance(goal, dict)]
        for line in (*lines, *notes, *_missing(results_of(result))):
            console.print(line, markup=False, highlight=False)
    return capture.get()


def results_page(result: Row, columns: Sequence[str], *details: str, under: str = "", notes: Iterable[str] = ()) -> str:
    """The page of a bench whose results are one table; ``details`` stand in its title."""
    return page(result, draw(heading(result, *details), results_of(result), columns, under=under), notes=notes)


def shown(column: str, value: Json) -> str:
    """A value as it stands in ``column``: bytes in MB, ranges by their ends."""
    if value is None:
        return NOTHING
    if isinstance(value, list):
        return " … ".join(shown(column, item) for item in value)
    return f"{float(str(value)) / 1e6:.3g} MB" if column.endswith("_bytes") else str(value)


def _label(column: str) -> str:
    return column.removesuffix("_bytes").replace("_", " ")


def _judged(goal: Row) -> str:
    """``0.672, goal at least 0.2, met``, then all other fields of the goal."""
    words = ["not measured" if goal["value"] is None else str(goal["value"])]
    if goal["goal"] is not None:
        words += [f"goal {goal['sense']} {goal['goal']}", "met" if goal["met"] else "NOT met"]
    text = ("meaning", "value", "goal", "sense", "met")
    words += [f"{key} {_listed(value)}" for key, value in goal.items() if key not in text and value is not None]
    return ", ".join(words)


def _listed(value: Json) -> str:
    return " · ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


def _missing(rows: Iterable[Row]) -> list[str]:
    return sorted({f"{_who(row)}: {row['missing']}" for row in rows if row.get("missing")})


def _who(row: Row) -> str:
    return ", ".join(str(row[key]) for key in ("contestant", "case") if key in row)
