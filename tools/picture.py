"""Draw a recorded run as a moving picture, its live panel from the start to the end and its final table: the README's.

    python tools/picture.py RUN OUT.svg

Replays the events of a run folder through the code that draws the live panel; nothing is measured here. The same run
gives the same bytes. The picture is SVG with an animation of CSS, which browsers play in a page as well as by itself;
for those who want no motion it stands still at the table.
"""

import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import DIMMED_MONOKAI

from etude.dashboard.run_metrics import RunMetrics
from etude.dashboard.terminal import final_table, render
from etude.run.folder import RunFolder
from etude.telemetry.log import EventReader

COLUMNS = 100
SHARES = (0.05, 0.2, 0.35, 0.5, 0.56, 0.62, 0.68, 0.74, 0.8, 0.86, 0.92)
"""Moments of the run that are shown, as shares of its time."""
PANEL_S, TABLE_S = 0.9, 6.0
"""Seconds that a panel and the table are shown."""
VIEW = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
FONT = re.compile(r"@font-face \{.*?\}\n", re.DOTALL)
"""Fonts from another host, which a picture in a page may not fetch."""
NAME = "etude"
"""Prefix of the CSS classes, which rich would draw at random."""


def main(arguments: Sequence[str]) -> int:
    """Write the picture."""
    run, out = arguments
    Path(out).write_text(picture(RunFolder(Path(run))), encoding="utf-8")
    return 0


def picture(folder: RunFolder) -> str:
    """SVG of a run that has ended."""
    config, report = folder.config(), json.loads(folder.report_json.read_text(encoding="utf-8"))
    title, events = f"etude run {config.name}", EventReader(folder.events).new()
    started_s, ended_s = events[0].at_s, events[-1].at_s
    metrics, frames, added = RunMetrics(), list[str](), 0
    for share in SHARES:
        now_s = started_s + share * (ended_s - started_s)
        while events[added].at_s <= now_s:
            metrics.add(events[added])
            added += 1
        frames.append(_frame(render(metrics, config, now_s), title, len(frames)))
    return moving([*frames, _frame(final_table(report), title, len(frames))])


def moving(frames: Sequence[str]) -> str:
    """One SVG that shows frames one after the other, the last one longest."""
    sizes = [tuple(map(float, match.groups())) for frame in frames if (match := VIEW.search(frame))]
    width, height = (max(size) for size in zip(*sizes, strict=True))
    total_s = PANEL_S * (len(frames) - 1) + TABLE_S
    style, shown = list[str](), list[str]()
    for index, (frame, (its_width, its_height)) in enumerate(zip(frames, sizes, strict=True)):
        begin, end = 100 * PANEL_S * index / total_s, min(100.0, 100 * PANEL_S * (index + 1) / total_s)
        is_last = index == len(frames) - 1
        after = "" if is_last else f" {end:.3f}% {{ visibility: hidden }}"
        before = "0% { visibility: hidden } " if index else ""
        style.append(f"@keyframes f{index} {{ {before}{begin:.3f}% {{ visibility: visible }}{after} }}")
        style.append(f".f{index} {{ animation: f{index} {total_s:.1f}s step-end infinite }}")
        still = "" if is_last else " moves"
        placed = VIEW.sub(f'width="{its_width}" height="{its_height}" \\g<0>', frame, count=1)
        shown.append(f'<g class="f{index}{still}">{placed}</g>')
    style.append("@media (prefers-reduced-motion) { g { animation: none !important } .moves { visibility: hidden } }")
    lines = [f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">']
    return "\n".join([*lines, "<style>", *style, "</style>", *shown, "</svg>\n"])


def _frame(shown: RenderableType, title: str, index: int) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(shown)
    return FONT.sub("", console.export_svg(title=title, theme=DIMMED_MONOKAI, unique_id=f"{NAME}{index}"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
