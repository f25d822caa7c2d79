"""`etude fleet`: the machines of a run: files for clusters that keep processes themselves, status, drain, a region."""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer
from rich.console import Console

from etude.cli.options import Overrides, RecipePath, group, own_name
from etude.config.fleet import RENDERED, FleetConfig
from etude.config.loading import load_fleet, load_recipe
from etude.dashboard.terminal import light_table
from etude.errors import ConfigError
from etude.fleet.specs import ProcessStatus
from etude.run.fleet_plan import plan_loop, plan_phases
from etude.run.fleet_region import keep_region
from etude.run.folder import require_empty
from etude.run.launchers.kubernetes import render_manifests
from etude.run.launchers.slurm import render_sbatch
from etude.run.placement import drained_of, place_on, run_id
from etude.run.process_name import ProcessName
from etude.run.working_folder import open_run_folder

FleetPath: TypeAlias = Annotated[Path, typer.Argument(metavar="FLEET", help="A TOML file: regions and launcher.")]
Run: TypeAlias = Annotated[str, typer.Option("--run", metavar="RUN", help="The run folder, or the URL of a run.")]

app = group()


@app.command()
def render(
    fleet: FleetPath,
    recipe: RecipePath,
    *,
    launcher: Annotated[
        Literal["kubernetes", "slurm"] | None, typer.Option(help="Default: the one that the fleet names.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to create.")] = Path("manifests"),
    overrides: Overrides,
) -> None:
    """Write the files by which a cluster starts and keeps the processes of a run, and change nothing anywhere."""
    config, machines = load_recipe(recipe, overrides), load_fleet(fleet)
    kind = launcher or machines.launcher
    if kind not in RENDERED:
        raise ConfigError(f"launcher = {kind!r} has no files: choose one by --launcher kubernetes or --launcher slurm")
    url = _run_url(machines, fleet)
    require_empty(out)
    files = (render_manifests if kind == "kubernetes" else render_sbatch)(
        plan_phases(config, machines, url), plan_loop(config, machines, url), machines, run_id(url)
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
        print(out / name)


@app.command()
def status(fleet: FleetPath, *, run: Run) -> None:
    """Show where the processes of a run are, and how they are."""
    machines, folder = load_fleet(fleet), open_run_folder(run, writes=False)
    if machines.launcher == "local":
        raise ConfigError(f"launcher = 'local': processes are children of `etude run`, which shows them; their output "
                          f"is in {folder.logs}")  # fmt: skip
    placement = place_on(machines, folder)
    specs = placement.own_specs(plan_loop(folder.config(), machines, placement.run_words(folder)))
    statuses, drained = placement.launcher.look(), placement.drained_names()
    table = light_table("name", "region", "machine", ">pid", ">MB", "state")
    for spec in specs:
        seen = statuses.get(spec.name)
        table.add_row(
            spec.name,
            spec.region,
            seen.host if seen else "",
            str(seen.pid) if seen and seen.pid else "",
            f"{seen.memory_bytes / 1e6:.0f}" if seen and seen.memory_bytes else "",
            _state(seen, is_drained=spec.name in drained),
        )
    Console().print(table)


@app.command()
def drain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A process, as `etude fleet status` names it.")],
    *,
    run: Run,
    undo: Annotated[bool, typer.Option("--undo", help="Let it be placed again.")] = False,
) -> None:
    """Let a process end, and not be placed again: its machine is wanted for something else."""
    try:
        process = ProcessName.parse(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if process.command == "train":
        raise ConfigError("a run without its trainer stands still: stop the run instead, --resume goes on")
    drained = drained_of(open_run_folder(run))
    if undo:
        drained.remove(name)
        print(f"{name} is placed again within seconds, by whoever supervises the run")
    else:
        drained.add(name)
        print(f"{name} is stopped within seconds; undo it with: {own_name()} fleet drain {name} --run {run} --undo")


@app.command("run")
def run_region(
    fleet: FleetPath,
    *,
    run: Run,
    region: Annotated[str, typer.Option(help="The region; home is `etude run`'s.")],
) -> None:
    """Supervise the processes of one region, beside its own cluster, until told to stop."""
    keep_region(open_run_folder(run), load_fleet(fleet), region, print)


def _run_url(fleet: FleetConfig, file: Path) -> str:
    """The place of the run, which all machines reach."""
    if not fleet.home_region.store:
        raise ConfigError(f"{file}: regions: {fleet.home} has no store: machines that share nothing else need an "
                          f"object store for the run, such as store = 's3://BUCKET/runs/NAME'")  # fmt: skip
    return fleet.home_region.store


def _state(status: ProcessStatus | None, *, is_drained: bool) -> str:
    """One process in a word or a few."""
    if is_drained:
        return "drained" if status is None else "draining"
    if status is None:
        return "not placed"
    if status.is_pending:
        return "waits for a machine with room"
    if status.is_lost:
        return "its machine does not answer"
    if status.exit_status is None:
        return "runs"
    return f"ended with status {status.exit_status}: {status.last_line}"
