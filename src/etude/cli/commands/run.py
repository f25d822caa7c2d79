"""`etude run`: starts or continues the whole loop of a recipe, on this machine or on a fleet."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from etude.cli.options import Overrides, group, own_name
from etude.config.fleet import FleetConfig
from etude.config.loading import dump_toml, load_fleet, load_recipe
from etude.config.recipe import RunConfig
from etude.config.tasks import SandboxKind
from etude.dashboard.terminal import final_table
from etude.errors import ConfigError, EtudeError, ExitCode, InfrastructureError, RunFolderError
from etude.rewards.shaping.parts import describe
from etude.run.data_copies import LIMIT_GIB, plan_data
from etude.run.fleet_plan import devices_of, plan_loop, replicas_of
from etude.run.folder import RunFolder, remove_unbegun
from etude.run.judging import check_judge
from etude.run.launchers.fork_server import fork_server
from etude.run.local import default_out, run_local
from etude.run.parent import SUPERVISOR_VARIABLE, die_with_parent
from etude.run.placement import fleet_of
from etude.run.resolve import check_devices
from etude.run.resuming import change, changed_config, is_finished
from etude.run.run_url import is_run_url, normal_url
from etude.run.suite_trials import check_suites
from etude.run.task_plan import plan_tasks
from etude.run.working_folder import WORK_VARIABLE, check_place, create_run, forget, open_run_folder, working_path
from etude.types import Json
from etude.ui.page import page_beside

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
    machines = None if fleet is None else load_fleet(fleet)
    decisive: dict[str, object] = {"recipe": recipe, "seed": seed, "out": out, "at": at, "copy-limit": copy_limit}
    decisive |= {"sandbox": sandbox, "ledger": ledger}
    if resume is not None:
        ignored = [name for name, value in decisive.items() if value is not None] + ["--dry-run"] * dry_run
        if ignored:
            raise ConfigError(f"{', '.join(ignored)} would have no effect with --resume: a run keeps its recipe")
        folder = open_run_folder(resume)
        if folder.url and not is_run_url(resume):
            folder = open_run_folder(folder.url)  # there may be newer files
        return go_on(folder, overrides, machines)
    if recipe is None:
        raise ConfigError("which recipe? try `etude run recipes/quickstart`, or --resume DIR")
    if at is not None and out is not None:
        raise ConfigError(f"--out {out} would have no effect with --at: the working folder lies below {WORK_VARIABLE}")
    if copy_limit is not None and at is None:
        raise ConfigError(f"--copy-limit {copy_limit:g} would have no effect without --at: nothing is copied")
    chosen = {"seed": seed, "sandboxes.kind": sandbox, "ledger.url": ledger}
    settings = [f"{key}={json.dumps(value)}" for key, value in chosen.items() if value is not None]
    settings += [] if machines is None else [*devices_of(machines), *replicas_of(machines)]
    config = load_recipe(recipe, [*overrides, *settings])
    about_reward = describe(config.reward)
    if dry_run:
        check_judge(config)
        check_suites(config)
        print(dump_toml(config), end="")
        print("".join(f"# {line}\n" for line in about_reward), end="")
        return _print_tasks(config)
    if machines is None or machines.launcher == "local":
        fork_server()  # imports what the run's processes need, while this process checks the recipe
    from etude.cli.commands.check import show_ready  # loads torch, which a dry run has no need of

    if machines is not None and len(machines.regions) > 1:
        _check_home(machines, at)
    place, data = out or default_out(config), None
    if at is not None:
        check_place(at, config)
        data = plan_data(config, LIMIT_GIB if copy_limit is None else copy_limit)
        place = working_path(normal_url(at))
    if machines is None or (machines.launcher == "local" and not any(each.sandbox_hosts for each in machines.regions)):
        show_ready(config, place, Console())
    else:
        plan_loop(config, machines, str(place))  # raises before there is a run
    if at is None:
        return start(RunFolder.create(place, config), machines)
    folder = create_run(at, config, data, print)
    print(f"the run is at {folder.url}; its working folder here is {folder.path}")
    return start(folder, machines)


def _check_home(fleet: FleetConfig, at: str | None) -> None:
    """Raise :class:`~etude.errors.ConfigError` unless the run is at the URL where the regions look for it."""
    home = fleet.home_region
    if at is None or normal_url(home.store) != normal_url(at):
        raise ConfigError(f"regions find a run of this fleet in the store of {home.name}: give --at {home.store}")


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


def _print_tasks(config: RunConfig) -> int:
    """Print how many tasks there are and how often each is needed. Raises as a start would if there are too few tasks.
    A missing folder is only reported.
    """
    try:
        plan = plan_tasks(config)
    except ConfigError as error:
        print(f"# {error}")
        return 0
    print("".join(f"# tasks: {line}\n" for line in plan.describe()), end="")
    plan.check()
    return 0


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
