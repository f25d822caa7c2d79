"""`etude play`: shows how the agent of a run solves a held-out task, with one of its weight versions or with two.

Owns the options. :mod:`etude.cli.actions.played_task` does the rest.
"""

from typing import Annotated

import typer

from etude.cli.imports import without_collections
from etude.cli.options import RunPath, group

app = group()


@app.command(name="play")
def play_command(
    run: RunPath,
    *,
    version: Annotated[int | None, typer.Option(help="Weight version (default: the newest).")] = None,
    against: Annotated[int | None, typer.Option(metavar="VERSION", help="Another version, on the same task.")] = None,
    number: Annotated[int, typer.Option("--task", metavar="N", help="Number of the held-out task, from 0.")] = 0,
    sampled: Annotated[bool, typer.Option("--sampled", help="Sample at temperature 1 instead of greedily.")] = False,
) -> None:
    """Watch the agent of a run solve a held-out task, turn by turn, until it is graded."""
    with without_collections():
        from etude.cli.actions.played_task import show_task

    versions = [version] if against is None else [against, version]
    show_task(run, number, versions, temperature=1.0 if sampled else 0.0)
