"""Transactions that survive the loss of their connection and are refused to a process that lost its lease.

    write(work)   begin ──▶ prove the lease ──▶ work ──▶ commit ──▶ result
                    ▲              │             │          │
                    └── wait ◀─────┴─ interrupted┴──────────┤ interrupted: was it kept? the database knows
                                                            └──▶ yes: result

``work`` may run more than once, so it does nothing but read and write rows. A transaction is kept once or not at all,
also when the reply to its commit is lost: the database is asked about *that* transaction, not about what it might have
written. So no caller has to be able to repeat itself.

Every wait is bounded by the retry timeout, the one after a lost commit by as much again; then the caller gets
:class:`~etude.ledger.database.LedgerUnavailable`. The thread is blocked meanwhile: there is nothing that a process
without its ledger may do.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from etude.backoff import Backoff
from etude.closing import Closing
from etude.ledger import rows
from etude.ledger.database import Database, Interrupted, LedgerUnavailable
from etude.ledger.leases import Lease, prove

BACKOFF = Backoff(first_s=0.02, longest_s=1.0)
"""Between two tries."""

T = TypeVar("T")
Work = Callable[[Database], T]


def retry(attempt: Callable[[], T], name: str, timeout_s: float) -> T:
    """Return the result of ``attempt``, which is tried again for ``timeout_s`` while it is interrupted.

    Raises :class:`~etude.ledger.database.LedgerUnavailable` about the ledger of that ``name``.
    """
    deadline_s = time.monotonic() + timeout_s
    for delay_s in BACKOFF.delays():
        try:
            return attempt()
        except Interrupted as error:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise LedgerUnavailable(
                    f"the ledger {name} could not be asked for {timeout_s:g} s (ledger.retry_timeout_s): {error}; "
                    f"repair that and run again, nothing recorded is lost"
                ) from error
        time.sleep(min(delay_s, left_s))
    raise AssertionError("the delays are endless")


class Transactions:
    """Reads and writes on one connection to a database; not to be shared between threads."""

    def __init__(self, database: Database, *, retry_timeout_s: float) -> None:
        self._database = database
        self._retry_timeout_s = retry_timeout_s
        self.lease: Lease | None = None
        """The lease that every write has to prove first; a connection has at most one."""

    @property
    def name(self) -> str:
        """Name of the ledger in messages."""
        return self._database.name

    def read(self, work: Work[T]) -> T:
        """Return the result of ``work``, which only reads; its statements see one moment each."""
        return retry(lambda: work(self._database), self.name, self._retry_timeout_s)

    def write(self, work: Work[T]) -> T:
        """Return the result of ``work`` once everything it wrote is kept. Whatever it raises undoes it.

        Raises :class:`~etude.errors.FencedError` when the lease is lost, and
        :class:`~etude.ledger.database.LedgerUnavailable`.
        """
        return retry(lambda: self._once(work), self.name, self._retry_timeout_s)

    def scrub(self) -> None:
        """Make what was deleted unreadable."""
        retry(self._database.scrub, self.name, self._retry_timeout_s)

    def close(self) -> None:
        """Let go of the connection. What was written is kept even without."""
        self._database.close()

    def _once(self, work: Work[T]) -> T:
        database = self._database
        try:
            database.begin()
            if self.lease is not None:
                prove(rows.lease(database, self.lease.name), self.lease)
            result = work(database)
        except BaseException:
            database.rollback()
            raise
        try:
            database.commit()
        except Interrupted:
            if not retry(database.committed, self.name, self._retry_timeout_s):
                database.rollback()
                raise
        return result


class LedgerConnection(Closing):
    """One process's way into a ledger, open until it lets go; not to be shared between threads."""

    def __init__(self, transactions: Transactions) -> None:
        self._db = transactions

    def scrub(self) -> None:
        """Make what was deleted unreadable, as far as the database can. Raises
        :class:`~etude.ledger.database.LedgerUnavailable` while another process keeps it from that.
        """
        self._db.scrub()

    def close(self) -> None:
        """Let go of the database. What was committed is safe even without."""
        self._db.close()
