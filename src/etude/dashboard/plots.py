"""Small plots as inline SVG: lines over steps, shares as bars, measurements with their error.

Owns geometry, not colour: every shape has a class that the page's style sheet paints, so that light and dark mode need
no work here. Horizontal positions are in percent and stretch with the page; vertical ones are in pixels, so that text
keeps its size on a phone. Curves are in a nested ``<svg>`` that stretches, with strokes that do not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from etude.dashboard import formatting

Points: TypeAlias = Sequence[tuple[float, float]]
"""(x, y) in data units, x ascending; without unknown values."""

ACROSS = 1000
"""Horizontal units of a curve's nested ``<svg>``: so fine that rounding to whole units is invisible."""
MARGIN = 1.6
"""Factor by which the scale of a frontier extends beyond its dots, on each side."""
HEIGHT, TALL = 150, 220
"""Height of a plot in pixels, and of one as wide as the page."""
LABEL_GAP = 13
"""Minimum distance of two labels at the end of lines, in pixels."""
SHADE, FAINTEST, DARK = 0.2, 0.35, 0.75
"""Opacity in stacked bars: the step from name to name, the minimum, and the threshold from which text is light."""
LABELLED = 0.2
"""Minimum share of a stacked bar that has room for its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve and the label at its end."""

    points: Points
    label: str
    style: str
    """``main`` (the curve to look at), ``side`` (its companion) or ``dots`` (raw values behind a smooth curve)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Vertical scale from data to pixels, with round ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    height: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixels from the top."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self.height * (1 - (value - low) / (high - low))


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateMark:
    """A measured share, its standard error and its label."""

    label: str
    share: float | None
    stderr: float | None
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierDot:
    """A measured share with its interval, and its cost or effort."""

    label: str
    amount: float
    """Cost, tokens or seconds; above 0."""
    share: float
    low: float
    high: float


def line_plot(
    title: str,
    lines: Sequence[Line],
    *,
    height: int = HEIGHT,
    log: bool = False,
    bound: tuple[float, str] | None = None,
    axis: str = "steps",
) -> str:
    """Line plot over steps, or over the unit ``axis``; empty if no line has a point. ``bound`` is a labelled threshold
    line.
    """
    drawn = [line for line in lines if line.points]
    if not drawn:
        return ""
    values = [y for line in drawn for _, y in line.points] + ([bound[0]] if bound else [])
    steps = [x for line in drawn for x, _ in line.points]
    scale = _log_scale(values, height) if log else _linear_scale(values, height)
    first, last = min(steps), max(steps)

    def across(step: float) -> float:
        return (step - first) / (last - first) if last > first else 0.5

    shapes = [_tick(scale(tick), _tick_text(tick, log)) for tick in scale.ticks]
    shapes += [_step_mark(across(step), step, height) for step in _step_ticks(first, last)]
    shapes += [_curve(line, across, scale) for line in drawn]
    named = [(scale(line.points[-1][1]), line.label, line.style) for line in drawn if line.label]
    if bound:
        y = scale(bound[0])
        shapes.append(f'<line class="bound" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        named.append((y, bound[1], "bound"))
    shapes += _end_labels(named, height)
    spoken = "; ".join(
        f"{line.label or title} from {line.points[0][1]:.3g} to {line.points[-1][1]:.3g}" for line in drawn
    )
    return _figure(title, f"{title} over {axis} {first:g} to {last:g}: {spoken}", shapes, height, "plot")


def estimate_plot(title: str, estimates: Sequence[EstimateMark]) -> str:
    """Shares as dots on a line from 0 to 100 %, with a bar of one standard error to each side."""
    row, height = 26, 26 * len(estimates) + 4
    shapes = []
    for tick in (0, 25, 50, 75, 100):
        shapes.append(f'<line class="grid" x1="{tick}%" x2="{tick}%" y1="0" y2="{height}"/>')
        shapes.append(f'<text class="tick" x="{tick}%" y="{height + 15}" text-anchor="middle">{tick}%</text>')
    spoken = []
    for index, one in enumerate(estimates):
        y = row * index + row / 2 + 2
        shapes.append(f'<text class="name" x="-10" y="{y + 4}" text-anchor="end">{escape(one.label)}</text>')
        if one.share is None:
            continue
        error = one.stderr or 0.0
        low, high = (100 * max(0.0, min(1.0, one.share + side)) for side in (-error, error))
        shapes.append(f'<line class="error {one.style}" x1="{low:.2f}%" x2="{high:.2f}%" y1="{y}" y2="{y}"/>')
        shapes.append(
            f'<circle class="dot {one.style}" cx="{100 * max(0.0, min(1.0, one.share)):.2f}%" cy="{y}" r="5"/>'
        )
        spoken.append(f"{one.label} {formatting.percent(one.share)} ± {100 * error:.1f}")
    return _figure("", f"{title}: {', '.join(spoken) or 'not measured'}", shapes, height, "estimate")


def share_bars(title: str, shares: Sequence[tuple[str, float | None, str]]) -> str:
    """Bar chart of shares by name: full width is 100 %, the label is above the right end."""
    row, height = 40, 40 * len(shares)
    shapes = []
    for index, (label, share, words) in enumerate(shares):
        y, width = row * index, 100 * min(1.0, share or 0.0)
        shapes += [
            f'<text class="name" x="0" y="{y + 14}">{escape(label)}</text>',
            f'<text class="value" x="100%" y="{y + 14}" text-anchor="end">{escape(words)}</text>',
            f'<rect class="track" x="0" y="{y + 21}" width="100%" height="5" rx="2.5"/>',
            f'<rect class="fill" x="0" y="{y + 21}" width="{width:.2f}%" height="5" rx="2.5"/>',
        ]
    spoken = ", ".join(f"{label} {words}" for label, _, words in shares)
    return _figure(title, f"{title}: {spoken}", shapes, height, "bars")


def stacked_bars(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str]) -> str:
    """Bar chart of parts of a whole, one bar per row: each name has its shade, and is written if there is room."""
    row, shapes, spoken = 26, [], []
    for index, (label, shares) in enumerate(rows):
        y, start = row * index, 0.0
        shapes += [
            f'<text class="name" x="-10" y="{y + 15}" text-anchor="end">{escape(label)}</text>',
            f'<rect class="track" x="0" y="{y + 2}" width="100%" height="19"/>',
        ]
        for name in (name for name in names if name in shares):
            share, opacity = shares[name], max(FAINTEST, 1 - SHADE * names.index(name))
            words = f"{name} {formatting.percent(share, 0)}"
            shapes.append(
                f'<rect class="fill" x="{100 * start:.2f}%" y="{y + 2}" width="{100 * share:.2f}%" height="19" '
                f'fill-opacity="{opacity:.2f}"><title>{escape(words)}</title></rect>'
            )
            if share >= LABELLED:
                ink = "light" if opacity >= DARK else "dark"
                shapes.append(f'<text class="{ink}" x="{100 * start:.2f}%" dx="6" y="{y + 15}">{escape(words)}</text>')
            start += share
        spoken.append(
            f"{label}: " + ", ".join(f"{name} {formatting.percent(share, 0)}" for name, share in shares.items())
        )
    return _figure(title, f"{title}. {'; '.join(spoken)}", shapes, row * len(rows), "stack")


def frontier_plot(title: str, dots: Sequence[FrontierDot], *, height: int = 260) -> str:
    """Shares on the vertical axis over amounts on a logarithmic horizontal one: further left is better. A line joins
    the dots that no other dot beats in both. Empty without a dot.
    """
    placed = [dot for dot in dots if dot.amount > 0]
    if not placed:
        return ""
    scale = _linear_scale([0.0, 1.0], height)
    low, high = min(dot.amount for dot in placed), max(dot.amount for dot in placed)
    low, high = low / MARGIN, high * MARGIN

    def across(amount: float) -> float:
        return math.log(amount / low) / math.log(high / low)

    best = frontier(placed)
    shapes = [_tick(scale(tick), formatting.percent(tick, 0)) for tick in scale.ticks]
    shapes += [
        f'<text class="tick" x="{100 * across(amount):.2f}%" y="{height + 18}" text-anchor="middle">{amount:.3g}</text>'
        for amount in sorted({dot.amount for dot in placed})
    ]
    shapes.append(_curve(Line(points=[(dot.amount, dot.share) for dot in best], label="", style="main"), across, scale))
    for dot in placed:
        x, style = f"{100 * across(dot.amount):.2f}%", "main" if dot in best else "side"
        y, top, bottom = (scale(min(1.0, max(0.0, share))) for share in (dot.share, dot.high, dot.low))
        shapes.append(f'<line class="error {style}" x1="{x}" x2="{x}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
        shapes.append(f'<circle class="dot {style}" cx="{x}" cy="{y:.1f}" r="5"/>')
        shapes.append(f'<text class="name" x="{x}" dx="9" y="{y - 7:.1f}">{escape(dot.label)}</text>')
    spoken = "; ".join(f"{dot.label} {formatting.percent(dot.share)} at {dot.amount:.3g}" for dot in placed)
    return _figure(title, f"{title}: {spoken}", shapes, height, "plot")


def frontier(dots: Sequence[FrontierDot]) -> list[FrontierDot]:
    """The dots that no other dot with the same amount or less exceeds in share, ordered by amount."""
    best: list[FrontierDot] = []
    for dot in sorted(dots, key=lambda dot: (dot.amount, -dot.share)):
        if not best or dot.share > best[-1].share:
            best.append(dot)
    return best


def smooth(points: Points, radius: int = 3) -> list[tuple[float, float]]:
    """Moving average over ``radius`` neighbours on both sides, fewer at the ends."""
    windows = (points[max(0, index - radius) : index + radius + 1] for index in range(len(points)))
    return [(x, sum(y for _, y in near) / len(near)) for (x, _), near in zip(points, windows, strict=True)]


def _figure(title: str, spoken: str, shapes: Sequence[str], height: int, style: str) -> str:
    caption = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    return (
        f'<figure class="{style}">{caption}<svg role="img" aria-label="{escape(spoken)}" width="100%" '
        f'height="{height}">{"".join(shapes)}</svg></figure>'
    )


def _tick(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="-8" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _step_mark(share: float, step: float, height: int) -> str:
    return f'<text class="tick" x="{100 * share:.2f}%" y="{height + 18}" text-anchor="middle">{step:g}</text>'


def _curve(line: Line, across: Callable[[float], float], scale: Scale) -> str:
    """A polyline, or for dots a path of zero-length strokes, whose round caps stay round when stretched."""
    placed = [(round(ACROSS * across(x)), scale(y)) for x, y in line.points]
    if line.style == "dots" or len(placed) == 1:
        path = " ".join(f"M{x} {y:.1f}h0" for x, y in placed)
        shape = f'<path class="dots {line.style}" d="{path}"/>'
    else:
        shape = f'<polyline class="{line.style}" points="{" ".join(f"{x},{y:.1f}" for x, y in placed)}"/>'
    height = f"{scale.height:g}"
    return (
        f'<svg class="curve" viewBox="0 0 {ACROSS} {height}" width="100%" height="{height}" '
        f'preserveAspectRatio="none">{shape}</svg>'
    )


def _end_labels(labels: Sequence[tuple[float, str, str]], height: float) -> list[str]:
    """Labels to the right of the lines' ends, moved apart if they would overlap, and kept above the step marks."""
    ordered = sorted(labels)
    places = [y for y, _, _ in ordered]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + LABEL_GAP)
    limit = height - 2.0
    for index in reversed(range(len(places))):
        places[index] = limit = min(places[index], limit)
        limit -= LABEL_GAP
    return [
        f'<text class="end {style}" x="100%" dx="8" y="{y + 4:.1f}">{escape(text)}</text>'
        for y, (_, text, style) in zip(places, ordered, strict=True)
    ]


