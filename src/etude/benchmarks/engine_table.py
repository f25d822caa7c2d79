"""The object of `etude bench engine` as tables for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from etude.benchmarks.envelope import heading
from etude.types import Json

_COLUMNS = ("tokens_per_cpu_s", "tokens_per_cpu_s_range", "tokens_per_s", "first_token_s", "peak_bytes")
_SWAP_COLUMNS = ("case", "changed_bytes", "pause_s", "in_place_s", "reload_s", "reload_disk_s")
_WIDTH = 150


def table(result: dict[str, Json]) -> str:
    """Tokens, swaps and sessions, then the goals and who is missing."""
    rows, swaps, goals = result["results"], result["swaps"], result["goals"]
    assert isinstance(rows, list) and isinstance(swaps, list) and isinstance(goals, dict)
    console = Console(width=_WIDTH)
    with console.capture() as capture:
        console.print(_tokens(heading(result), rows))
        console.print(_plain("new weights", _SWAP_COLUMNS, swaps))
        console.print(f"sessions: {result['sessions']}")
        if result["card"]:
            console.print(f"card: {result['card']}")
        for name, goal in goals.items():
            assert isinstance(goal, dict)
            console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in goal.items() if key != "each"))
        for reason in sorted({str(row["missing"]) for row in rows if isinstance(row, dict) and row["missing"]}):
            console.print(reason, markup=False)
    return capture.get()


def _tokens(title: str, rows: Sequence[Json]) -> Table:
    drawing = Table(title=title)
    drawing.add_column("contestant")
    for column in _COLUMNS:
        drawing.add_column(column.replace("_bytes", "").replace("_", " "), justify="right")
    case = None
    for row in rows:
        assert isinstance(row, dict)
        if row["case"] != case:
            case = row["case"]
            drawing.add_section()
            drawing.add_row(f"[bold]{case}")
        drawing.add_row(str(row["contestant"]), *(_shown(row.get(column), column) for column in _COLUMNS))
    return drawing


def _plain(title: str, columns: Sequence[str], rows: Sequence[Json]) -> Table:
    drawing = Table(title=title)
    for column in columns:
        drawing.add_column(
            column.replace("_bytes", "").replace("_", " "), justify="left" if column == "case" else "right"
        )
    for row in rows:
        assert isinstance(row, dict)
        drawing.add_row(*(_shown(row.get(column), column) for column in columns))
    return drawing


def _shown(value: Json, column: str) -> str:
    if value is None:
        return "–"
    if column.endswith("bytes"):
        return f"{float(str(value)) / 1e6:.3g} MB"
    if isinstance(value, list):
        return " … ".join(map(str, value))
    return str(value)
