"""The database protocol of the ledger.

Owns the protocol and the two ways in which a database fails, temporarily and permanently. The databases are
:mod:`etude.ledger.sqlite` and :mod:`etude.ledger.postgres`; retries are in :mod:`etude.ledger.transactions`.

**Why no SQL library.** The ledger is forty SQL statements that both databases understand. They differ in the mark of a
parameter and three names of types, which one function in :mod:`etude.ledger.postgres` translates. SQLAlchemy Core would
hide that for twelve times the processor time in SQLite (0.5 instead of 0.04 ms for the most frequent query, whether a
batch is due) and four to nine times in PostgreSQL. The hard part, knowing whether a transaction was committed whose
connection broke, would still be ours.
"""

from typing import Any, Protocol, TypeAlias

from etude.errors import InfrastructureError

Value: TypeAlias = int | float | str | bytes | None
"""A value of a column."""
Row: TypeAlias = tuple[Any, ...]
"""A selected row; the types are the columns'."""


class Interrupted(Exception):
    """The database is temporarily unavailable: locked, full, restarting or out of reach. Worth another try."""


NOTHING_THERE = "nothing has been recorded there yet: start the run, or look into another one"
"""Message for a reader where there is no ledger yet."""


class LedgerUnavailable(InfrastructureError):
    """The ledger's database could not be reached within the retry timeout."""


class Database(Protocol):
    """One connection to a ledger's database, for one thread.

    A statement has ``?`` for each value and no other question mark; ``json_each(?)`` gives the rows of a JSON array,
    each in the column ``value``, and ``value->>0`` is the first element of one, as text. Outside of a transaction each
    statement is a transaction of its own. Every method raises :class:`Interrupted` for a temporary fault, after which
    the next call reconnects if it must, and :class:`~etude.errors.DamagedError` for a permanent one.
    """

    @property
    def name(self) -> str:
        """Name of the ledger in messages, without secrets."""

    def execute(self, sql: str, *values: Value) -> list[Row]:
        """The rows of one statement."""

    def begin(self) -> None:
        """Start an exclusive transaction: no other that :meth:`begin` started on this ledger runs before its end, so
        what it reads stays true.
        """

    def commit(self) -> None:
        """Commit what was written since :meth:`begin`. If this is interrupted, ask :meth:`committed`."""

    def committed(self) -> bool:
        """True if the transaction whose :meth:`commit` was interrupted was committed after all."""

    def rollback(self) -> None:
        """Undo what was written since :meth:`begin`; raises nothing, also without a transaction."""

    def version(self) -> int:
        """The version of the tables; 0 when there are none."""

    def set_version(self, version: int) -> None:
        """Set the version of the tables, as a part of the transaction."""

    def scrub(self) -> None:
        """Overwrite deleted data, as far as the database can; not within a transaction."""

    def close(self) -> None:
        """Close the connection."""
