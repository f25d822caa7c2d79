"""`etude fleet`: the machines of a run: files for clusters that restart processes themselves, changes, status."""

import json
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer
from rich.console import Console

from etude.cli.options import Overrides, RecipePath, group, own_name
from etude.config.fleet import RENDERED, FleetConfig
from etude.config.loading import load_fleet, load_recipe
from etude.dashboard.terminal import light_table
from etude.errors import ConfigError
from etude.run.fleet_changes import change_fleet, save_fleet
from etude.run.fleet_plan import plan_loop, plan_phases, settings_of
from etude.run.fleet_region import keep_region
from etude.run.fleet_status import region_status, state_words
from etude.run.folder import require_empty
from etude.run.launchers.kubernetes import render_manifests
from etude.run.launchers.slurm import render_sbatch
from etude.run.placement import check_change, fleet_objects, run_id
from etude.run.process_name import ProcessName
from etude.run.working_folder import create_run, open_run_folder

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
    config, machines = load_recipe(recipe, overrides), load_fleet(fleet)
    kind = launcher or machines.launcher
    if kind not in RENDERED:
        raise ConfigError(f"launcher = {kind!r} has no files: choose one by --launcher kubernetes or --launcher slurm")
    try:
        machines.check_automatic(kind)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    url = _run_url(machines, fleet)
    require_empty(out)
    files = (render_manifests if kind == "kubernetes" else render_sbatch)(
        plan_phases(config, machines, url), plan_loop(config, machines, url), machines, run_id(url)
    )
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
        print(out / name)


@app.command()
def create(
    fleet: FleetPath,
    recipe: RecipePath,
    *,
    ledger: Annotated[str, typer.Option(metavar="URL", help="ledger.url: postgresql://USER@HOST/DATABASE.")] = "",
    overrides: Overrides,
) -> None:
    """Create a run in the store of a fleet's home region, where the processes of `etude fleet render` open it."""
    machines = load_fleet(fleet)
    url = _run_url(machines, fleet)
    settings = [f"ledger.url={json.dumps(ledger)}"] if ledger else []
    config = load_recipe(recipe, [*overrides, *settings, *settings_of(machines)])
    plan_loop(config, machines, url)  # raises before there is a run
    folder = create_run(url, config, tell=print)
    save_fleet(folder, machines)
    print(f"the run is at {folder.url}: its processes open it there")


@app.command()
def apply(fleet: FleetPath, *, run: Run) -> None:
    """Change the number and resources of a fleet's processes; each region follows within seconds."""
    machines, folder = load_fleet(fleet), open_run_folder(run)
    check_change(folder, machines)
    if not fleet_objects(folder).generation():
        raise ConfigError(f"the regions of {folder.name} start after mid-training: repeat this command then")
    generation, desired = change_fleet(folder, machines)
    print(f"generation {generation} of the fleet: {len(desired.specs)} processes in {len(machines.regions)} regions")


@app.command()
def status(*, run: Run) -> None:
    """Show the desired and the observed processes, as the supervisor of each region wrote them into its store."""
    folder = open_run_folder(run, writes=False)
    home = fleet_objects(folder)
    if not (generation := home.generation()):
        raise ConfigError(f"{folder.name} has no fleet, or has not started it yet: `etude run` shows its processes")
    desired = home.desired(generation)
    table = light_table("name", "region", "machine", ">pid", ">MB", "state")
    for region in desired.fleet.regions:
        seen = region_status(folder, "" if region.name == desired.fleet.home else region.name, generation)
        if seen.remark:
            table.add_row("", region.name, "", "", "", seen.remark)
        for spec in desired.specs:
            if spec.region != region.name:
                continue
            status = seen.statuses.get(spec.name)
            table.add_row(
                spec.name,
                spec.region,
                status.host if status else "",
                str(status.pid) if status and status.pid else "",
                f"{status.memory_bytes / 1e6:.0f}" if status and status.memory_bytes else "",
                state_words(status, is_drained=spec.name in seen.drained),
            )
    print(f"generation {generation}")
    Console().print(table)


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
    keep_region(run, region, print)


def _run_url(fleet: FleetConfig, file: Path) -> str:
    """The URL of the run, which all machines can reach."""
    if not fleet.home_region.store:
        raise ConfigError(f"{file}: regions: {fleet.home} has no store: machines that share nothing else need an "
                          f"object store for the run, such as store = 's3://BUCKET/runs/NAME'")  # fmt: skip
    return fleet.home_region.store
