"""Fleets and their runs, for `etude fleet`: files for clusters, a run on a fleet, changes of the fleet, its status."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from etude.config.fleet import RENDERED, FleetConfig
from etude.config.loading import load_fleet, load_recipe
from etude.dashboard.terminal import light_table
from etude.errors import ConfigError
from etude.run.fleet_changes import change_fleet, save_fleet
from etude.run.fleet_plan import plan_loop, plan_phases, settings_of
from etude.run.fleet_status import region_status, state_words
from etude.run.folder import require_empty
from etude.run.launchers.kubernetes import render_manifests
from etude.run.launchers.slurm import render_sbatch
from etude.run.placement import check_change, fleet_objects, run_id
from etude.run.working_folder import create_run, open_run_folder


def render_files(
    fleet: Path, recipe: Path, overrides: Sequence[str], launcher: Literal["kubernetes", "slurm"] | None, out: Path
) -> None:
    """Write the files of a cluster into an empty folder. Raises :class:`~etude.errors.ConfigError`."""
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


def create_on_fleet(fleet: Path, recipe: Path, overrides: Sequence[str]) -> None:
    """Create a run in the store of a fleet's home region. Raises :class:`~etude.errors.ConfigError`."""
    machines = load_fleet(fleet)
    url = _run_url(machines, fleet)
    config = load_recipe(recipe, [*overrides, *settings_of(machines)])
    plan_loop(config, machines, url)  # raises before there is a run
    folder = create_run(url, config, tell=print)
    save_fleet(folder, machines)
    print(f"the run is at {folder.url}: its processes open it there")


def apply_fleet(fleet: Path, run: str) -> None:
    """Let the regions of a run follow a changed fleet. Raises :class:`~etude.errors.ConfigError`."""
    machines, folder = load_fleet(fleet), open_run_folder(run)
    check_change(folder, machines)
    if not fleet_objects(folder).generation():
        raise ConfigError(f"the regions of {folder.name} start after mid-training: repeat this command then")
    generation, desired = change_fleet(folder, machines)
    print(f"generation {generation} of the fleet: {len(desired.specs)} processes in {len(machines.regions)} regions")


def show_status(run: str) -> None:
    """Print the desired and the observed processes of a run's fleet."""
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


def _run_url(fleet: FleetConfig, file: Path) -> str:
    """The URL of the run, which all machines can reach."""
    if not fleet.home_region.store:
        raise ConfigError(f"{file}: regions: {fleet.home} has no store: machines that share nothing else need an "
                          f"object store for the run, such as store = 's3://BUCKET/runs/NAME'")  # fmt: skip
    return fleet.home_region.store
