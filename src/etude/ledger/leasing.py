"""What one door has to do with leases: take one, keep it up, watch those of others.

Owns the transactions; what they decide is :mod:`etude.ledger.leases`'.
"""

from collections.abc import Sequence

from etude.ledger import leases, rows
from etude.ledger.changes import ANYBODY
from etude.ledger.database import Database
from etude.ledger.leases import Lease, Watch
from etude.ledger.transactions import Transactions
from etude.protocols import Clock


class Leases:
    """The leases of a ledger, as one door sees them; the door itself holds at most one."""

    def __init__(self, transactions: Transactions, *, term_s: float, clock: Clock) -> None:
        self._db = transactions
        self._clock = clock
        self._rival = Watch(term_s)
        self._seats = Watch(term_s)

    @property
    def seat(self) -> str:
        """The name of the lease that this door holds; groups that it admits are filled under that name."""
        return ANYBODY if self._db.lease is None else self._db.lease.name

    def look(self, name: str) -> Lease:
        """What is known of a lease."""
        return self._db.read(lambda db: rows.lease(db, name))

    def take(self, name: str, holder: str) -> Lease | None:
        """Take a lease; ``None`` while another holder lives, which is known after a term of such calls.

        From then on every write of this door proves it first. Raises ``ValueError`` when the door holds one already.
        """
        if self._db.lease is not None:
            raise ValueError(f"this door holds the lease {self._db.lease.name!r}: open another one for {name!r}")
        seen = self.look(name)
        silent = name in self._rival.silent([seen], self._clock.now())
        self._db.lease = self._db.write(lambda db: _take(db, seen, holder, silent=silent))
        return self._db.lease

    def beat(self, mine: Lease) -> None:
        """Say that the holder of a lease lives. Raises :class:`~etude.errors.FencedError` when it is lost."""
        self._db.write(lambda db: rows.put_lease(db, leases.beat(rows.lease(db, mine.name), mine)))

    def release(self) -> None:
        """Let go of what this door holds, so that nobody has to wait for its silence."""
        mine = self._db.lease
        if mine is not None:
            self._db.write(lambda db: rows.put_lease(db, leases.release(mine)))
            self._db.lease = None

    def silent(self, names: Sequence[str]) -> list[Lease]:
        """Those of the named leases whose holders were silent for a term of such calls."""
        seen = [self.look(name) for name in names if name != ANYBODY]
        silent = self._seats.silent(seen, self._clock.now())
        return [lease for lease in seen if lease.name in silent]


def _take(db: Database, seen: Lease, holder: str, *, silent: bool) -> Lease | None:
    lease = rows.lease(db, seen.name)
    taken = leases.take(lease, holder, silent=silent and lease == seen)
    if taken is not None:
        rows.put_lease(db, taken)
    return taken
