"""The stored data of a product's users, for `etude feedback`: counted, deleted, exported, and who did so."""

import re
from datetime import UTC, datetime
from pathlib import Path

import orjson

from etude.cli.console import console
from etude.clock import unix_s
from etude.dashboard import formatting
from etude.dashboard.terminal import light_table
from etude.feedback.privacy import AuditEntry, DeletionRequest
from etude.run.erasure import carry_out
from etude.run.folder import RunFolder
from etude.run.keys import PSEUDONYM_DIGITS, KeyRole, pseudonym
from etude.run.stores import open_feedback, open_ledger, open_releases

COMMAND = "etude feedback"
"""Name of the actor in the audit log."""


def show_counts(run: Path) -> None:
    """Print the numbers of sessions and signals by their state, and requests for deletion."""
    with open_feedback(RunFolder.open(run, writes=False)) as store:
        counts, requests = store.counts(), store.privacy.requests()
    table = light_table("what", "number")
    for name, number in counts.items():
        table.add_row(name.replace("_", " "), f"{number:,}")
    console().print(table)
    if requests:
        console().print(_request_table(requests))


def delete_data(run: Path, *, user: str, session: str) -> None:
    """Delete all data of a user or a session, and print the weight versions that were trained on any of it."""
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


def export_data(run: Path, user: str) -> None:
    """Print all data of a user as JSON, one session per line, and record that in the audit log."""
    folder = RunFolder.open(run)
    with open_feedback(folder) as store:
        user = _pseudonym(folder, user)
        for session in store.sessions_of_user(user):
            print(orjson.dumps(session).decode())
        store.privacy.audit(AuditEntry(at=unix_s(), actor=COMMAND, action="export", subject=user))


def show_audit(run: Path) -> None:
    """Print the audit log."""
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
