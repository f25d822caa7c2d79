"""The demo's page: goals, what went wrong and when, and each region over time; one file of HTML, as reports are.

Owns the order of the page. Style sheet and plots are the dashboard's.
"""

from collections.abc import Mapping, Sequence
from html import escape

from bench.tables import results_of, shown
from etude.dashboard.page import STYLE
from etude.dashboard.plots import Line, line_plot
from etude.types import Json

CURVE_S = 5
"""Seconds of one point of a curve."""
GOAL_COLUMNS = ("goal", "reached", "wanted", "met")
FAULT_COLUMNS = ("case", "region", "at_s", "lasted_s", "over_s")
REGION_COLUMNS = ("region", "rtt_ms", "busy", "worst_excess_s", "versions", "weight_copies", "link_bytes")


def render_page(result: Mapping[str, Json]) -> str:
    """The whole page."""
    goals = result["goals"]
    assert isinstance(goals, dict)
    met = sum(bool(goal["met"]) for goal in goals.values() if isinstance(goal, dict))
    regions = results_of(result, "regions")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fleet · étude</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><p>étude · fleet demo · {escape(str(result["date"]))} · {escape(str(result["commit"]))}</p>
<h1>{len(regions)} regions, {len(results_of(result))} faults, {met} of {len(goals)} goals met</h1>
<p>{escape(str(result["run_seconds"]))} s; placed by {escape(str(result["launcher"]))}</p></header>
<h2>Goals</h2>
{_table(GOAL_COLUMNS, [_goal(name, goal) for name, goal in goals.items() if isinstance(goal, dict)])}
<h2>Faults</h2>
{_table(FAULT_COLUMNS, [_cells(FAULT_COLUMNS, row) for row in results_of(result)])}
<h2>Regions</h2>
{_table(REGION_COLUMNS, [_cells(REGION_COLUMNS, row) for row in regions])}
<div class="pair below">{"".join(_throughput(row, results_of(result)) for row in regions)}</div>
<footer>{escape(_machine(result))}</footer>
</main>
</body>
</html>
"""


def _machine(result: Mapping[str, Json]) -> str:
    machine = result["machine"]
    assert isinstance(machine, dict)
    return " · ".join(f"{name} {value}" for name, value in machine.items())


def _goal(name: str, goal: Mapping[str, Json]) -> list[str]:
    value = goal["value"]
    reached = str(goal.get("reason", "–")) if value is None else str(value)
    return [name, reached, f"{goal['sense']} {goal['goal']}", "yes" if goal["met"] else "no"]


def _cells(columns: Sequence[str], row: Mapping[str, Json]) -> list[str]:
    return [shown(column, row.get(column)) for column in columns]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    return f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _throughput(row: Mapping[str, Json], faults: Sequence[Mapping[str, Json]]) -> str:
    """Tokens per second of a region over the seconds of the demo; dots where a fault of its own struck."""
    curve = row["tokens_per_s"]
    assert isinstance(curve, list)
    points = [(float(CURVE_S * (index + 1)), float(str(value))) for index, value in enumerate(curve)]
    struck = [(float(str(fault["at_s"])), 0.0) for fault in faults if fault["region"] == row["region"]]
    lines = [Line(points=points, label="", style="main"), Line(points=struck, label="", style="dots main")]
    return line_plot(f"{row['region']}, {row['rtt_ms']} ms: tokens per second", lines)
