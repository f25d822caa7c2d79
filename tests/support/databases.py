"""A PostgreSQL of a test's own: in a temporary folder, as a user without rights, reached by a socket in there."""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from etude.rewards.graders.postgres_client import QueryStep, answer
from etude.rewards.graders.queries import MigrationResult, check_ours, is_right, judge, migration_steps, steps_before
from etude.types import QueryChecks

UNPRIVILEGED = 65534
START_TIMEOUT_S = 60.0
OPTIONS = "-c fsync=off -c full_page_writes=off -c autovacuum=off -c listen_addresses= -c timezone=UTC -c jit=off"
OURS: QueryStep = {
    "user": "postgres",
    "database": "app",
    "settings": {},
    "scripts": [],
    "timeout_s": 60.0,
    "vital": True,
}
"""A step of the test's own, to which its scripts are added."""
BEFORE_QUESTIONS = 2
"""Steps of a migration before the first question: the migration, the role that asks."""


class Server:
    """A PostgreSQL that can be stopped, killed and started again."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.folder = folder
        """Folder of its socket."""
        self._programs = programs
        self._whose: dict[str, Any] = {"cwd": "/"}
        if os.geteuid() == 0:  # as whom it does not run
            os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
            self._whose |= {"user": UNPRIVILEGED, "group": UNPRIVILEGED}
        self._process: subprocess.Popen[bytes] | None = None
        initdb = f"{programs}/initdb -D {folder}/data -U postgres -A trust -E UTF8 --locale=C.UTF-8 --no-sync"
        subprocess.run(initdb.split(), check=True, capture_output=True, **self._whose)

    @property
    def url(self) -> str:
        """For clients of libpq: database and role ``app``."""
        return f"postgresql:///app?user=app&host={self.folder}"

    def start(self) -> None:
        """Serve; returns when it does."""
        command = f"{self._programs}/postgres -D {self.folder}/data -k {self.folder} {OPTIONS}"
        quiet = subprocess.DEVNULL
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)
        self._process = subprocess.Popen(command.split(), stdout=quiet, stderr=quiet, **self._whose)
        _wait_for(self.folder / "data" / "postmaster.pid")

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it: politely, but waiting for no client, or with SIGQUIT as in a crash."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None


@contextmanager
def temporary_server() -> Iterator[Server]:
    """A server with role and database ``app``; skips where PostgreSQL is not installed."""
    postgres_programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not postgres_programs:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    folder = Path(tempfile.mkdtemp(prefix="etude-postgres-"))
    try:
        server = Server(postgres_programs[-1].parent, folder)
        try:
            server.start()
            ask(folder, "CREATE ROLE app LOGIN", "CREATE DATABASE app OWNER app", database="postgres")
            yield server
        finally:
            server.stop(signal.SIGQUIT)  # nobody reads this again
    finally:
        shutil.rmtree(folder)


@contextmanager
def temporary_postgres() -> Iterator[Path]:
    """The folder of the socket of such a server."""
    with temporary_server() as server:
        yield server.folder


def ask(server: Path, *scripts: str, user: str = "postgres", database: str = "app") -> list[list[Any]]:
    """The rows of the last of some scripts, none of which may fail."""
    step: QueryStep = {**OURS, "user": user, "database": database, "scripts": list(scripts)}
    answered = answer(str(server), step)
    assert answered["state"] == "", answered
    rows: list[list[Any]] = answered["rows"]
    return rows


def verdict(server: Path, setup: str, checks: QueryChecks, migration: str, *, patient: bool = True) -> MigrationResult:
    """A grader's result, from the same queries, in an empty database that ``setup`` fills.

    Without ``patient``, the queries end with the right answers before the first wrong one.
    """
    ask(server, "ALTER DATABASE app RESET ALL", "ALTER ROLE app RESET ALL", database="postgres")
    ask(server, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public AUTHORIZATION pg_database_owner")
    ask(server, setup, user="app")
    asker = f"asker_{secrets.token_hex(4)}"
    check_ours([answer(str(server), step) for step in steps_before(checks)])
    answers: list[dict[str, Any]] = []
    request = checks.queries
    for step in migration_steps(checks, migration, asker):
        answers.append(answer(str(server), step))
        if answers[-1]["state"] and step["vital"]:
            break
        if (
            not patient
            and not step["vital"]
            and not is_right(request[len(answers) - BEFORE_QUESTIONS - 1], answers[-1])
        ):
            return MigrationResult(True, len(answers) - BEFORE_QUESTIONS - 1, False)
    return judge(checks, answers)


def _wait_for(status: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not status.exists() or "ready" not in status.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline, "PostgreSQL did not start"
        time.sleep(0.02)
