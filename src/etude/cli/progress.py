"""Progress of long commands on stderr: a bar on a terminal, lines in a log."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from etude.run.evaluate import Progress
from etude.run.progress_display import LINE_S


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """Progress on stderr while the context is open: a bar on a terminal, elsewhere a line every ``LINE_S``."""
    out = Console(stderr=True)
    if not out.is_terminal:
        yield _progress_lines(title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=out, transient=True) as bars:
        bar = bars.add_task(title, total=None)
        yield lambda ended, planned: bars.update(bar, completed=ended, total=planned)


def _progress_lines(title: str) -> Progress:
    """Progress as lines for a log, at most one every ``LINE_S``, and one at the end."""
    started_s = time.monotonic()
    printed_s, printed = -math.inf, -1

    def show(ended: int, planned: int) -> None:
        nonlocal printed_s, printed
        now_s = time.monotonic()
        if ended != printed and (now_s - printed_s >= LINE_S or ended == planned):
            printed_s, printed = now_s, ended
            print(f"[{now_s - started_s:6.0f} s] {title}: {ended} of {planned}", file=sys.stderr, flush=True)

    return show
