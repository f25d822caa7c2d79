"""Transactions that survive the loss of their connection and reject a process that lost its lease.

    write(work)   begin ──▶ prove the lease ──▶ work ──▶ commit ──▶ result
                    ▲              │             │          │
                    └── wait ◀─────┴─ interrupted┴──────────┤ interrupted: was it committed? query the database
                                                            └──▶ yes: result

``work`` may run more than once, so it must only read and write rows. A transaction is committed once or not at all,
even if the reply to its commit is lost: the database reports the status of *that* transaction, independent of its
content. So callers need not be idempotent.

Every wait is bounded by the retry timeout, and the wait after a lost commit by the same time again; then the caller
gets :class:`~etude.ledger.database.LedgerUnavailable`. The thread blocks during the wait, because a process cannot do
anything without its ledger.
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
"""Delays between attempts."""

T = TypeVar("T")
Work = Callable[[Database], T]


def retry(attempt: Callable[[], T], name: str, timeout_s: float) -> T:
    """Return the result of ``attempt``, with retries for ``timeout_s`` while it is interrupted.

    Raises :class:`~etude.ledger.database.LedgerUnavailable` for the ledger ``name``.
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
        """The lease that every write checks first; a connection has at most one."""

    @property
    def name(self) -> str:
        """Name of the ledger in messages."""
        return self._database.name

    def read(self, work: Work[T]) -> T:
        """Return the result of ``work``, which only reads; each statement sees its own snapshot."""
        return retry(lambda: work(self._database), self.name, self._retry_timeout_s)

    def write(self, work: Work[T]) -> T:
        """Return the result of ``work`` once its writes are committed; any exception from it undoes them.

        Raises :class:`~etude.errors.FencedError` if the lease is lost, and
        :class:`~etude.ledger.database.LedgerUnavailable`.
        """
        return retry(lambda: self._once(work), self.name, self._retry_timeout_s)

    def scrub(self) -> None:
        """Make deleted data unreadable."""
        retry(self._database.scrub, self.name, self._retry_timeout_s)

    def close(self) -> None:
        """Close the connection. Committed writes are safe even without this call."""
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
    """One process's open connection to a ledger; not to be shared between threads."""

    def __init__(self, transactions: Transactions) -> None:
        self._db = transactions

    def scrub(self) -> None:
        """Make deleted data unreadable, as far as the database can. Raises
        :class:`~etude.ledger.database.LedgerUnavailable` while another process prevents it.
        """
        self._db.scrub()

    def close(self) -> None:
        """Close the connection. Committed writes are safe even without this call."""
        self._db.close()
