"""Evaluations in the terminal: one version's figures, or two versions' side by side.

Owns the layout for people; 80 columns suffice. Every figure comes from :mod:`etude.dashboard.evaluation`, none is made
here.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from etude.dashboard.report import figure
from etude.dashboard.terminal import ACCENT, DIM, WARN
from etude.dashboard.units import MISSING, count, decimal, percent, points, signed, small
from etude.types import Json

WAYS = ("sampled", "greedy")
"""In the order in which they are shown."""
Notation = Callable[[float | None], str]
"""How a figure is written."""


def evaluation_table(figures: Mapping[str, Json]) -> RenderableType:
    """One version: what it passes, and what that takes."""
    parts: list[RenderableType] = [_title([figures])]
    for way in _ways(figures):
        table = _table(_tries(figures, way), "mean", "95 % interval")
        for label, path, written, _ in _rows(figures, way):
            of = partial(figure, figures)
            low, high = written(of(f"{path}.low")), written(of(f"{path}.high"))
            table.add_row(label, Text(written(of(f"{path}.value")), "bold"), f"{low} to {high}")
        parts += [Text(), table]
    return Group(*parts, *_footnotes(figures))


def comparison_table(
    before: Mapping[str, Json], after: Mapping[str, Json], differences: Mapping[str, Json]
) -> RenderableType:
    """Two versions on the tasks that both have tried, and the difference."""
    parts: list[RenderableType] = [_title([before, after])]
    for way in _ways(differences):
        table = _table(
            _tries(after, way), f"v{before['version']}", f"v{after['version']}", "difference", "95 % interval"
        )
        for label, path, written, changed in _rows(after, way):
            value, low, high = (figure(differences, f"{path}.{name}") for name in ("value", "low", "high"))
            is_clear = value is not None and low is not None and high is not None and low * high > 0
            table.add_row(
                label,
                written(figure(before, f"{path}.value")),
                written(figure(after, f"{path}.value")),
                Text(changed(value), "bold" if is_clear else "default"),
                f"{changed(low)} to {changed(high)}",
            )
        parts += [Text(), table, _test(differences, way)]
    return Group(*parts, *_footnotes(differences))


def _title(versions: list[Mapping[str, Json]]) -> RenderableType:
    first, last = versions[0], versions[-1]
    names = [f"{version['run']} v{version['version']}" for version in versions]
    if len(names) > 1 and first["run"] == last["run"]:
        names[1] = f"v{last['version']}"
    text = Text(" → ".join(names), f"bold {ACCENT}")
    passes = f"graded {figure(last, 'pass_at'):g} or better passes"
    return text.append(f" · {count(figure(last, 'tasks'))} held-out tasks · {passes}", DIM)


def _ways(figures: Mapping[str, Json]) -> list[str]:
    return [way for way in WAYS if way in figures]


def _tries(figures: Mapping[str, Json], way: str) -> Text:
    """How often tasks were tried, as the name of the first column."""
    passes, missing = figure(figures, f"{way}.passes"), figure(figures, f"{way}.missing")
    text = Text(way if way == "greedy" else f"sampled ×{count(passes)}", ACCENT)
    return text.append(f", {count(missing)} tries missing", WARN) if missing else text


def _section(figures: Mapping[str, Json], way: str) -> dict[str, Json]:
    section = figures[way]
    assert isinstance(section, dict)
    return section


def _rows(figures: Mapping[str, Json], way: str) -> Iterator[tuple[str, str, Notation, Notation]]:
    """Label, path, how the figure is written, and how a difference of two is."""
    section = _section(figures, way)
    rates = section["pass"]
    assert isinstance(rates, dict)
    for k in rates:
        yield f"pass@{k}", f"{way}.pass.{k}", percent, points
    yield "reward", f"{way}.reward", partial(decimal, digits=3), partial(signed, digits=3)
    parts = section["parts"]
    assert isinstance(parts, dict)
    for name in parts:
        yield f"  {name}", f"{way}.parts.{name}", partial(decimal, digits=3), partial(signed, digits=3)
    for name in ("sampled_tokens", "new_tokens", "prompt_tokens", "turns", "seconds", "summaries", "cost"):
        if name in section and (name != "summaries" or figure(figures, f"{way}.{name}.value")):
            yield LABELS[name], f"{way}.{name}", _number, _signed_number


LABELS: Mapping[str, str] = {
    "sampled_tokens": "tokens sampled",
    "new_tokens": "tokens read",
    "prompt_tokens": "tokens prompted",
    "turns": "turns",
    "seconds": "seconds",
    "summaries": "summaries",
    "cost": "cost",
}
"""Figure of a try → its row."""


def _test(differences: Mapping[str, Json], way: str) -> RenderableType:
    wins, losses, ties, p = (figure(differences, f"{way}.sign_test.{name}") for name in ("wins", "losses", "ties", "p"))
    name = "McNemar, exact" if way == "greedy" else "exact sign test over tasks"
    text = Text(f"better on {count(wins)} tasks, worse on {count(losses)}, alike on {count(ties)}: ")
    return text.append(f"p = {small(p)}", "bold" if p is not None and p < 0.05 else "default").append(f" ({name})", DIM)


def _footnotes(figures: Mapping[str, Json]) -> Iterator[RenderableType]:
    methods: dict[str, None] = {}
    for way in _ways(figures):
        methods |= dict.fromkeys(_methods(_section(figures, way)))
    templates = max(figure(figures, f"{way}.templates") or 0.0 for way in _ways(figures))
    yield Text()
    yield Text(f"intervals over {count(templates)} templates: {'; '.join(methods)}", DIM)
    yield Text("tokens, turns, seconds and cost are per try; tokens read leave out what an earlier turn had", DIM)
    busy_s = figure(figures, "engine_seconds")
    if busy_s is not None:
        yield Text(f"engine busy {decimal(busy_s, 1)} s for all tries that were ever made of this version", DIM)


def _methods(section: Json) -> Iterator[str]:
    if isinstance(section, dict):
        method = section.get("method")
        if isinstance(method, str):
            yield method
        for part in section.values():
            yield from _methods(part)


def _table(first: Text, *names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, border_style=DIM, header_style=DIM, show_edge=False, pad_edge=False)
    table.add_column(first, min_width=16, overflow="fold")
    for name in names:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None) -> str:
    """Three digits or more, as sizes differ much."""
    if value is None or abs(value) >= 1000:
        return count(value)
    return small(value) if 0 < abs(value) < 1e-3 else f"{value:.3g}"


def _signed_number(value: float | None) -> str:
    return MISSING if value is None else f"{'+' if value >= 0 else '−'}{_number(abs(value))}"
