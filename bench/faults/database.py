"""A PostgreSQL of a campaign's own, for ledgers on a server: cut off, crashed and started again at will.

It lies in one folder, runs as a user without rights and is reached by a socket in there; nothing else on the machine
sees it. Needs PostgreSQL's programs and psycopg; without them runs keep their ledgers in files.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

from etude.errors import InfrastructureError

if TYPE_CHECKING:
    import psycopg

INSTALLED = "postgresql/*/bin/postgres"
"""Debian's folder of the programs, below its libraries."""
USER = "etude"
UNPRIVILEGED = 65534
"""User of the server if we are root, which it refuses."""
OPTIONS = ("-c", "listen_addresses=", "-c", "fsync=off", "-c", "autovacuum=off", "-c", "max_connections=60")
"""A socket alone; and nothing here is about loss of power."""
INIT_S, START_S, STOP_S = 120.0, 60.0, 30.0
TABLES = "groups, rollouts, steps"
"""Locked tables."""

Place: TypeAlias = tuple[str, str]
"""A server's URL and a schema."""


def programs() -> Path | None:
    """Folder of PostgreSQL's programs; ``None`` if they, or its client, are not installed."""
    result = sorted(Path("/usr/lib").glob(INSTALLED))
    return result[-1].parent if result and importlib.util.find_spec("psycopg") is not None else None


def split(place: str) -> Place | None:
    """A ledger's place as server and schema; ``None`` for a file."""
    server, _, schema = place.partition("#")
    return (server, schema) if "://" in server else None


def connect(place: Place, **settings: str) -> "psycopg.Connection[Any]":
    """A connection that sees one run's tables; ``settings`` are the server's. Raises ``psycopg.Error``."""
    import psycopg

    options = " ".join(f"-c {name}={value}" for name, value in {"search_path": place[1], **settings}.items())
    return psycopg.connect(place[0], options=options, connect_timeout=2)


def query(place: Place, statements: Sequence[str]) -> list[list[tuple[Any, ...]]] | None:
    """The rows of some statements at one moment; ``None`` while they cannot be had."""
    import psycopg

    try:
        timeouts = {"lock_timeout": "200ms", "statement_timeout": "5s"}
        with closing(connect(place, default_transaction_isolation="serializable", **timeouts)) as db:
            return [db.execute(statement.encode()).fetchall() for statement in statements]
    except psycopg.Error:
        return None


@final
class Database:
    """The server; entered to be started, and left to be gone with all that it holds."""

    def __init__(self, result: Path, folder: Path) -> None:
        """``result`` is where its programs are; ``folder``, which is made, must be one that any user can reach."""
        self._programs = result
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address for clients."""
        return f"postgresql:///postgres?user={USER}&host={self._folder}"

    def __enter__(self) -> Self:
        self._folder.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(self._folder, UNPRIVILEGED, UNPRIVILEGED)
        data, trust = ("-D", str(self._folder / "data")), ("-U", USER, "-A", "trust", "--no-sync")
        command = [str(self._programs / "initdb"), *data, *trust, "-E", "UTF8", "--locale=C"]
        done = subprocess.run(command, capture_output=True, timeout=INIT_S, check=False, **self._whose())
        if done.returncode:
            raise InfrastructureError(f"PostgreSQL cannot be set up: {done.stderr.decode(errors='replace')[-300:]}")
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Every connection is lost; new ones can be made. Raises :class:`~etude.errors.InfrastructureError` while it is
        :meth:`down`: there are none to lose.
        """
        import psycopg

        try:
            with closing(connect((self.url, "public"))) as db:
                db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        except psycopg.Error as error:
            raise InfrastructureError(f"PostgreSQL has no connections that could be cut: {error}") from error
        yield

    @contextmanager
    def down(self) -> Iterator[None]:
        """Crash and restart the server."""
        self._stop()
        try:
            yield
        finally:
            self._start()

    def _start(self) -> None:
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data"), "-k", str(self._folder)]
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen([*command, *OPTIONS], start_new_session=True, **quiet, **self._whose())
        deadline_s = time.monotonic() + START_S
        while query((self.url, "public"), ["SELECT 1"]) is None:
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise InfrastructureError(f"PostgreSQL did not start within {START_S:g} s")
            time.sleep(0.05)

    def _stop(self) -> None:
        """Stop at once, as in a crash: the next start recovers committed data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        with suppress(FileNotFoundError):
            (self._folder / "data" / "postmaster.pid").unlink()

    def _whose(self) -> dict[str, Any]:
        return {"cwd": "/"} | (
            {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": ()} if os.geteuid() == 0 else {}
        )


@contextmanager
def locked(place: Place) -> Iterator[None]:
    """Keep a run's tables from everyone. Raises :class:`~etude.errors.InfrastructureError` if they cannot be had."""
    import psycopg

    with ExitStack() as stack:
        try:
            db = stack.enter_context(closing(connect(place, lock_timeout="5s")))
            db.execute(f"LOCK TABLE {TABLES} IN ACCESS EXCLUSIVE MODE".encode())
        except psycopg.Error as error:
            raise InfrastructureError(f"the ledger in {place[0]} cannot be locked: {error}") from error
        yield
