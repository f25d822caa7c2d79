"""The PostgreSQL database of a ledger, for runs on any number of machines: one schema per run.

``begin`` takes a lock named after the schema, so that the transactions of one run are serial and those of different
runs concurrent; reads take no lock. It also stores the transaction's number: if the connection breaks, PostgreSQL can
tell by that number if the transaction was committed (``pg_xact_status``).

Needs psycopg 3, an optional dependency of étude.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from typing import Any, Self

from etude.errors import ConfigError, RunFolderError
from etude.ledger.database import NOTHING_THERE, Interrupted, Row, Value
from etude.ledger.open import public
from etude.ledger.schema import LEDGER, Schema, check_newest, upgrade

try:
    import psycopg
    from psycopg import conninfo, errors
except ImportError as missing:
    raise ConfigError(
        "a ledger in PostgreSQL needs psycopg, which is not installed: in étude's checkout, "
        "pip install -e '.[postgres]'"
    ) from missing

CONNECT_TIMEOUT_S = 5
"""Timeout of one connection attempt."""
LOCK_TIMEOUT_S = 30.0
"""Maximum wait of one call for another process's transaction, which takes milliseconds."""
SETTINGS = {
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "10s",  # for a process stopped mid-transaction: others continue
}
"""Time limits for the server's work."""
NETWORK = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,  # ms
}
"""TCP settings, in seconds unless noted, that detect a server which disappeared without closing the connection."""
TYPES = {"INTEGER": "BIGINT", "REAL": "DOUBLE PRECISION", "BLOB": "BYTEA"}
"""Type in the migrations → type in PostgreSQL."""
TYPE = re.compile(rf"\b({'|'.join(TYPES)})\b")
ROWS, POSTGRES_ROWS = "json_each(?)", "json_array_elements(CAST(? AS json))"
"""The rows of a JSON array, each in the column ``value``: as in statements, and in PostgreSQL."""
VERSION_TABLE = "schema_version"
"""Table with one row: the version of the tables in the schema."""


