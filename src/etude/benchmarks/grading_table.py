"""The object of `etude bench grading` as a table for people."""

from rich.console import Console
from rich.table import Table

from etude.benchmarks.envelope import heading
from etude.types import Json

_WIDTH = 130


def table(result: dict[str, Json]) -> str:
    """Each case by each grader, the counts, the goals."""
    rows, cases, goals = result["results"], result["cases"], result["goals"]
    assert isinstance(rows, list) and isinstance(cases, list) and isinstance(goals, dict)
    names = [str(row["contestant"]) for row in rows if isinstance(row, dict)]
    drawing = Table(title=heading(result))
    drawing.add_column("left by the agent")
    for name in names:
        drawing.add_column(name, justify="center")
    honest = None
    for case in cases:
        assert isinstance(case, dict)
        if case["honest"] is not honest:
            honest = case["honest"]
            drawing.add_section()
            drawing.add_row("[bold]honest solutions" if honest else "[bold]attacks")
        drawing.add_row(str(case["case"]), *(_shown(case, name) for name in names))
    drawing.add_section()
    for figure in ("attacks_accepted", "honest_rejected", "errors"):
        drawing.add_row(figure.replace("_", " "), *(str(row[figure]) for row in rows if isinstance(row, dict)))
    console = Console(width=_WIDTH)
    with console.capture() as capture:
        console.print(drawing)
        for name, goal in goals.items():
            console.print(f"{name}: {goal}")
    return capture.get()


def _shown(case: dict[str, Json], name: str) -> str:
    accepted = case["accepted"]
    assert isinstance(accepted, dict)
    if name not in accepted:
        return "error"
    return "pass" if accepted[name] else "–"
