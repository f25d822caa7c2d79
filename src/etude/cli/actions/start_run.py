"""Begins or continues a run: the part of `etude run` that comes after its options and its recipe.

checks of this machine ──▶ run folder ──▶ supervisor ──▶ final table, exit status
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from etude.cli.actions.show_checks import show_ready
from etude.cli.options import own_name
from etude.config.fleet import FleetConfig
from etude.config.loading import load_fleet
from etude.config.recipe import RunConfig
from etude.dashboard.terminal import final_table
from etude.errors import ConfigError, EtudeError, ExitCode, InfrastructureError, RunFolderError
from etude.rewards.shaping.parts import check_behaviours
from etude.run.data_copies import plan_data
from etude.run.fleet_plan import plan_loop
from etude.run.folder import RunFolder, remove_unbegun
from etude.run.local import create_default, default_out, run_local
from etude.run.parent import SUPERVISOR_VARIABLE, die_with_parent
from etude.run.placement import fleet_of
from etude.run.resolve import check_devices
from etude.run.resuming import change, changed_config, is_finished
from etude.run.run_url import is_run_url, normal_url
from etude.run.working_folder import check_place, create_run, forget, open_run_folder, working_path
from etude.types import Json
from etude.ui.page import page_beside


def begin(config: RunConfig, fleet: FleetConfig | None, out: Path | None) -> int:
    """Run a recipe in a new folder, after all checks of what it needs; returns the exit status."""
    place = out or default_out(config)
    _check_home(fleet, None)
    _check_needs(config, fleet, place)
    return start(create_default(config) if out is None else RunFolder.create(out, config), fleet)


def begin_at(at: str, config: RunConfig, fleet: FleetConfig | None, copy_limit_gib: float) -> int:
    """Run a recipe as a new run at a URL, after all checks of what it needs; returns the exit status."""
    _check_home(fleet, at)
    check_place(at, config)
    data = plan_data(config, copy_limit_gib)
    _check_needs(config, fleet, working_path(normal_url(at)))
    folder = create_run(at, config, data, print)
    print(f"the run is at {folder.url}; its working folder here is {folder.path}")
    return start(folder, fleet)


def _check_home(fleet: FleetConfig | None, at: str | None) -> None:
    """Raise :class:`~etude.errors.ConfigError` unless the run is at the URL where a fleet's regions look for it."""
    if fleet is None or len(fleet.regions) == 1:
        return
    home = fleet.home_region
    if at is None or normal_url(home.store) != normal_url(at):
        raise ConfigError(f"regions find a run of this fleet in the store of {home.name}: give --at {home.store}")


def _check_needs(config: RunConfig, fleet: FleetConfig | None, place: Path) -> None:
    """Check what a new run at ``place`` needs, before there is one: this machine, or the plan of a fleet."""
    check_behaviours(config.reward)
    if fleet is None or (fleet.launcher == "local" and not any(region.sandbox_hosts for region in fleet.regions)):
        show_ready(config, place, Console())
    else:
        plan_loop(config, fleet, str(place))


def resume_run(run: str, settings: Sequence[str], fleet: Path | None) -> int:
    """Continue the run in a folder or at a URL, on the fleet of a file or else where it ran before; returns the exit
    status.
    """
    machines = None if fleet is None else load_fleet(fleet)
    folder = open_run_folder(run)
    if folder.url and not is_run_url(run):
        folder = open_run_folder(folder.url)  # there may be newer files
    return go_on(folder, settings, machines)


def go_on(folder: RunFolder, settings: Sequence[str], fleet: FleetConfig | None = None) -> int:
    """Run the rest of a run, with the limits and steps that ``settings`` change, on ``fleet`` or else where it ran
    before.
    """
    config = changed_config(folder, settings)
    fleet = fleet or fleet_of(folder)
    if fleet is None:
        check_devices(config)
    if is_finished(folder, config):
        steps = config.trainer.steps
        print(f"{folder.name} is finished: {steps} steps; its report is {folder.report_html}")
        print(f"train on with: {own_name()} run --resume {folder.name} --set trainer.steps={2 * steps}")
        return 0
    if settings:
        change(folder, config)
    return run_folder(folder, fleet)


def start(folder: RunFolder, fleet: FleetConfig | None = None) -> int:
    """Run a new run. If it cannot begin, its folder is removed, so that the corrected recipe can use the same name."""
    try:
        return run_folder(folder, fleet)
    except EtudeError as error:
        if not isinstance(error, InfrastructureError | RunFolderError):
            discard(folder)
        raise


def discard(folder: RunFolder) -> None:
    """Remove a run that has not begun, wherever it is."""
    if not folder.has_begun:
        forget(folder)
    remove_unbegun(folder)


def run_folder(folder: RunFolder, fleet: FleetConfig | None = None) -> int:
    """Run the rest of a run; if it is stopped, print how to continue."""
    if SUPERVISOR_VARIABLE in os.environ:
        die_with_parent()  # a program of the user's: `etude.train`
    try:
        with page_beside(folder, sys.stdout) as page:
            report = run_local(folder, fleet=fleet, page=page)
    except (KeyboardInterrupt, SystemExit, InfrastructureError):
        print(f"\nstopped; nothing is lost. Continue with: {own_name()} run --resume {folder.name}", file=sys.stderr)
        if folder.report_html.exists():
            print(f"report so far: {folder.report_html}", file=sys.stderr)
        raise
    Console().print(final_table(report))
    print(f"report: {folder.report_html}")
    print(f"look into it with: {own_name()} ui {folder.path}")
    return status_of(report)


def status_of(report: Mapping[str, Json]) -> int:
    """The exit status of a finished run; if it learnt nothing, print that to stderr."""
    learning = report["learning"]
    assert isinstance(learning, dict)
    if learning["nothing_learnt"] is None:
        return 0
    print(f"etude: {learning['nothing_learnt']}", file=sys.stderr)
    return ExitCode.NOTHING_LEARNT
