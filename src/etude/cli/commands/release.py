"""`etude release`: the versions that users get: status, approval, rollback, proposals; and the process of a run."""

import getpass
import shutil
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from etude.cli.commands.show import console
from etude.cli.options import RunPath, group
from etude.clock import date_utc, unix_s
from etude.dashboard.terminal import light_table
from etude.errors import ConfigError, UserError
from etude.models.checkpoint import StoredCheckpoint, load_spec
from etude.releases.states import PENDING_STATES
from etude.releases.store import ReleaseRequest, RequestKind
from etude.run.numerics import unfilled_model
from etude.run.process_name import RELEASE
from etude.run.processes import run_process
from etude.run.stores import open_releases
from etude.run.working_folder import open_run_folder

By: TypeAlias = Annotated[
    str, typer.Option("--by", metavar="NAME", help="Name of the person (default: your user name).")
]
PROPOSALS = "proposals"
"""Folder of a run with copies of proposed checkpoints, since the originals may be changed or deleted."""

app = group()


@app.callback(invoke_without_command=True)
def process(
    context: typer.Context,
    *,
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run whose release process this is.")] = "",
) -> None:
    """Show, approve, propose and roll back the weight versions that users get."""
    if context.invoked_subcommand is None:
        if not run:
            raise ConfigError("etude release needs a command, such as `etude release status RUN`, or --run RUN")
        run_process(RELEASE, open_run_folder(run, process=RELEASE))


@app.command()
def status(
    run: RunPath, *, version: Annotated[int | None, typer.Option(help="Show only this version.")] = None
) -> None:
    """Show each release, and its changes of state with their reasons."""
    with open_releases(open_run_folder(run)) as store:
        releases, moves, requests = store.releases(), store.moves(version), store.requests()
    table = light_table(">version", "state", ">stage", "digest", "since")
    for release in releases:
        if version in (None, release.version):
            stage = str(release.stage) if release.state in PENDING_STATES else ""
            table.add_row(str(release.version), str(release.state), stage, release.digest[:12], date_utc(release.since))
    console().print(table)
    history = light_table("when", ">version", "move", "by", "reason", broken=["reason"])
    for move in moves:
        history.add_row(date_utc(move.at), str(move.version), f"▶ {move.to_state}", move.by, move.reason)
    console().print(history)
    for request in requests:
        if not request.outcome:
            print(f"open: {request.kind!s} by {request.by}")


@app.command()
def approve(
    run: RunPath,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="The candidate.")],
    *,
    by: By = "",
) -> None:
    """Approve a candidate, so that users may get it."""
    folder = open_run_folder(run)
    needed = folder.config().release.approvals
    if not needed:
        raise ConfigError("release.approvals = 0: releases of this run need no approval")
    with open_releases(folder) as store:
        if not any(one.version == version and one.state in PENDING_STATES for one in store.releases()):
            raise UserError(f"version {version} is not a candidate now: see `etude release status {run}`")
        name = by or getpass.getuser()
        store.ask(ReleaseRequest(kind=RequestKind.APPROVE, by=name, at=unix_s(), version=version))
    print(f"{name} approved version {version}; approvals of different people needed: {needed}")


@app.command()
def rollback(run: RunPath, *, by: By = "") -> None:
    """Take back the candidate that is being released; without one, return to the previous release."""
    with open_releases(open_run_folder(run)) as store:
        store.ask(ReleaseRequest(kind=RequestKind.ROLLBACK, by=by or getpass.getuser(), at=unix_s()))
    print(f"requested; follow it with: etude release status {run}")


@app.command()
def propose(
    run: RunPath,
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder in Hugging Face's format.")],
    *,
    by: By = "",
) -> None:
    """Propose weights from elsewhere as a candidate: the trainer continues from them, and the gate decides."""
    folder = open_run_folder(run)
    config = folder.config()
    if not config.release.enabled:
        raise ConfigError(f"{run} releases nothing: its recipe has release.every_steps = 0")
    if config.lora.trains("rl"):
        raise ConfigError(f"{run} trains adapters over frozen weights: whole weights cannot be proposed (lora.rank)")
    impl = config.model.impl
    StoredCheckpoint(checkpoint, impl).check(unfilled_model(load_spec(folder.model, impl), config.numerics, "cpu"))
    with open_releases(folder) as store:
        copy = folder.path / PROPOSALS / f"{int(unix_s() * 1e6)}"
        shutil.copytree(checkpoint, copy)
        name = by or getpass.getuser()
        store.ask(ReleaseRequest(kind=RequestKind.PROPOSE, by=name, at=unix_s(), checkpoint=str(copy.absolute())))
    print(f"proposed; follow it with: etude release status {run}")
