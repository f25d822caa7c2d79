"""`etude check`: tests whether this machine has all that a recipe needs. `etude run` begins with the same checks.

Owns the output. The checks are in :mod:`etude.run.preflight`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from etude.cli.options import Overrides, RecipePath, group
from etude.config.loading import load_fleet, load_recipe
from etude.config.recipe import RunConfig
from etude.dashboard.terminal import DIM, GOOD, WARN
from etude.errors import ConfigError
from etude.run.gpu_machine import GpuMachine
from etude.run.local import default_out
from etude.run.preflight import MachineFinding, check_ready
from etude.run.pretend import check_pretended

app = group()


@app.command()
def check(
    recipe: RecipePath,
    *,
    overrides: Overrides,
    pretend: Annotated[str, typer.Option(metavar="MACHINE", help="Check it for another machine, such as h100x8.")] = "",
    fleet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --pretend: a fleet of such machines.")
    ] = None,
) -> None:
    """Check whether a recipe can run here, as `etude run` does first.

    No run folder is made. With --pretend: which GPU each process gets, memory, numerics.
    """
    config = load_recipe(recipe, overrides)
    if pretend:
        machines = load_fleet(fleet) if fleet else None
        show(check_pretended(config, GpuMachine.parse(pretend), machines), Console())
    elif fleet:
        raise ConfigError("--fleet needs --pretend; to check real machines, use `etude doctor --fleet`")
    else:
        show_ready(config, default_out(config), Console())


def show_ready(config: RunConfig, out: Path, console: Console) -> None:
    """Print what a new run at ``out`` needs, one line per check as it ends.

    Raises :class:`~etude.errors.UserError` for what is missing.
    """
    show(check_ready(config, out), console)


def show(findings: Iterable[MachineFinding], console: Console) -> None:
    """Print findings as they come."""
    for finding in findings:
        mark = Text("✓ ", GOOD) if finding.works else Text("! ", WARN)
        console.print(mark.append(f"{finding.name:<9} ", DIM).append(finding.words, "default"), soft_wrap=True)
