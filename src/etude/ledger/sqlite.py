"""The embedded database of a run on one machine: ``ledger.db`` in its folder.

SQLite in WAL mode, shared by all processes of the run. ``begin`` takes the write lock, so transactions are serial;
readers never wait. A commit survives a power failure: each is synced to disk, as checkpoints are, because a run can
resume only if both are at the same step.
"""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Self
from uuid import uuid4

from etude.errors import DamagedError, RunFolderError
from etude.fsync import sync
from etude.ledger.database import NOTHING_THERE, Interrupted, Row, Value
from etude.ledger.schema import LEDGER, Schema, check_newest, upgrade

BUSY_TIMEOUT_S = 30.0
"""Maximum wait of one call for another process's transaction, which takes about a millisecond."""
PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
    }
)
"""Primary result codes of temporary faults: locks, full disks, a folder that is briefly unreachable."""
LASTING = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
"""Primary result codes of a damaged file."""
PRIMARY = 0xFF
"""Mask for the primary code in a result code."""


class SqliteDatabase:
    """One connection to a ledger file, or to a file of another ``schema``."""

    def __init__(self, path: Path, db: sqlite3.Connection, schema: Schema = LEDGER) -> None:
        self._path = path
        self._db = db
        self._schema = schema

    @classmethod
    def open(cls, path: Path, *, retry_timeout_s: float, read_only: bool = False, schema: Schema = LEDGER) -> Self:
        """Open a ledger file; create it if there is none. Several processes may do so at once.

        With ``read_only`` nothing is written: a missing file, or one from an older étude, is also rejected. Raises
        :class:`~etude.errors.RunFolderError` if the folder is missing or the file is not a ledger or is from a newer
        étude, and :class:`~etude.ledger.database.Interrupted`.
        """
        if not path.parent.is_dir():
            raise RunFolderError(f"no folder {str(path.parent)!r} to keep a {schema.noun} in: create it first")
        busy_s = min(retry_timeout_s, BUSY_TIMEOUT_S)
        try:
            if not path.exists():
                if read_only:
                    raise RunFolderError(f"no {schema.noun} at {str(path)!r}, {NOTHING_THERE}")
                cls._create(path, schema)
            return cls._opened_to_read(path, busy_s, schema) if read_only else cls._opened(path, busy_s, schema)
        except (sqlite3.DatabaseError, DamagedError) as error:
            raise RunFolderError(f"{str(path)!r} cannot be opened as a {schema.noun}: {error}") from error

    @property
    def name(self) -> str:
        """The path of the file."""
        return str(self._path)

    def execute(self, sql: str, *values: Value) -> list[Row]:
        """The rows of one statement."""
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            _classify(error, self._path)
            raise

    def begin(self) -> None:
        """Take the write lock of the file."""
        self.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Commit all writes."""
        self.execute("COMMIT")

    def committed(self) -> bool:
        """Return false: a failed SQLite commit has no effect."""
        return False

    def rollback(self) -> None:
        """Undo all writes; SQLite may have done so itself, after a full disk."""
        if self._db.in_transaction:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def version(self) -> int:
        """The version of the tables; raises :class:`~etude.errors.RunFolderError` for a foreign database."""
        ((version,),) = self.execute("PRAGMA user_version")
        ((owner,),) = self.execute("PRAGMA application_id")
        if owner != int.from_bytes(self._schema.mark):
            raise RunFolderError(f"{self.name!r} is not a {self._schema.noun} of étude: choose a different run folder")
        return int(version)

    def set_version(self, version: int) -> None:
        """Set the version of the tables."""
        self.execute(f"PRAGMA user_version = {version}")

    def scrub(self) -> None:
        """Empty the write-ahead log; in the file itself, deleted bytes are already zero (``secure_delete``)."""
        ((busy, *_),) = self.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if busy:
            raise Interrupted("another process reads what was deleted")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @classmethod
    def _create(cls, path: Path, schema: Schema) -> None:
        """Create the file under another name, then link it: no process sees an incomplete file, and the first one wins.

        SQLite alone cannot ensure this: the change to WAL fails at once if another process has the file open.
        """
        draft = path.with_name(f"{path.name}.{uuid4().hex}")
        try:
            with closing(_connected(draft, BUSY_TIMEOUT_S)) as db:
                made = cls(draft, db, schema)
                made.execute("PRAGMA journal_mode = WAL")
                made.execute(f"PRAGMA application_id = {int.from_bytes(schema.mark)}")
                upgrade(made, schema)
            with suppress(FileExistsError):
                os.link(draft, path)
                sync(path.parent)
        finally:
            for file in path.parent.glob(f"{draft.name}*"):
                file.unlink(missing_ok=True)

    @classmethod
    def _opened(cls, path: Path, busy_s: float, schema: Schema) -> Self:
        opened = cls(path, _connected(path, busy_s), schema)
        try:
            opened.execute("PRAGMA synchronous = FULL")
            opened.execute("PRAGMA foreign_keys = ON")
            opened.execute("PRAGMA secure_delete = ON")
            upgrade(opened, schema)
        except BaseException:
            opened.close()
            raise
        return opened

    @classmethod
    def _opened_to_read(cls, path: Path, busy_s: float, schema: Schema) -> Self:
        opened = cls(path, _connected(path, busy_s, _reading_mode(path)), schema)
        try:
            check_newest(opened, schema)
        except BaseException:
            opened.close()
            raise
        return opened


def _reading_mode(path: Path) -> str:
    """The URI mode to read a ledger: ``ro`` if others may write to it, else also ``immutable``.

    Readers also use the ``-shm`` file; in a read-only folder it must already exist. Raises
    :class:`~etude.errors.RunFolderError` if it is missing and part of the ledger is unreadable without it.
    """
    log, places = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    if os.access(path.parent, os.W_OK) or (log.exists() and places.exists()):
        return "ro"
    if log.exists() and log.stat().st_size:
        raise RunFolderError(
            f"{str(path)!r} was left open and its folder cannot be written: look into a copy of the folder, whole"
        )
    return "ro&immutable=1"


def _connected(path: Path, busy_s: float, mode: str = "rwc") -> sqlite3.Connection:
    """Connect with SQLite's ``mode``: ``rwc`` (read, write, create), ``ro``, or ``ro`` for an immutable file."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    try:
        return sqlite3.connect(uri, timeout=busy_s, isolation_level=None, uri=True)
    except sqlite3.DatabaseError as error:
        _classify(error, path)
        raise


def _classify(error: sqlite3.DatabaseError, path: Path) -> None:
    """Raise the ledger's error for a temporary or permanent fault; return for anything else, such as a bug."""
    code = getattr(error, "sqlite_errorcode", 0) & PRIMARY  # absent if Python itself raised the error
    if code in PASSING:
        raise Interrupted(f"{error} ({error.sqlite_errorname})") from error
    if code in LASTING:
        raise DamagedError(
            f"the ledger {path} is damaged: {error}; restore the run folder from a copy, or start a new run"
        ) from error
