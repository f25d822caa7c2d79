"""Leases: exclusive rights of processes, and the rules for removing one from a silent holder.

    free ──take──▶ held ──beat──▶ held ──release──▶ free
                    ▲              ├──relieve──────▶ free     silent for a term
                    └─────take─────┘                          by its own name, or silent for a term

**Safety** depends on tokens alone. A lease's token increases whenever the lease is taken or removed, and never
decreases. Each transaction of a holder first reads the token, under the lock that orders all writes of a ledger, and is
rejected if the token is not the holder's. However long a holder was stopped, disconnected or wrong about time, no write
after the loss of its lease is stored.

**Expiry** only avoids disturbing live holders, so clocks of different machines are never compared, and no adjustable
clock is read. A holder increments its heartbeats; a process that waits for the lease watches that number and adds up,
on its own monotonic clock, how long it did not change. Time in which the watcher itself was stopped or could not reach
the ledger does not count: between two looks at most a quarter of a term is added. Changes of the time of day and
restarts of the database have no effect.

**A holder's own name** gets the lease back at once. A holder is named by its machine and run folder, and
:mod:`etude.run.folder` ensures that the predecessor of that name is dead. If it is not, the token still protects.

Pure: rows and ``now`` in, decisions out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from etude.errors import FencedError

NO_HOLDER = ""
"""Holder of a free lease."""
BEATS_PER_TERM = 4
"""Heartbeats per term, the time after which a silent holder counts as dead: three may be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A right that one process holds at a time, as recorded in the ledger."""

    name: str
    holder: str = NO_HOLDER
    token: int = 0
    """Fencing token: how often the lease was taken or removed; a release does not change it."""
    beats: int = 0
    """Heartbeats of its holder."""

    @property
    def is_free(self) -> bool:
        """True if it has no holder."""
        return self.holder == NO_HOLDER


def take(lease: Lease, holder: str, *, silent: bool) -> Lease | None:
    """The lease held by ``holder``; ``None`` if another holder has it and is not ``silent``."""
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
    """The lease after its release; :func:`prove` must have verified its holder."""
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
    """One process's observations of other leases, which show the silent holders."""

    def __init__(self, term_s: float) -> None:
        self._term_s = term_s
        self._seen: dict[str, tuple[Lease, float]] = {}
        """Name → the lease at the last look, and the watched seconds without a change."""
        self._last_s: float | None = None

    def silent(self, leases: Iterable[Lease], now_s: float) -> frozenset[str]:
        """The names of those ``leases`` whose holders were silent for a term; removes all other leases from the record.

        Call it more often than every ``term_s / BEATS_PER_TERM``; with longer pauses detection takes longer.
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
