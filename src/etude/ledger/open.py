"""The location of a ledger: a file, or a schema of a PostgreSQL database.

    runs/quickstart-s0/ledger.db                              a path: SQLite, for the processes of one machine
    postgresql://etude@db.example:5432/runs#quickstart_s0_3f  a URL: PostgreSQL, for any number of runs and machines

The fragment names the schema, one per run: runs share no tables, a newer étude can migrate its runs beside older ones,
and dropping the schema deletes a run. A URL contains no password (``[ledger]`` rejects one): libpq reads it from
``PGPASSWORD`` or ``~/.pgpass``.
"""

import re
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from etude.errors import RunFolderError
from etude.ledger.database import Database
from etude.ledger.schema import LEDGER, Schema
from etude.ledger.sqlite import SqliteDatabase
from etude.ledger.transactions import retry

SCHEMES = ("postgresql", "postgres")
"""URL schemes of PostgreSQL."""
SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
"""Names that PostgreSQL accepts without quotes."""
LONGEST_LABEL = 40
"""Maximum characters of a run's name in its schema's name."""


def open_database(
    place: Path | str, *, retry_timeout_s: float, read_only: bool = False, tables: Schema = LEDGER
) -> Database:
    """Connect to a database, with retries for ``retry_timeout_s``, and create or migrate its ``tables``.

    With ``read_only`` nothing is written. Raises :class:`~etude.errors.RunFolderError` for other content or a newer
    ledger, and with ``read_only`` also for a missing or older one; :class:`~etude.errors.ConfigError` if the client
    library is missing; and :class:`~etude.ledger.database.LedgerUnavailable`.
    """
    opening: Callable[[], Database]
    if not is_url(place):
        path = Path(place)
        opening = partial(
            SqliteDatabase.open, path, retry_timeout_s=retry_timeout_s, read_only=read_only, schema=tables
        )
        return retry(opening, str(path), retry_timeout_s)
    from etude.ledger.postgres import PostgresDatabase  # the client library is an extra

    server, schema = _split(str(place))
    name = f"{public(server)}#{schema}"
    opening = partial(
        PostgresDatabase.open, server, schema, retry_timeout_s=retry_timeout_s, read_only=read_only, tables=tables
    )
    return retry(opening, name, retry_timeout_s)


def is_url(place: Path | str) -> bool:
    """Return true if a place is a URL, not a path."""
    return isinstance(place, str) and place.partition("://")[0] in SCHEMES


def public(url: str) -> str:
    """A server's URL without its possibly secret parts: user, password and parameters."""
    parts = urlsplit(url)
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"


def place_of_run(url: str, label: str) -> str:
    """A location for a new run's ledger in a database: a new schema with a readable name from ``label``."""
    readable = re.sub(r"[^a-z0-9]+", "_", label.lower())[:LONGEST_LABEL]
    return f"{url}#etude_{readable}_{secrets.token_hex(4)}"


def _split(place: str) -> tuple[str, str]:
    server, _, schema = place.partition("#")
    if not SCHEMA.fullmatch(schema):
        raise RunFolderError(
            f"the ledger's URL ends in '#{schema}', which names no schema: expected #NAME, of small letters, digits "
            f"and underscores"
        )
    return server, schema
