"""Terminal tables of an evaluation's figures, and of the difference of two evaluations.

Owns the choice and order of rows; the figures are :mod:`etude.dashboard.evaluation`'s.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from etude.dashboard.formatting import MISSING, count, decimal, number_at, percent, points, signed, small
from etude.dashboard.terminal import ACCENT, DIM, WARN
from etude.types import Json

MODES = ("sampled", "greedy")
"""Sampling modes in display order."""
Notation = Callable[[float | None], str]
"""Function that formats a figure."""


def evaluation_table(figures: Mapping[str, Json]) -> RenderableType:
    """Text table of one version: its pass rates, tokens, time and cost."""
    parts: list[RenderableType] = [_title([figures])]
    for mode in _modes(figures):
        table = _table(_tries(figures, mode), "mean", "95 % interval")
        for label, path, written, _ in _rows(figures, mode):
            of = partial(number_at, figures)
            low, high = written(of(f"{path}.low")), written(of(f"{path}.high"))
            table.add_row(label, Text(written(of(f"{path}.value")), "bold"), f"{low} to {high}")
        parts += [Text(), table]
    return Group(*parts, *_footnotes(figures))


def comparison_table(
    before: Mapping[str, Json], after: Mapping[str, Json], differences: Mapping[str, Json]
) -> RenderableType:
    """Text table of two versions on the tasks that both tried, and their difference."""
    parts: list[RenderableType] = [_title([before, after])]
    for mode in _modes(differences):
        table = _table(_tries(after, mode), str(before["label"]), str(after["label"]), "difference", "95 % interval")
        for label, path, written, changed in _rows(after, mode):
            value, low, high = (number_at(differences, f"{path}.{name}") for name in ("value", "low", "high"))
            is_clear = value is not None and low is not None and high is not None and low * high > 0
            table.add_row(
                label,
                written(number_at(differences, f"{path}.before")),
                written(number_at(differences, f"{path}.after")),
                Text(changed(value), "bold" if is_clear else "default"),
                f"{changed(low)} to {changed(high)}",
            )
        parts += [Text(), table, _test(differences, mode)]
    return Group(*parts, *_footnotes(differences))


def _title(versions: list[Mapping[str, Json]]) -> RenderableType:
    first, last = versions[0], versions[-1]
    names = [f"{version['run']} {version['label']}" for version in versions]
    if len(names) > 1 and first["run"] == last["run"]:
        names[1] = str(last["label"])
    text = Text(" → ".join(names), f"bold {ACCENT}")
    passes = f"graded {number_at(last, 'pass_at'):g} or better passes"
    return text.append(f" · {count(number_at(last, 'tasks'))} held-out tasks · {passes}", DIM)


def _modes(figures: Mapping[str, Json]) -> list[str]:
    return [mode for mode in MODES if mode in figures]


def _tries(figures: Mapping[str, Json], mode: str) -> Text:
    """The header of the first column: the sampling mode and the number of missing attempts."""
    passes, missing = number_at(figures, f"{mode}.passes"), number_at(figures, f"{mode}.missing")
    text = Text(mode if mode == "greedy" else f"sampled ×{count(passes)}", ACCENT)
    return text.append(f", {count(missing)} tries missing", WARN) if missing else text


def _section(figures: Mapping[str, Json], mode: str) -> dict[str, Json]:
    section = figures[mode]
    assert isinstance(section, dict)
    return section


def _rows(figures: Mapping[str, Json], mode: str) -> Iterator[tuple[str, str, Notation, Notation]]:
    """Rows: label, path, formatter of the figure, and formatter of a difference."""
    section = _section(figures, mode)
    rates = section["pass"]
    assert isinstance(rates, dict)
    for k in rates:
        yield f"pass@{k}", f"{mode}.pass.{k}", percent, points
    yield "reward", f"{mode}.reward", partial(decimal, digits=3), partial(signed, digits=3)
    parts = section["parts"]
    assert isinstance(parts, dict)
    for name in parts:
        yield f"  {name}", f"{mode}.parts.{name}", partial(decimal, digits=3), partial(signed, digits=3)
    for name in LABELS:
        if name in section and (name not in IF_ANY or number_at(figures, f"{mode}.{name}.value")):
            yield LABELS[name], f"{mode}.{name}", _number, _signed_number


LABELS: Mapping[str, str] = {
    "sampled_tokens": "tokens sampled",
    "new_tokens": "tokens read",
    "prompt_tokens": "tokens prompted",
    "turns": "turns",
    "seconds": "seconds",
    "call_s": "seconds per call",
    "tool_errors": "tool errors",
    "refused_calls": "calls refused",
    "summaries": "summaries",
    "cost": "cost",
}
"""Figure of an attempt → label of its row, in the order of rows."""


IF_ANY = ("summaries", "refused_calls")
"""Figures without a row if they are zero."""


def _test(differences: Mapping[str, Json], mode: str) -> RenderableType:
    wins, losses, ties, p = (
        number_at(differences, f"{mode}.sign_test.{name}") for name in ("wins", "losses", "ties", "p")
    )
    name = "McNemar, exact" if mode == "greedy" else "exact sign test over tasks"
    text = Text(f"better on {count(wins)} tasks, worse on {count(losses)}, alike on {count(ties)}: ")
    return text.append(f"p = {small(p)}", "bold" if p is not None and p < 0.05 else "default").append(f" ({name})", DIM)


def _footnotes(figures: Mapping[str, Json]) -> Iterator[RenderableType]:
    methods: dict[str, None] = {}
    for mode in _modes(figures):
        methods |= dict.fromkeys(_methods(_section(figures, mode)))
    templates = max(number_at(figures, f"{mode}.templates") or 0.0 for mode in _modes(figures))
    yield Text()
    yield Text(f"intervals over {count(templates)} templates: {'; '.join(methods)}", DIM)
    yield Text("tokens, turns, seconds and cost are per try; tokens read leave out what an earlier turn had", DIM)
    busy_s = number_at(figures, "engine_seconds")
    if busy_s:
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
    """Format with three digits or more, since the magnitudes differ much."""
    if value is None or abs(value) >= 1000:
        return count(value)
    return small(value) if 0 < abs(value) < 1e-3 else f"{value:.3g}"


def _signed_number(value: float | None) -> str:
    return MISSING if value is None else f"{'+' if value >= 0 else '−'}{_number(abs(value))}"
