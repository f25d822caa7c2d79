"""The console on which commands print tables and text."""

import sys

from rich.console import Console

PIPE_COLUMNS = 100_000
"""Width of a pipe: no line of text is broken."""


def console() -> Console:
    """Colours and its width on a terminal; plain text and whole lines in a pipe."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(width=width, highlight=False, markup=False, emoji=False)
