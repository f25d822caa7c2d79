"""`etude check`: tests whether this machine has all that a recipe needs. `etude run` begins with the same checks.

Owns the options. The checks are in :mod:`etude.run.preflight`, their output in :mod:`etude.cli.actions.show_checks`.
"""

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import Overrides, RecipePath, group
from etude.errors import ConfigError

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
    if fleet and not pretend:
        raise ConfigError("--fleet needs --pretend; to check real machines, use `etude doctor --fleet`")
    from etude.cli.actions.show_checks import show_machine, show_pretended

    if pretend:
        show_pretended(recipe, overrides, pretend, fleet)
    else:
        show_machine(recipe, overrides)
