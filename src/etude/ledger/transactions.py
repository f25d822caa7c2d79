"""Transactions that survive the loss of their connection and are refused to whoever lost its lease.

    write(work)   begin ──▶ prove the lease ──▶ work ──▶ commit ──▶ result
                    ▲              │             │          │
                    └── wait ◀─────┴─ interrupted┴──────────┤ interrupted: was it kept? the database knows
                                                            └──▶ yes: result

``work`` may run more than once, so it does nothing but read and write rows. A transaction is kept once or not at all,
also when the reply to its commit is lost: the database is asked about *that* transaction, not about what it might have
written. So no caller has to be able to repeat itself.

Every wait is bounded by ``patience_s``, the one after a lost commit by as much again; then the caller gets
:class:`~etude.ledger.database.LedgerUnavailable`. The thread is blocked meanwhile: there is nothing that a process
without its ledger may do.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from etude.closing import Closing
from etude.ledger import rows
from etude.ledger.database import Database, Interrupted, LedgerUnavailable
from etude.ledger.leases import Lease, prove

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Between two tries; they double."""

T = TypeVar("T")
Work = Callable[[Database], T]


def pause_s(tries: int, spent_s: float, patience_s: float) -> float | None:
    """Seconds to wait after ``tries`` failures in ``spent_s`` seconds; ``None`` to give up."""
    if spent_s >= patience_s:
        return None
    return min(FIRST_PAUSE_S * 2.0 ** min(tries - 1, 16), LONGEST_PAUSE_S, patience_s - spent_s)


def insist(attempt: Callable[[], T], name: str, patience_s: float) -> T:
    """What ``attempt`` returns, tried again for ``patience_s`` while it is interrupted.

    Raises :class:`~etude.ledger.database.LedgerUnavailable` about the ledger of that ``name``.
    """
    started_s, tries = time.monotonic(), 0
    while True:
        try:
            return attempt()
        except Interrupted as error:
            tries += 1
            pause = pause_s(tries, time.monotonic() - started_s, patience_s)
            if pause is None:
                raise LedgerUnavailable(
                    f"the ledger {name} could not be asked for {patience_s:g} s (ledger.patience_s): {error}; "
                    f"repair that and run again, nothing recorded is lost"
                ) from error
            time.sleep(pause)


class Transactions:
    """What one door does to a database; not to be shared between threads."""

    def __init__(self, database: Database, *, patience_s: float) -> None:
        self._database = database
        self._patience_s = patience_s
        self.lease: Lease | None = None
        """What every write has to prove first; a door has at most one."""

    @property
    def name(self) -> str:
        """What to call the ledger in messages."""
        return self._database.name

    def read(self, work: Work[T]) -> T:
        """What ``work`` finds; its statements see one moment each."""
        return insist(lambda: work(self._database), self.name, self._patience_s)

    def write(self, work: Work[T]) -> T:
        """What ``work`` returns, after everything it wrote is kept. Whatever it raises undoes it.

        Raises :class:`~etude.errors.FencedError` when the lease is lost, and
        :class:`~etude.ledger.database.LedgerUnavailable`.
        """
        return insist(lambda: self._once(work), self.name, self._patience_s)

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
            if not insist(database.committed, self.name, self._patience_s):
                database.rollback()
                raise
        return result


class Door(Closing):
    """One process's way into a ledger, open until it lets go; not to be shared between threads."""

    def __init__(self, transactions: Transactions) -> None:
        self._db = transactions

    def close(self) -> None:
        """Let go of the database. What was committed is safe even without."""
        self._db.close()
