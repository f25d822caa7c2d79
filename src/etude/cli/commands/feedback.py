"""`etude feedback`: shows, exports and deletes the stored data of a product's users.

Owns the output. A user is named as the product names them, or by the pseudonym, which alone is stored and shown.
"""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import orjson
import typer

from etude.cli.console import console
from etude.cli.options import group
from etude.clock import unix_s
from etude.dashboard import formatting
from etude.dashboard.terminal import light_table
from etude.errors import ConfigError, UserError
from etude.feedback.privacy import AuditEntry, DeletionRequest
from etude.run.erasure import carry_out
from etude.run.folder import RunFolder
from etude.run.keys import PSEUDONYM_DIGITS, KeyRole, pseudonym
from etude.run.process_name import FEEDBACK
from etude.run.processes import run_process
from etude.run.stores import open_feedback, open_ledger, open_releases
from etude.run.working_folder import open_run_folder

COMMAND = "etude feedback"
"""Its name in the audit log."""
Run: TypeAlias = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")]
User: TypeAlias = Annotated[
    str, typer.Option(metavar="NAME", help="A user, by the product's name for them or by the pseudonym.")
]

app = group()


@app.callback(invoke_without_command=True)
def process(
    context: typer.Context,
    *,
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run whose feedback process this is.")] = "",
) -> None:
    """Show, export and delete the stored data of a product's users."""
    if context.invoked_subcommand is None:
        if not run:
            raise ConfigError("etude feedback needs a command, such as `etude feedback status RUN`, or --run RUN")
        run_process(FEEDBACK, open_run_folder(run))


@app.command()
def status(run: Run) -> None:
    """Count sessions and signals by their state, and list requests for deletion."""
    with open_feedback(RunFolder.open(run, writes=False)) as store:
        counts, requests = store.counts(), store.privacy.requests()
    table = light_table("what", "number")
    for name, number in counts.items():
        table.add_row(name.replace("_", " "), f"{number:,}")
    console().print(table)
    if requests:
        console().print(_request_table(requests))


@app.command()
def delete(
    run: Run,
    *,
    user: User = "",
    session: Annotated[str, typer.Option(metavar="ID", help="One session, by its id.")] = "",
) -> None:
    """Delete all data of a user or a session, and name the weight versions that were trained on any of it."""
    if bool(user) == bool(session):
        raise UserError("etude feedback delete: give either --user NAME or --session ID")
    folder = RunFolder.open(run)
    with open_feedback(folder) as store, open_ledger(folder) as ledger, open_releases(folder) as releases:
        user = _pseudonym(folder, user)
        request = store.privacy.request_deletion(user=user, session_id=session, actor=COMMAND, now=unix_s())
        carry_out(store, ledger, releases, unix_s())
        request = next(one for one in store.privacy.requests() if one.request_id == request.request_id)
    console().print(_request_table([request]))
    if request.done_at is None:
        print(
            "A training step is using some of this data. The run finishes the request once the step is committed; "
            "if the run is stopped, repeat this command."
        )


@app.command()
def export(run: Run, user: User) -> None:
    """Print all data of a user as JSON, one session per line, for a user who asks to see it."""
    folder = RunFolder.open(run)
    with open_feedback(folder) as store:
        user = _pseudonym(folder, user)
        for session in store.sessions_of_user(user):
            print(orjson.dumps(session).decode())
        store.privacy.audit(AuditEntry(at=unix_s(), actor=COMMAND, action="export", subject=user))


@app.command()
def audit(run: Run) -> None:
    """Print the audit log: who did what with users' data."""
    with open_feedback(RunFolder.open(run, writes=False)) as store:
        entries = store.privacy.audit_log()
    table = light_table("at", "by", "action", "of", "detail")
    for entry in entries:
        table.add_row(_time(entry.at), entry.actor, entry.action, entry.subject, entry.detail)
    console().print(table)


def _pseudonym(folder: RunFolder, user: str) -> str:
    """The pseudonym of a user; a pseudonym is returned unchanged."""
    if not user or re.fullmatch(rf"[0-9a-f]{{{PSEUDONYM_DIGITS}}}", user):
        return user
    return pseudonym(folder.key(KeyRole.USERS), user)


def _request_table(requests: list[DeletionRequest]) -> object:
    table = light_table("request", "of", "asked", "done", "sessions", "trained on in versions")
    for one in requests:
        done = formatting.MISSING if one.done_at is None else _time(one.done_at)
        versions = ", ".join(map(str, one.versions)) or "none"
        subject = one.user or one.session_id
        table.add_row(str(one.request_id), subject, _time(one.requested_at), done, str(one.sessions), versions)
    return table


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
