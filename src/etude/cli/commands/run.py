"""`etude run`: starts or continues the whole loop of a recipe, on this machine or on a fleet.

Owns the options, and the order in which code is imported: a wrong option or recipe is an error at once, and the fork
server imports while this process does. :mod:`etude.cli.actions.start_run` does the rest.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.imports import without_collections
from etude.cli.options import Overrides, group
from etude.config.data_paths import LIMIT_GIB
from etude.config.tasks import SandboxKind
from etude.errors import ConfigError
from etude.run.launchers.fork_server import fork_server

app = group()


@app.command()
def run(
    recipe: Annotated[
        Path | None, typer.Argument(help="A TOML file, a folder with run.toml, or a shipped name.")
    ] = None,
    *,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data, tasks and sampling.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to create (default: runs/NAME-sSEED, then -2, -3, …).")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Store the run at s3://BUCKET/PATH (gs://, az://, a folder), for all machines."
        ),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Continue an interrupted run, by its folder or its URL.")
    ] = None,
    overrides: Overrides,
    ledger: Annotated[
        str | None,
        typer.Option(metavar="URL", help="ledger.url: postgresql://USER@HOST/DATABASE for the run's state."),
    ] = None,
    sandbox: Annotated[SandboxKind | None, typer.Option(help="sandboxes.kind: where agents' commands run.")] = None,
    fleet: Annotated[
        Path | None, typer.Option(metavar="FLEET", help="A TOML file with the machines to run on (default: this one).")
    ] = None,
    copy_limit: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help=f"With --at: a recipe key's data above this size are not copied (default: {LIMIT_GIB:g}).",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
) -> int:
    """Run the whole loop of a recipe, on this machine or on a fleet."""
    decisive: dict[str, object] = {"recipe": recipe, "seed": seed, "out": out, "at": at, "copy-limit": copy_limit}
    decisive |= {"sandbox": sandbox, "ledger": ledger}
    if resume is not None:
        ignored = [name for name, value in decisive.items() if value is not None] + ["--dry-run"] * dry_run
        if ignored:
            raise ConfigError(f"{', '.join(ignored)} would have no effect with --resume: a run keeps its recipe")
        with without_collections():
            from etude.cli.actions.start_run import resume_run

        return resume_run(resume, overrides, fleet)
    if recipe is None:
        raise ConfigError("which recipe? try `etude run recipes/quickstart`, or --resume DIR")
    if at is not None and out is not None:
        raise ConfigError(f"--out {out} would have no effect with --at: the working folder lies below ETUDE_WORK")
    if copy_limit is not None and at is None:
        raise ConfigError(f"--copy-limit {copy_limit:g} would have no effect without --at: nothing is copied")
    from etude.cli.actions.run_recipe import read_recipe

    chosen = {"seed": seed, "sandboxes.kind": sandbox, "ledger.url": ledger}
    settings = [f"{key}={json.dumps(value)}" for key, value in chosen.items() if value is not None]
    config, machines = read_recipe(recipe, [*overrides, *settings], fleet)
    if dry_run:
        from etude.cli.actions.dry_run import print_recipe

        return print_recipe(config)
    if machines is None or machines.launcher == "local":
        fork_server()
    with without_collections():
        from etude.cli.actions.start_run import begin, begin_at

    if at is None:
        return begin(config, machines, out)
    return begin_at(at, config, machines, LIMIT_GIB if copy_limit is None else copy_limit)
