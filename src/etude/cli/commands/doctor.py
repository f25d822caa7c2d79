"""`etude doctor`: checks which parts work on this machine, and whether engine and trainer agree.

Owns the options; the modules that it imports own the checks. `etude check` checks the needs of one recipe.
"""

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.imports import without_collections
from etude.cli.options import Overrides, group
from etude.errors import ConfigError

app = group()


@app.command()
def doctor(
    *,
    parity: Annotated[
        bool, typer.Option("--parity", help="Compare engine and trainer layer by layer, bit by bit.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A Hugging Face checkpoint (default: random weights).")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="A run folder or URL. With --parity: compare its newest weights; with --fleet: check its processes.",
        ),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(metavar="FLEET", help="Check the stores, clocks, keys and gateways of a fleet's regions."),
    ] = None,
    overrides: Overrides,
) -> int:
    """Check what works on this machine or fleet, and whether engine and trainer agree."""
    if fleet is not None:
        if parity or model is not None or overrides:
            raise ConfigError("--fleet can be combined with --run only: it compares no engine with a trainer")
        from etude.cli.actions.examine_fleet import show_fleet

        return show_fleet(fleet, run)
    ignored = [name for name, value in {"model": model, "run": run, "set": overrides}.items() if value]
    if ignored and not parity:
        raise ConfigError(f"--{', --'.join(ignored)} would have no effect without --parity")
    if model is not None and run is not None:
        raise ConfigError("--model and --run: give one of the two")
    if not parity:
        with without_collections():
            from etude.cli.actions.examine_machine import show_machine

        show_machine()
        return 0
    with without_collections():
        from etude.cli.actions.compare_numerics import compare_model, compare_run

    return compare_model(model, overrides) if run is None else compare_run(run, overrides)
