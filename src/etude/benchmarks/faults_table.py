"""The object of `etude bench faults` as a table for people."""

from rich.console import Console
from rich.table import Table

from etude.benchmarks.envelope import heading
from etude.types import Json

_COLUMNS = ("injected", "runs", "recovered", "went_on", "restarted", "resumed", "median_s", "longest_s")
_WIDTH = 120


def table(result: dict[str, Json]) -> str:
    """Kinds of fault and how they were got over, then the errors that runs ended with, findings and goals."""
    rows, goals = result["results"], result["goals"]
    assert isinstance(rows, list) and isinstance(goals, dict)
    drawing = Table(
        title=heading(result, f"seed {result['seed']}", f"{result['injected']} of {result['planned']} faults")
    )
    drawing.add_column("fault")
    for column in _COLUMNS:
        drawing.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        assert isinstance(row, dict)
        drawing.add_row(str(row["case"]), *("–" if row[column] is None else str(row[column]) for column in _COLUMNS))
    console = Console(width=_WIDTH)
    with console.capture() as capture:
        console.print(drawing)
        for title in ("endings", "findings"):
            found = result[title]
            assert isinstance(found, dict | list)
            lines = [f"{times} × {text}" for text, times in found.items()] if isinstance(found, dict) else found
            for line in lines:
                console.print(f"{title}: {line}", markup=False)
        for name, goal in goals.items():
            console.print(f"{name}: {goal}", markup=False)
    return capture.get()
