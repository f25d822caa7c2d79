"""Draw the panel of a recorded run as it looked at one moment, and its final table: the picture of the README.

    python tools/picture.py RUN OUT.svg [SHARE]

Replays the events of a run folder up to ``SHARE`` of its time (0.7 unless said otherwise) through the code that draws
the live panel; nothing is measured here. The same run gives the same bytes.
"""

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from etude.dashboard.run_metrics import RunMetrics
from etude.dashboard.terminal import final_table, render
from etude.run.folder import RunFolder
from etude.telemetry.log import EventReader

COLUMNS = 100
SHARE = 0.7
NAME = "etude"
"""Prefix of the picture's CSS classes, which rich would draw at random."""


def main(arguments: Sequence[str]) -> int:
    """Write the picture."""
    run, out, *rest = arguments
    Path(out).write_text(picture(RunFolder(Path(run)), float(rest[0]) if rest else SHARE), encoding="utf-8")
    return 0


def picture(folder: RunFolder, share: float) -> str:
    """SVG of a run that has ended."""
    config, report = folder.config(), json.loads(folder.report_json.read_text(encoding="utf-8"))
    events = EventReader(folder.events).new()
    now_s = events[0].at_s + share * (events[-1].at_s - events[0].at_s)
    metrics = RunMetrics()
    for logged in events:
        if logged.at_s <= now_s:
            metrics.add(logged)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(metrics, config, now_s))
    console.print(final_table(report))
    return console.export_svg(title=f"etude run recipes/{config.name}", theme=DIMMED_MONOKAI, unique_id=NAME)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
