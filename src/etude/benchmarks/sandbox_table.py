"""The object of `etude bench sandbox` as a table for people."""

from rich.console import Console
from rich.table import Table

from etude.benchmarks.envelope import heading
from etude.types import Json

_COLUMNS = ("ran_ms", "ran_p90_ms", "ran_min_ms", "whole_ms", "clean_ms", "per_s", "cpu_ms", "mb_each", "mb_own")
_WIDTH = 140


def table(result: dict[str, Json]) -> str:
    """Starts, rates and the rest, then what was left behind, the goals and who is missing."""
    rows, goals = result["results"], result["goals"]
    assert isinstance(rows, list) and isinstance(goals, dict)
    drawing = Table(title=heading(result))
    for column in ("case", "contestant"):
        drawing.add_column(column)
    for column in _COLUMNS:
        drawing.add_column(column.replace("_", " "), justify="right")
    notes: list[str] = []
    cases: dict[str, list[dict[str, Json]]] = {}
    for row in rows:
        assert isinstance(row, dict)
        if row.get("missing"):
            notes.append(f"{row['contestant']}, {row['case']}: {row['missing']}")
            continue
        cases.setdefault(str(row["case"]), []).append(row)
        notes += [f"{row['case']}: {name} {row[name]}" for name in ("grown", "left") if name in row]
    for case, members in cases.items():
        drawing.add_section()
        for row in members:
            drawing.add_row(case, str(row["contestant"]), *(_shown(row.get(column)) for column in _COLUMNS))
            case = ""
    console = Console(width=_WIDTH)
    with console.capture() as capture:
        console.print(drawing)
        for note in notes:
            console.print(note, markup=False)
        for name, goal in goals.items():
            console.print(f"{name}: {goal}", markup=False)
    return capture.get()


def _shown(value: Json) -> str:
    return "–" if value is None else str(value)