class PostgresDatabase:
    """One connection to the schema of a run; it reconnects after a loss."""

    def __init__(
        self, server: str, schema: str, *, retry_timeout_s: float, read_only: bool = False, tables: Schema = LEDGER
    ) -> None:
        self._server = server
        self._schema = schema
        self._noun = tables.noun
        settings = SETTINGS | ({"default_transaction_read_only": "on"} if read_only else {})
        self._connection = _connection(server, schema, retry_timeout_s, settings)
        digest = blake2b(schema.encode(), digest_size=8).digest()
        self._lock = int.from_bytes(digest, "big", signed=True)
        self._db: psycopg.Connection[Row] | None = None
        self._transaction = ""
        """Number of the last transaction begun."""

    @classmethod
    def open(
        cls, server: str, schema: str, *, retry_timeout_s: float, read_only: bool = False, tables: Schema = LEDGER
    ) -> Self:
        """Connect, and create or migrate the tables.

        ``server`` is a URL in libpq's format. With ``read_only`` nothing is written: a missing schema, or one of an
        older étude, is also rejected. Raises :class:`~etude.errors.ConfigError` if the server rejects the connection,
        :class:`~etude.errors.RunFolderError` for a schema that is not ours or is from a newer étude, and
        :class:`~etude.ledger.database.Interrupted`.
        """
        try:
            opened = cls(server, schema, retry_timeout_s=retry_timeout_s, read_only=read_only, tables=tables)
            try:
                if read_only:
                    opened._check_there()
                    check_newest(opened, tables)
                else:
                    opened._match()
                    upgrade(opened, tables)
            except BaseException:
                opened.close()
                raise
        except psycopg.Error as error:
            raise ConfigError(f"the {tables.noun} in {public(server)} cannot be used: {error}") from error
        return opened

    @property
    def name(self) -> str:
        """The URL without its possibly secret parts."""
        return f"{public(self._server)}#{self._schema}"

    def execute(self, statement: str, *values: Value) -> list[Row]:
        """The rows of one statement."""
        cursor = self._sent(_postgres_sql(statement), values)
        return cursor.fetchall() if cursor.description else []

    def begin(self) -> None:
        """Take the lock of the schema and store the transaction's number."""
        cursor = self._sent(f"BEGIN; SELECT pg_advisory_xact_lock({self._lock}), pg_current_xact_id()::text")
        cursor.nextset()
        ((_, self._transaction),) = cursor.fetchall()

    def commit(self) -> None:
        """Commit all writes."""
        self._sent("COMMIT")

    def committed(self) -> bool:
        """Return true if the last transaction was committed; :class:`Interrupted` while the server cannot tell."""
        try:
            ((status,),) = self.execute("SELECT pg_xact_status(CAST(? AS xid8))", self._transaction)
        except errors.InvalidParameterValue:  # a future number: a standby without this transaction took over
            return False
        if status not in ("committed", "aborted"):
            raise Interrupted(f"its last transaction is {status or 'forgotten'}")
        return bool(status == "committed")

    def rollback(self) -> None:
        """Undo all writes; the loss of a connection has the same effect."""
        if self._db is not None:
            with suppress(Interrupted, psycopg.Error):
                self._sent("ROLLBACK")

    def version(self) -> int:
        """The version of the tables; 0 if there are none."""
        rows = self.execute(f"SELECT version FROM {VERSION_TABLE}")
        return int(rows[0][0]) if rows else 0

    def set_version(self, version: int) -> None:
        """Set the version of the tables."""
        self.execute(f"DELETE FROM {VERSION_TABLE}")
        self.execute(f"INSERT INTO {VERSION_TABLE} (version) VALUES (?)", version)

    def scrub(self) -> None:
        """Vacuum the tables: no query finds deleted data. The server's log and backups are its administrator's task."""
        self._sent(f"VACUUM {', '.join(f'{self._schema}.{table}' for table in sorted(self._tables()))}")

    def close(self) -> None:
        """Close the connection."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _sent(self, query: str, values: tuple[Value, ...] | None = None) -> "psycopg.Cursor[Row]":
        try:
            if self._db is None:
                self._db = psycopg.connect(**self._connection, autocommit=True)
            return self._db.execute(query, values or None, binary=values is not None)
        except psycopg.Error as error:
            lost = self._db is None or self._db.closed
            if lost:
                self.close()
            if lost or isinstance(error, psycopg.OperationalError):
                raise Interrupted(str(error).strip()) from error
            raise

    def _match(self) -> None:
        """Create the schema and its version table unless they exist."""
        if VERSION_TABLE in self._tables():
            return
        try:
            self.begin()
            tables = self._tables()
            if tables and VERSION_TABLE not in tables:
                raise RunFolderError(
                    f"{self.name!r} is not a {self._noun} of étude, it holds {min(tables)!r}: choose another schema"
                )
            if not tables:
                self.execute(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
                self.execute(f"CREATE TABLE {VERSION_TABLE} (version INTEGER NOT NULL)")
        except BaseException:
            self.rollback()
            raise
        self.commit()

    def _check_there(self) -> None:
        if VERSION_TABLE not in self._tables():
            raise RunFolderError(f"no {self._noun} at {self.name!r}, {NOTHING_THERE}")

    def _tables(self) -> set[str]:
        """Names of the tables in the schema, readable or not."""
        query = "SELECT tablename::text FROM pg_tables WHERE schemaname = ?"
        return {name for (name,) in self.execute(query, self._schema)}


def _connection(server: str, schema: str, retry_timeout_s: float, settings: Mapping[str, str]) -> dict[str, Any]:
    """Parameters of a connection: those of the URL, our limits as defaults, and the schema."""
    given = {"connect_timeout": CONNECT_TIMEOUT_S, "application_name": "etude", **NETWORK}
    given |= conninfo.conninfo_to_dict(server)
    lock_timeout = f"{round(1000 * min(retry_timeout_s, LOCK_TIMEOUT_S))}ms"
    session = {"search_path": schema, "lock_timeout": lock_timeout, **settings}
    options = (str(given.get("options", "")), *(f"-c {name}={value}" for name, value in session.items()))
    return {**given, "options": " ".join(options)}


@cache
def _postgres_sql(statement: str) -> str:
    """A statement in the dialect of PostgreSQL and psycopg; the cache holds a few dozen."""
    return TYPE.sub(lambda word: TYPES[word[0]], statement.replace(ROWS, POSTGRES_ROWS)).replace("?", "%s")
