"""`etude release status|approve|rollback`: shows the releases of a run, and asks its release process for changes.

approval, rollback ──▶ a request in the store ──▶ the release process decides
"""

import getpass

from etude.cli.console import console
from etude.clock import date_utc, unix_s
from etude.dashboard.terminal import light_table
from etude.errors import ConfigError, UserError
from etude.releases.states import PENDING_STATES
from etude.releases.store import ReleaseRequest, RequestKind
from etude.run.stores import open_releases
from etude.run.working_folder import open_run_folder


def show_releases(run: str, version: int | None) -> None:
    """Print the releases of a run, or only that of ``version``, with their changes of state, and open requests."""
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


def request_approval(run: str, version: int, by: str) -> None:
    """Ask the release process of a run to count an approval of a candidate, by a person or else by this user.

    Raises :class:`~etude.errors.UserError` if the run needs no approvals, or the version is no candidate.
    """
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


def request_rollback(run: str, by: str) -> None:
    """Ask the release process of a run to take back its candidate, or else to return to the previous release."""
    with open_releases(open_run_folder(run)) as store:
        store.ask(ReleaseRequest(kind=RequestKind.ROLLBACK, by=by or getpass.getuser(), at=unix_s()))
    print(f"requested; follow it with: etude release status {run}")
