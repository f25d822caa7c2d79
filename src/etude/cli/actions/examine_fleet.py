"""`etude doctor --fleet`: what works on the machines of a fleet, one line for each finding as it is made.

Findings are made by :mod:`etude.run.fleet_check`.
"""

import asyncio
from pathlib import Path

from rich.console import Console
from rich.text import Text

from etude.config.loading import load_fleet
from etude.dashboard.terminal import DIM, GOOD, WARN
from etude.errors import ExitCode
from etude.run.fleet_check import look_at_fleet
from etude.run.working_folder import open_run_folder


def show_fleet(fleet: Path, run: str | None) -> int:
    """Print each finding about a fleet and the processes of a run there, one per line; returns the exit status."""
    machines, console = load_fleet(fleet), Console()
    folder = None if run is None else open_run_folder(run, writes=False)

    async def show() -> bool:
        sound = True
        async for finding in look_at_fleet(machines, folder):
            mark = ("✓", GOOD) if finding.works else ("✗", WARN)
            console.print(Text.assemble(mark, "  ", (finding.name, DIM), "  ", finding.words))
            sound = sound and finding.works
        return sound

    return 0 if asyncio.run(show()) else ExitCode.USER_ERROR