def _linear_scale(values: Sequence[float], height: float) -> Scale:
    """Scale with round ticks around the data, and 0 at the bottom if the data nearly reach it."""
    low, high = min(values), max(values)
    if 0 < low < 0.5 * high:
        low = 0.0
    if high == low:
        high = low + (abs(low) or 1.0)
    unit = _round_step((high - low) / 3)
    first, last = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    ticks = tuple(round(index * unit, 12) for index in range(first, last + 1))
    return Scale(low=ticks[0], high=ticks[-1], ticks=ticks, height=height)


def _log_scale(values: Sequence[float], height: float) -> Scale:
    """Scale of whole decades around the data; values that are not positive are at the bottom."""
    positive = [value for value in values if value > 0] or [1.0]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    last = max(last, first + 1)
    every = math.ceil((last - first) / 4)
    ticks = tuple(10.0**decade for decade in range(first, last + 1, every))
    return Scale(low=10.0**first, high=10.0**last, ticks=ticks, height=height, log=True)


def _round_step(width: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least ``width``."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width * (1 - 1e-9))


def _step_ticks(first: float, last: float) -> list[float]:
    if last <= first:
        return [first]
    unit = max(1.0, _round_step((last - first) / 5))
    inner = [index * unit for index in range(math.ceil(first / unit), math.floor(last / unit) + 1)]
    return [first, *(tick for tick in inner if tick - first > unit / 2 and last - tick > unit / 2), last]


def _tick_text(tick: float, log: bool) -> str:
    if log:
        return f"10{formatting.superscript(round(math.log10(tick)))}"
    return f"{tick:g}".replace("-", "−")
