"""Consoles on which commands print: tables and text for people or pipes, results, and the log on stderr."""

import sys

from rich.console import Console

from etude.dashboard.formatting import visible

PIPE_COLUMNS = 100_000
"""Width of a pipe: no line of text is broken."""
OUT, PROGRESS = Console(), Console(stderr=True)
"""Stdout for results, stderr for the log."""


def console() -> Console:
    """Colours and its width on a terminal; plain text and whole lines in a pipe."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(width=width, highlight=False, markup=False, emoji=False)


def log(line: str) -> None:
    """Print a line of the log to stderr."""
    PROGRESS.out(visible(line), highlight=False)
