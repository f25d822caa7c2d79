"""The turns of a ledger's rollouts: objects beside it if it has payloads, else in its rows.

Owns the location of turns. The format of an object is in :mod:`etude.ledger.payloads`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

from etude.ledger import rows
from etude.ledger.archive import StoredGroup, read_group, whole_groups
from etude.ledger.database import Database
from etude.ledger.payloads import Payloads
from etude.ledger.transactions import Transactions
from etude.types import Group, PayloadRef, Rollout

AT_ONCE = 500
"""Maximum digests per query."""
Item = TypeVar("Item")


class StoredTurns:
    """Turns of one connection's rollouts."""

    def __init__(self, transactions: Transactions, payloads: Payloads | None) -> None:
        self._db = transactions
        self.payloads = payloads
        """The store of turns; ``None``: they are in the rows."""

    def store(self, rollout: Rollout) -> PayloadRef | None:
        """Store the turns of a rollout before it is recorded; ``None`` if they will be in the row.

        Only this method may be called from any thread: it does not use the database, and it may wait for a remote
        storage. Raises like :meth:`~etude.ledger.payloads.Payloads.store_turns`.
        """
        if self.payloads is None or not rollout.turns:
            return None
        return self.payloads.store_turns(rollout.turns, rollout.rollout_id)

    def named(self, digests: Sequence[str]) -> set[str]:
        """The digests of turns, among ``digests``, that a rollout refers to."""
        some = few(digests, AT_ONCE)
        return {digest for each in some for digest in self._db.read(partial(_named_turns, each))}

    def read_groups(self, places: Sequence[tuple[str, int]]) -> list[Group]:
        """Groups by purpose and index; their turns are fetched concurrently. Raises ``ValueError``."""
        stored = [self._db.read(partial(_read_group, purpose, index)) for purpose, index in places]
        return whole_groups(stored, self.payloads)


def few(items: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    """``items`` in batches of at most ``most``."""
    return (items[start : start + most] for start in range(0, len(items), most))


def _read_group(purpose: str, index: int, db: Database) -> StoredGroup:
    return read_group(db, purpose, index)


def _named_turns(digests: Sequence[str], db: Database) -> set[str]:
    return rows.named_turns(db, digests)
