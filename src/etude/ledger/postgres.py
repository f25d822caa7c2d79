"""A server's database, for runs on any number of machines: one schema of PostgreSQL for each run.

``begin`` takes a lock that is named after the schema, so that the transactions of a run go one after the other and
those of different runs side by side; reads take none. It also notes the transaction's number: whether a transaction is
kept whose connection broke is a question that PostgreSQL answers by that number (``pg_xact_status``).

Needs psycopg 3, an extra of étude.
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
"""Timeout of one try to connect."""
LOCK_TIMEOUT_S = 30.0
"""Longest wait of one call for another process's transaction; those take milliseconds."""
SETTINGS = {
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "10s",  # of a process that was stopped in the middle: others go on
}
"""Nothing that the server does for us is unbounded."""
NETWORK = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,  # ms
}
"""Seconds after which a server that went away without a word counts as lost."""
TYPES = {"INTEGER": "BIGINT", "REAL": "DOUBLE PRECISION", "BLOB": "BYTEA"}
"""Types as the migrations say them → as PostgreSQL does."""
TYPE = re.compile(rf"\b({'|'.join(TYPES)})\b")
ROWS, POSTGRES_ROWS = "json_each(?)", "json_array_elements(CAST(? AS json))"
"""The rows of a JSON array, each in the column ``value``, as statements say it and as PostgreSQL does."""
VERSION_TABLE = "schema_version"
"""Holds one row: the version of the tables beside it."""


class PostgresDatabase:
    """One connection to the schema of a run, made again when it is lost."""

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
        """The number of the last transaction that was begun."""

    @classmethod
    def open(
        cls, server: str, schema: str, *, retry_timeout_s: float, read_only: bool = False, tables: Schema = LEDGER
    ) -> Self:
        """Connect, and make or migrate the tables.

        ``server`` is a URL as libpq takes it. With ``read_only`` nothing is written: a schema that is missing or of an
        older étude is refused, too. Raises :class:`~etude.errors.ConfigError` when the server refuses us,
        :class:`~etude.errors.RunFolderError` for a schema that is not ours or of a newer étude, and
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
        """The URL without whatever could be secret."""
        return f"{public(self._server)}#{self._schema}"

    def execute(self, statement: str, *values: Value) -> list[Row]:
        """The rows of one statement."""
        cursor = self._sent(_postgres_sql(statement), values)
        return cursor.fetchall() if cursor.description else []

    def begin(self) -> None:
        """Take the lock of the schema and note the number of the transaction."""
        cursor = self._sent(f"BEGIN; SELECT pg_advisory_xact_lock({self._lock}), pg_current_xact_id()::text")
        cursor.nextset()
        ((_, self._transaction),) = cursor.fetchall()

    def commit(self) -> None:
        """Keep what was written."""
        self._sent("COMMIT")

    def committed(self) -> bool:
        """Return true if the last transaction is kept; :class:`Interrupted` while the server itself does not know
        yet.
        """
        try:
            ((status,),) = self.execute("SELECT pg_xact_status(CAST(? AS xid8))", self._transaction)
        except errors.InvalidParameterValue:  # from its future: a standby took over that never heard of it
            return False
        if status not in ("committed", "aborted"):
            raise Interrupted(f"its last transaction is {status or 'forgotten'}")
        return bool(status == "committed")

    def rollback(self) -> None:
        """Forget what was written; a lost connection has done so."""
        if self._db is not None:
            with suppress(Interrupted, psycopg.Error):
                self._sent("ROLLBACK")

    def version(self) -> int:
        """The version of the tables; 0 when there are none."""
        rows = self.execute(f"SELECT version FROM {VERSION_TABLE}")
        return int(rows[0][0]) if rows else 0

    def set_version(self, version: int) -> None:
        """Note the version of the tables."""
        self.execute(f"DELETE FROM {VERSION_TABLE}")
        self.execute(f"INSERT INTO {VERSION_TABLE} (version) VALUES (?)", version)

    def scrub(self) -> None:
        """Vacuum the tables: no query finds what was deleted. The server's own log and backups are its keeper's."""
        self._sent(f"VACUUM {', '.join(f'{self._schema}.{table}' for table in sorted(self._tables()))}")

    def close(self) -> None:
        """Let go of the connection."""
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
        """Make the schema and its table of versions, unless they are there."""
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
        """Names of the tables in the schema, whether we may read them or not."""
        query = "SELECT tablename::text FROM pg_tables WHERE schemaname = ?"
        return {name for (name,) in self.execute(query, self._schema)}


def _connection(server: str, schema: str, retry_timeout_s: float, settings: Mapping[str, str]) -> dict[str, Any]:
    """Parameters of a connection: what the URL says, our bounds where it says nothing, the schema."""
    given = {"connect_timeout": CONNECT_TIMEOUT_S, "application_name": "etude", **NETWORK}
    given |= conninfo.conninfo_to_dict(server)
    lock_timeout = f"{round(1000 * min(retry_timeout_s, LOCK_TIMEOUT_S))}ms"
    session = {"search_path": schema, "lock_timeout": lock_timeout, **settings}
    options = (str(given.get("options", "")), *(f"-c {name}={value}" for name, value in session.items()))
    return {**given, "options": " ".join(options)}


@cache
def _postgres_sql(statement: str) -> str:
    """A statement as PostgreSQL and psycopg say it; the ledger has a few dozen."""
    return TYPE.sub(lambda word: TYPES[word[0]], statement.replace(ROWS, POSTGRES_ROWS)).replace("?", "%s")
