"""A run's report as one self-contained HTML page: no script, no font, no network.

Owns the order of the page and its style sheet. Every figure is from the report; every text is escaped.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Literal

from etude.dashboard import formatting
from etude.dashboard.calls import reported_turns
from etude.dashboard.formatting import number_at
from etude.dashboard.heldout import about_errors, comparison, full_marks
from etude.dashboard.plots import (
    HEIGHT,
    TALL,
    EstimateMark,
    Line,
    Points,
    estimate_plot,
    line_plot,
    share_bars,
    smooth,
    stacked_bars,
)
from etude.dashboard.text import phases, summary
from etude.telemetry.metrics import METRICS, Chart, charts
from etude.types import Json

NO_BREAK_HYPHEN = "\u2011"

STYLE = """
:root { color-scheme: light dark; --paper: #fcfbf8; --ink: #22211f; --soft: #77736c; --hair: #e5e1d9; --main: #1f6f8b;
  --side: #b0a99c; --warn: #b4552d; }
@media (prefers-color-scheme: dark) { :root { --paper: #17181a; --ink: #e8e5de; --soft: #98948b; --hair: #303236;
  --main: #6cb6cf; --side: #6f6b64; --warn: #e08a5f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%; }
main { max-width: 900px; margin: 0 auto; padding: 56px 28px 40px; }
header p { margin: 0; color: var(--soft); } header p.warning { margin-top: 12px; color: var(--warn); }
h1 { margin: 6px 0 8px; max-width: 26ch; font: 500 34px/1.2 Charter, Georgia, "Noto Serif", "DejaVu Serif", serif;
  letter-spacing: -.01em; text-wrap: balance; }
h2 { margin: 48px 0 20px; padding-top: 10px; border-top: 1px solid var(--hair); color: var(--soft);
  font: 600 13px/1.4 system-ui, sans-serif; }
.below { margin-top: 24px; }
.note { margin: 8px 0 0; color: var(--soft); font-size: 13px; }
section.pair { margin-top: 44px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(290px, 1fr)); gap: 36px 56px; }
.gain { font: 500 44px/1.1 Charter, Georgia, "Noto Serif", "DejaVu Serif", serif; }
.gain small { font-size: 20px; color: var(--soft); }
.card h3, figcaption { margin: 0 0 6px; font: 600 14px/1.4 system-ui, sans-serif; }
.card p { margin: 2px 0 16px; color: var(--soft); }
figure { margin: 0; min-width: 0; }
figure > svg { display: block; overflow: visible; }
.plot { padding: 0 72px 28px 38px; }
.plot figcaption { margin: 0 -72px 12px -38px; }
.estimate { padding: 0 16px 24px 52px; }
.bars figcaption { margin-bottom: 10px; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .name, svg .value { fill: var(--ink); font-size: 13px; }
.grid { stroke: var(--hair); }
.bound { stroke: var(--warn); stroke-dasharray: 3 4; }
svg text.end.main { fill: var(--main); font-weight: 600; }
svg text.end.bound { fill: var(--warn); stroke: none; }
.curve { overflow: visible; }
.curve * { fill: none; stroke-linecap: round; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
polyline.main { stroke: var(--main); stroke-width: 2.25; }
polyline.side { stroke: var(--side); stroke-width: 1.25; }
path.dots { stroke: var(--side); stroke-width: 4; }
path.dots.main { stroke: var(--main); stroke-width: 6; }
.error { stroke-width: 2; } .error.main { stroke: var(--main); } .error.side { stroke: var(--side); }
.dot.main { fill: var(--main); } .dot.side { fill: var(--side); }
.track { fill: var(--hair); } .fill { fill: var(--main); }
.stack { padding-left: 52px; } .stack figcaption { margin-left: -52px; }
.stack text { font-size: 11px; } .stack text.light { fill: var(--paper); } .stack text.dark { fill: var(--ink); }
table { width: 100%; border-collapse: collapse; }
th, td { padding: 6px 0; border-bottom: 1px solid var(--hair); text-align: left; vertical-align: top; }
th { width: 9.5em; padding-right: 16px; font-weight: 400; color: var(--soft); }
.figures caption { padding-bottom: 6px; text-align: left; font: 600 14px/1.4 system-ui, sans-serif; }
.figures th, .figures td { width: auto; padding: 5px 0; }
.figures td, .figures thead th + th { padding-left: 12px; text-align: right; white-space: nowrap; }
.figures thead th { color: var(--soft); font-size: 13px; }
details { margin-top: 40px; } summary { cursor: pointer; font-weight: 600; font-size: 14px; }
details h3 { margin: 20px 0 4px; font: 600 13px/1.4 ui-monospace, monospace; }
details td, details th { padding: 2px 0; border: 0; font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
details th { width: 15em; }
footer { margin-top: 48px; padding-top: 12px; border-top: 1px solid var(--hair); color: var(--soft); font-size: 13px; }
@media (max-width: 480px) { main { padding: 28px 18px; } h1 { font-size: 27px; } th { width: 7em; }
  details th { width: 11em; } }
@media print { main { padding: 0; } figure, .card { break-inside: avoid; } }
"""


def html_page(title: str, body: str) -> str:
    """A whole page around the parts of its ``<main>``."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · étude</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def render_page(report: Mapping[str, Json]) -> str:
    """The whole page, for ``report.html``."""
    body = f"""{_header(report)}
{_result(report)}
{_calls(report)}
{_charts(report, "Learning")}
{_charts(report, "Health")}
{_positions(report)}
<h2>Machine</h2>
<div class="pair">
{_busy(report)}
{_time(report)}
</div>
<h2>Everything</h2>
{_table(summary(report))}
<details><summary>Configuration</summary>{_config(report)}</details>
{_footer(report)}"""
    return html_page(str(report["name"]), body)


def _header(report: Mapping[str, Json]) -> str:
    steps, seconds = (
        formatting.count(number_at(report, "steps")),
        formatting.duration(number_at(report, "seconds.total")),
    )
    extent = f"{_start(report)} to the last evaluation" if report["finished"] else "so far, not finished"
    learning = report["learning"]
    assert isinstance(learning, dict)
    warning = learning["nothing_learnt"] or learning["warning"]
    notice = f'<p class="warning">{escape(str(warning))}</p>' if warning else ""
    return (
        f"<header><p>étude · {escape(str(report['name']))} · seed {escape(str(report['seed']))}</p>"
        f"<h1>{_headline(report)}</h1><p>{steps} RL steps, {seconds} {extent}</p>{notice}</header>"
    )


def _headline(report: Mapping[str, Json]) -> str:
    """The sampled result, before and after: a share of tasks if rewards are 0 or 1, else the mean reward."""
    gain, marks = comparison(report, "sampled"), full_marks(report, "sampled")
    before, after = gain.value(gain.before), gain.value(gain.after)
    tasks = f"{formatting.count(number_at(report, 'heldout.n'))} held{NO_BREAK_HYPHEN}out tasks"
    if gain.before is None:
        return "Not evaluated"
    if not gain.is_rate:
        way = before if gain.after is None else f"{before} → {after}"
        return f"Mean reward {way} on {tasks} ({marks})"
    return (
        f"{before} of {tasks} solved before RL" if gain.after is None else f"From {before} to {after} of {tasks} solved"
    )


def _start(report: Mapping[str, Json]) -> str:
    """The model that the run started from."""
    config = report["config"]
    assert isinstance(config, dict)
    model = config["model"]
    assert isinstance(model, dict)
    place = Path(str(model["checkpoint"]))
    return f"from {escape('/'.join(place.parts[-2:]))}" if model["checkpoint"] else "from random weights"


def _result(report: Mapping[str, Json]) -> str:
    if number_at(report, "heldout.n") is None:
        return ""
    cards = _card(report, "Sampled, temperature 1", "sampled") + _card(report, "Greedy", "greedy")
    note = f'<p class="note">{escape(about_errors(report))}</p>'
    return f'<section class="pair" aria-label="Held-out result">{cards}</section>{note}'


def _card(report: Mapping[str, Json], title: str, mode: str) -> str:
    figures, marks = comparison(report, mode), full_marks(report, mode)
    unit = " points" if figures.is_rate else ""
    spread = f" <small>± {figures.error(figures.stderr)}{unit}</small>" if figures.stderr is not None else ""
    parts = [f"{figures.value(figures.before)} → {figures.value(figures.after)}"]
    if figures.interval is not None:
        low, high = map(figures.change, figures.interval)
        parts.append(f"95 % interval {low} to {high}")
    estimates = [
        EstimateMark(label="before", share=figures.before, stderr=figures.stderr_before, style="side"),
        EstimateMark(label="after", share=figures.after, stderr=figures.stderr_after, style="main"),
    ]
    return (
        f'<div class="card"><h3>{title}</h3><div class="gain">{figures.change(figures.gain)}{spread}</div>'
        f"<p>{' · '.join([*parts, marks] if marks else parts)}</p>{estimate_plot(title, estimates)}</div>"
    )


def _calls(report: Mapping[str, Json]) -> str:
    """Two figures with the calls of sampled sessions, turn by turn."""
    sides = {label: reported_turns(report, label) for label in ("before", "after")}
    names = list(dict.fromkeys(name for turns in sides.values() for turn in turns for name in turn))
    if not names:
        return ""
    figures = "".join(
        stacked_bars(f"Calls {label} RL, sampled", [(f"turn {n}", turn) for n, turn in enumerate(turns, 1)], names)
        for label, turns in sides.items()
    )
    return f'<div class="pair below">{figures}</div>'


def _charts(report: Mapping[str, Json], section: Literal["Learning", "Health"]) -> str:
    """A section of charts; charts without data are left out, and so is a section without charts."""
    drawn = [(chart.wide, _chart(report, chart, names)) for chart, names in charts(section)]
    wide = "".join(svg for is_wide, svg in drawn if is_wide)
    beside = [_midtrain(report)] * (section == "Learning") + [svg for is_wide, svg in drawn if not is_wide]
    if not wide and not any(beside):
        return ""
    pair = f'<div class="pair below">{"".join(beside)}</div>' if any(beside) else ""
    return f"<h2>{section}</h2>{wide}{pair}"


def _chart(report: Mapping[str, Json], chart: Chart, names: Sequence[str]) -> str:
    """The lines of one chart; the last metric is the main one."""
    lines: list[Line] = []
    for name in names:
        points, style = _points(report, name), "main" if name == names[-1] else "side"
        if chart.wide:
            lines.append(Line(points=points, label="", style="dots"))
            points = smooth(points)
        newest = formatting.write_metric(METRICS[name], points[-1][1]) if points else ""
        lines.append(Line(points=points, label=METRICS[name].label or newest, style=style))
    bound = number_at(report, chart.bound) if chart.bound else None
    height, marked = (TALL if chart.wide else HEIGHT), None if bound is None else (bound, chart.bound_label)
    return line_plot(chart.title, lines, height=height, log=chart.log, bound=marked)


def _midtrain(report: Mapping[str, Json]) -> str:
    lines = [
        Line(points=_points(report, "loss", curve="midtrain_curve"), label="all text", style="side"),
        Line(points=_points(report, "action_loss", curve="midtrain_curve"), label="actions", style="main"),
    ]
    return line_plot("Mid-training loss, nats per token", lines)


def _positions(report: Mapping[str, Json]) -> str:
    """The mismatch by position in the completion; errors from the cache grow down this table."""
    section = report["mismatch"]
    rows = section["by_position"] if isinstance(section, dict) else None
    if not isinstance(rows, list):
        return ""
    columns = ("tokens", "k3", "p99", "max", "equal bits")
    heads = "".join(f'<th scope="col">{column}</th>' for column in columns)
    lines = (
        f'<tr><th scope="row">{_range(number_at(row, "first"), number_at(row, "last"))}</th>{_cells(row)}</tr>'
        for row in rows
        if isinstance(row, dict)
    )
    return (
        '<table class="figures below"><caption>Mismatch by position in the completion</caption>'
        f'<thead><tr><th scope="col">position</th>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    )


def _range(first: float | None, last: float | None) -> str:
    if last is None:
        return f"{first:g} and beyond"
    return f"{first:g}" if last == first else f"{first:g}–{last:g}"


def _cells(row: Mapping[str, Json]) -> str:
    texts = (
        formatting.count(number_at(row, "tokens")),
        *(formatting.small(number_at(row, key)) for key in ("k3", "p99", "max")),
        formatting.percent(number_at(row, "equal"), 0),
    )
    return "".join(f"<td>{text}</td>" for text in texts)


def _busy(report: Mapping[str, Json]) -> str:
    shares = ((name, number_at(report, f"busy.{name}")) for name in ("trainer", "engine"))
    return share_bars("Busy during RL", [(name, share, formatting.percent(share, 0)) for name, share in shares])


def _time(report: Mapping[str, Json]) -> str:
    """Phases of the run as shares of the total time; the rest is starting and stopping."""
    total_s = number_at(report, "seconds.total")
    bars: list[tuple[str, float | None, str]] = []
    for label, seconds in phases(report):
        bars.append((label, seconds / total_s if total_s else None, formatting.duration(seconds)))
    return share_bars("Time", bars) if bars else ""


def _points(report: Mapping[str, Json], key: str, *, curve: str = "curve") -> Points:
    """The values of ``key`` over steps, without steps that have none."""
    rows = report[curve]
    assert isinstance(rows, list)
    pairs = [(number_at(point, "step"), number_at(point, key)) for point in rows if isinstance(point, dict)]
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def _table(rows: Sequence[tuple[str, str]]) -> str:
    lines = (f'<tr><th scope="row">{escape(label)}</th><td>{escape(text)}</td></tr>' for label, text in rows)
    return f"<table>{''.join(lines)}</table>"


def _config(report: Mapping[str, Json]) -> str:
    """The resolved configuration, one table per section."""
    config = report["config"]
    assert isinstance(config, dict)
    return "".join(_config_tables(config, ""))


def _config_tables(values: Mapping[str, Json], name: str) -> Iterator[str]:
    tables = {key: value for key, value in values.items() if isinstance(value, dict) and value}
    yield f"<h3>[{escape(name)}]</h3>" if name else ""
    yield _table([(key, _value(value)) for key, value in values.items() if key not in tables])
    for key, table in tables.items():
        yield from _config_tables(table, f"{name}.{key}".lstrip("."))


def _value(value: Json) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _footer(report: Mapping[str, Json]) -> str:
    machine = report["machine"]
    assert isinstance(machine, dict)
    parts = [f"{key} {value}" for key, value in machine.items()]
    parts += [f"commit {report['commit']}" if report["commit"] else "commit unknown", str(report["date"])]
    return f"<footer>{escape(' · '.join(parts))}</footer>"
