"""`etude fleet`: the machines of a run: files for clusters that restart processes themselves, changes, status.

Owns the options; the modules that it imports do the rest.
"""

import json
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from etude.cli.options import Overrides, RecipePath, group, own_name
from etude.errors import ConfigError
from etude.run.process_name import ProcessName

FleetPath: TypeAlias = Annotated[Path, typer.Argument(metavar="FLEET", help="A TOML file: regions and launcher.")]
Run: TypeAlias = Annotated[str, typer.Option("--run", metavar="RUN", help="The run folder, or the URL of a run.")]

app = group()


@app.command()
def render(
    fleet: FleetPath,
    recipe: RecipePath,
    *,
    launcher: Annotated[
        Literal["kubernetes", "slurm"] | None, typer.Option(help="Kind of cluster (default: the fleet's launcher).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to create.")] = Path("manifests"),
    overrides: Overrides,
) -> None:
    """Write the files with which a cluster starts and restarts the processes of a run. Nothing is started."""
    from etude.cli.actions.manage_fleet import render_files

    render_files(fleet, recipe, overrides, launcher, out)


@app.command()
def create(
    fleet: FleetPath,
    recipe: RecipePath,
    *,
    ledger: Annotated[str, typer.Option(metavar="URL", help="ledger.url: postgresql://USER@HOST/DATABASE.")] = "",
    overrides: Overrides,
) -> None:
    """Create a run in the store of a fleet's home region, where the processes of `etude fleet render` open it."""
    from etude.cli.actions.manage_fleet import create_on_fleet

    settings = [f"ledger.url={json.dumps(ledger)}"] if ledger else []
    create_on_fleet(fleet, recipe, [*overrides, *settings])


@app.command()
def apply(fleet: FleetPath, *, run: Run) -> None:
    """Change the number and resources of a fleet's processes; each region follows within seconds."""
    from etude.cli.actions.manage_fleet import apply_fleet

    apply_fleet(fleet, run)


@app.command()
def status(*, run: Run) -> None:
    """Show the desired and the observed processes, as the supervisor of each region wrote them into its store."""
    from etude.cli.actions.manage_fleet import show_status

    show_status(run)


@app.command()
def drain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A process, as `etude fleet status` names it.")],
    *,
    run: Run,
    undo: Annotated[bool, typer.Option("--undo", help="Allow it to be placed again.")] = False,
) -> None:
    """Stop a process and do not place it again, to free its machine for something else."""
    try:
        process = ProcessName.parse(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if process.command == "train":
        raise ConfigError("a run makes no progress without its trainer: stop the run instead; --resume continues it")
    from etude.run.placement import fleet_objects
    from etude.run.working_folder import open_run_folder

    objects = fleet_objects(open_run_folder(run), process.region)
    if undo:
        objects.undrain(name)
        print(f"the run's supervisor will place {name} again within seconds")
    else:
        objects.drain(name)
        print(f"{name} will stop within seconds; undo with: {own_name()} fleet drain {name} --run {run} --undo")


@app.command("run")
def run_region(
    *, run: Run, region: Annotated[str, typer.Option(help="The region; `etude run` itself supervises home.")]
) -> None:
    """Supervise the processes of one region, in that region, until stopped. The home region says what is to run."""
    from etude.run.fleet_region import keep_region

    keep_region(run, region, print)
