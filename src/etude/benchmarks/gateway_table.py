"""The object of `etude bench gateway` as a table for people."""

from rich.console import Console
from rich.table import Table

from etude.benchmarks.envelope import heading
from etude.types import Json

_COLUMNS = ("per_s", "cpu_us", "p50_ms", "p99_ms", "added_p50_ms", "added_p99_ms", "first_text_ms", "peak_bytes")
_WIDTH = 130


def table(result: dict[str, Json]) -> str:
    """Calls, then the goals, the cost of capture and who is missing."""
    rows, goals = result["results"], result["goals"]
    assert isinstance(rows, list) and isinstance(goals, dict)
    drawing = Table(title=heading(result))
    drawing.add_column("contestant")
    for column in _COLUMNS:
        drawing.add_column(column.replace("_bytes", "_mb").replace("_", " "), justify="right")
    case = None
    for row in rows:
        assert isinstance(row, dict)
        if row["case"] != case:
            case = row["case"]
            drawing.add_section()
            drawing.add_row(f"[bold]{case}")
        drawing.add_row(str(row["contestant"]), *(_shown(row.get(column), column) for column in _COLUMNS))
    console = Console(width=_WIDTH)
    with console.capture() as capture:
        console.print(drawing)
        for name, goal in goals.items():
            console.print(f"{name}: {goal}")
        console.print(f"cost of capture, us of CPU per call: {result['capture_us']}")
        for reason in sorted({str(row["missing"]) for row in rows if isinstance(row, dict) and row["missing"]}):
            console.print(reason, markup=False)
    return capture.get()


def _shown(value: Json, column: str) -> str:
    if value is None:
        return "–"
    return f"{float(str(value)) / 1e6:.0f}" if column == "peak_bytes" else str(value)
