"""`etude check`: all that a recipe needs of this machine, tried before there is a run; `etude run` begins with it.

Owns how it is shown. What is looked at is :mod:`etude.run.preflight`'s.
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
    """See if a recipe can run here: what `etude run` checks first.

    All of it is tried before there is a run folder. With --pretend: which GPU each process has, memory, numerics.
    """
    config = load_recipe(recipe, overrides)
    if pretend:
        machines = load_fleet(fleet) if fleet else None
        show(check_pretended(config, GpuMachine.parse(pretend), machines), Console())
    elif fleet:
        raise ConfigError("--fleet goes with --pretend; machines that are there: `etude doctor --fleet`")
    else:
        show_ready(config, default_out(config), Console())


def show_ready(config: RunConfig, out: Path, console: Console) -> None:
    """Print what a new run at ``out`` needs, a line each as it was found.

    Raises :class:`~etude.errors.UserError` for what is missing.
    """
    show(check_ready(config, out), console)


def show(findings: Iterable[MachineFinding], console: Console) -> None:
    """Print findings as they come."""
    for finding in findings:
        mark = Text("✓ ", GOOD) if finding.works else Text("! ", WARN)
        console.print(mark.append(f"{finding.name:<9} ", DIM).append(finding.words, "default"), soft_wrap=True)
