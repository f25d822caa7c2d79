"""The database protocol of the ledger.

Owns the protocol and the two ways in which a database fails: for now, and for good. The databases are
:mod:`etude.ledger.sqlite` and :mod:`etude.ledger.postgres`; retries are
:mod:`etude.ledger.transactions`'.

**Why no library between.** The ledger is forty statements in SQL that both databases understand. What differs is the
mark of a parameter and three names of types, and that is one function in :mod:`etude.ledger.postgres`. SQLAlchemy Core
would hide it for twelve times the processor time in SQLite (0.5 instead of 0.04 ms for asking whether a batch is due,
which is done all the time) and four to nine times in PostgreSQL. What is hard here, knowing whether a transaction was
kept whose connection broke, it would leave to us anyway.
"""

from typing import Any, Protocol, TypeAlias

from etude.errors import InfrastructureError

Value: TypeAlias = int | float | str | bytes | None
"""A value of a column."""
Row: TypeAlias = tuple[Any, ...]
"""A selected row; the types are the columns'."""


class Interrupted(Exception):
    """A database cannot be asked right now: it is locked, full, restarting or out of reach. Worth another try."""


NOTHING_THERE = "nothing has been recorded there yet: start the run, or look into another one"
"""Message for a reader of a place without a ledger."""


class LedgerUnavailable(InfrastructureError):
    """The ledger's database could not be reached within the retry timeout."""


class Database(Protocol):
    """One connection to a ledger's database, for one thread.

    A statement writes ``?`` for each value and has no other question mark; ``json_each(?)`` are the rows of a JSON
    array, each in the column ``value``, of which ``value->>0`` is the first element, as text. Outside of a transaction
    it is one of its own. Every method raises :class:`Interrupted` for a fault that may pass, and then the next call
    connects anew if it must; :class:`~etude.errors.DamagedError` for one that will not.
    """

    @property
    def name(self) -> str:
        """Name of the ledger in messages; it has no secrets."""

    def execute(self, sql: str, *values: Value) -> list[Row]:
        """The rows of one statement."""

    def begin(self) -> None:
        """Start a transaction, alone: no other one that :meth:`begin` started on this ledger runs until its end, so
        what is read inside stays true.
        """

    def commit(self) -> None:
        """Keep what was written since :meth:`begin`. When interrupted, :meth:`committed` knows."""

    def committed(self) -> bool:
        """Return true if the transaction was kept whose :meth:`commit` was interrupted."""

    def rollback(self) -> None:
        """Forget what was written since :meth:`begin`; raises nothing, also without a transaction."""

    def version(self) -> int:
        """The version of the tables; 0 when there are none."""

    def set_version(self, version: int) -> None:
        """Note the version of the tables, as a part of the transaction."""

    def scrub(self) -> None:
        """Make what was deleted unreadable, as far as the database can; not within a transaction."""

    def close(self) -> None:
        """Let go of the connection."""
