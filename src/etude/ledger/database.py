"""The database protocol of the ledger.

Owns the protocol and the two kinds of database failure, temporary and permanent. The databases are
:mod:`etude.ledger.sqlite` and :mod:`etude.ledger.postgres`; retries are in :mod:`etude.ledger.transactions`.

**Why no SQL library.** The ledger has forty SQL statements that both databases understand. The dialects differ in the
parameter placeholder and three type names, which one function in :mod:`etude.ledger.postgres` translates. SQLAlchemy
Core would hide this at twelve times the processor time in SQLite (0.5 instead of 0.04 ms for the most frequent query:
is a batch due?) and four to nine times in PostgreSQL. The hard part would remain ours: to find out if a transaction was
committed although its connection broke.
"""

from typing import Any, Protocol, TypeAlias

from etude.errors import InfrastructureError

Value: TypeAlias = int | float | str | bytes | None
"""A column's value."""
Row: TypeAlias = tuple[Any, ...]
"""A selected row; its columns determine the types."""


class Interrupted(Exception):
    """The database is temporarily unavailable: locked, full, restarting or unreachable. A retry may succeed."""


NOTHING_THERE = "nothing has been recorded there yet: start the run, or look into another one"
"""Message for a reader if there is no ledger yet."""


class LedgerUnavailable(InfrastructureError):
    """The ledger's database could not be reached within the retry timeout."""


class Database(Protocol):
    """One connection to a ledger's database, for one thread.

    A statement has ``?`` for each value and no other question mark. ``json_each(?)`` gives the rows of a JSON array,
    each in the column ``value``; ``value->>0`` is the first element of a row, as text. Outside a transaction, each
    statement is its own transaction. Every method raises :class:`Interrupted` for a temporary fault, after which the
    next call reconnects if necessary, and :class:`~etude.errors.DamagedError` for a permanent fault.
    """

    @property
    def name(self) -> str:
        """Name of the ledger in messages, without secrets."""

    def execute(self, sql: str, *values: Value) -> list[Row]:
        """The rows of one statement."""

    def begin(self) -> None:
        """Start an exclusive transaction: no other transaction from :meth:`begin` on this ledger runs until it ends, so
        the data that it reads stay valid.
        """

    def commit(self) -> None:
        """Commit all writes since :meth:`begin`. If this is interrupted, call :meth:`committed`."""

    def committed(self) -> bool:
        """Return true if the transaction whose :meth:`commit` was interrupted was committed."""

    def rollback(self) -> None:
        """Undo all writes since :meth:`begin`; raises nothing, even without a transaction."""

    def version(self) -> int:
        """The version of the tables; 0 if there are none."""

    def set_version(self, version: int) -> None:
        """Set the version of the tables within the transaction."""

    def scrub(self) -> None:
        """Overwrite deleted data, as far as the database can; not within a transaction."""

    def close(self) -> None:
        """Close the connection."""
