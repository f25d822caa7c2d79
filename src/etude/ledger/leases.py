"""Leases: exclusive rights of processes, and when a silent holder may be relieved of one.

    free ──take──▶ held ──beat──▶ held ──release──▶ free
                    ▲              ├──relieve──────▶ free     silent for a term
                    └─────take─────┘                          by its own name, or silent for a term

**Safety** rests on tokens alone. A lease's token rises whenever it is taken or taken away, and never falls. Every
transaction of a holder first reads the token, under the lock that orders all writes of a ledger, and is refused if it
is not the holder's: however long a holder was stopped, cut off or wrong about time, what it writes after losing its
lease is never kept.

**Expiry** is only about not disturbing the living, so no clock of two machines is ever compared, and none that can be
set is read. A holder counts its heartbeats up; who wants the lease watches that number and adds up, by its own
monotonic clock, for how long it did not move. A watcher that was itself stopped, or that could not reach the ledger,
learns nothing from the time it missed: between two looks at most a quarter of a term counts. Jumps of the time of day
change nothing on either side, and so do restarts of the database.

**One's own name** is taken back at once. A holder is named by its machine and run folder, and what vouches for that
name (:mod:`etude.run.folder`) has seen the predecessor die. Should that be wrong, the token holds.

Pure: rows and ``now`` in, decisions out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from etude.errors import FencedError

NO_HOLDER = ""
"""The holder of a lease that is free."""
BEATS_PER_TERM = 4
"""Heartbeats in the time after which silence counts as death: three may be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A right that one process holds at a time, as the ledger knows it."""

    name: str
    holder: str = NO_HOLDER
    token: int = 0
    """Fencing token: counts how often it was taken or taken away; it stays when the lease is released."""
    beats: int = 0
    """Heartbeats of its holder."""

    @property
    def is_free(self) -> bool:
        """True if it has no holder."""
        return self.holder == NO_HOLDER


def take(lease: Lease, holder: str, *, silent: bool) -> Lease | None:
    """The lease in the hands of ``holder``; ``None`` while another one lives, which is unless it is ``silent``."""
    if not lease.is_free and lease.holder != holder and not silent:
        return None
    return replace(lease, holder=holder, token=lease.token + 1, beats=0)


def relieve(lease: Lease) -> Lease:
    """The lease without its silent holder."""
    return replace(lease, holder=NO_HOLDER, token=lease.token + 1)


def beat(lease: Lease, mine: Lease) -> Lease:
    """The lease after a heartbeat. Raises like :func:`prove`."""
    prove(lease, mine)
    return replace(lease, beats=lease.beats + 1)


def release(mine: Lease) -> Lease:
    """The lease after its holder, proven, let go of it."""
    return replace(mine, holder=NO_HOLDER)


def prove(lease: Lease, mine: Lease) -> None:
    """Raise :class:`~etude.errors.FencedError` unless ``lease`` is still ``mine``."""
    if (lease.token, lease.holder) != (mine.token, mine.holder):
        now = f"{lease.holder} has it" if not lease.is_free else "it was taken away"
        raise FencedError(
            f"lease {mine.name!r} of {mine.holder} (token {mine.token}) is lost: {now} (token {lease.token}); "
            f"this process must stop, and what it did since is done again"
        )


class LeaseWatch:
    """The leases of others as one process has seen them: it knows which holders are silent."""

    def __init__(self, term_s: float) -> None:
        self._term_s = term_s
        self._seen: dict[str, tuple[Lease, float]] = {}
        """Name → the lease at the last look, and for how many watched seconds it has not changed."""
        self._last_s: float | None = None

    def silent(self, leases: Iterable[Lease], now_s: float) -> frozenset[str]:
        """The names of those among ``leases`` whose holders were silent for a term; forgets all that are not named.

        Meant to be asked more often than ``term_s / BEATS_PER_TERM``; with longer pauses it takes longer to be sure.
        """
        missed_s = 0.0 if self._last_s is None else now_s - self._last_s
        watched_s = min(max(0.0, missed_s), self._term_s / BEATS_PER_TERM)
        self._last_s = now_s
        seen = self._seen
        self._seen = {}
        for lease in leases:
            before, quiet_s = seen.get(lease.name, (None, 0.0))
            self._seen[lease.name] = (lease, quiet_s + watched_s if lease == before else 0.0)
        return frozenset(name for name, (_, quiet_s) in self._seen.items() if quiet_s >= self._term_s)
