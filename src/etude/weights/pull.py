"""From the log to weights in memory, each step proven: the receiving end of the chain.

    newest ──▶ plan ──▶ fetch, verify ──▶ apply to a copy in memory ──▶ prove ──▶ Arrival: what changed
                            ▲
    announced packs ──prefetch

A receiver holds a copy of the weights beside whatever serves them, so everything here happens while serving; an engine
pauses only to take over what an :class:`Arrival` names. No damage stops it that leaves any sound way to the target: a
broken way is left out and the next best taken, a copy that is not what it should be is given up and read again. Which
way is best is ``plan.py``'s to say; ``replica.py`` applies and proves.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import final

from etude.closing import Closing
from etude.errors import DamagedError, UserError
from etude.types import WeightVersion
from etude.weights.chunks import Layout
from etude.weights.fetch import Fetcher
from etude.weights.full_requests import plead
from etude.weights.log import WeightLog, newest
from etude.weights.plan import Edge, LinkSpeed, Plan, plan
from etude.weights.replica import ChangedNumbers, Changes, PulledWeights, Replica
from etude.weights.shards import Share
from etude.weights.subscription import EVERYTHING, Want


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOptions:
    """How a receiver works; the defaults suit anything from a laptop to a cluster."""

    connections: int = 16
    """Packs fetched at once: over a long distance one connection does not fill the link."""
    appliers: int = 2
    """Threads that decode and apply."""
    cache_bytes: int = 4 << 30
    """Packs held in memory before their version is committed."""
    link: LinkSpeed = field(default_factory=lambda: LinkSpeed(bytes_per_s=1.25e9, apply_bytes_per_s=2e9))
    """What the way to the store is taken to be like until it has been measured."""
    most_bytes: int = field(default_factory=lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    """The largest state; by default as large as this machine's memory, where it is to be held."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """A receiver's copy has reached a version."""

    version: int
    digest: str
    changes: Changes
    """What may have changed since the arrival before."""
    links: int
    """How many links led here."""
    size_bytes: int
    """What was fetched for it."""
    faults: tuple[str, ...]
    """What was found broken on the way, and got around."""
    seconds: float


class _Journey:
    """What has been met on the way to a version."""

    def __init__(self, target: int | None) -> None:
        self.target = target
        """``None`` when it is the newest, whichever that is."""
        self.links = 0
        self.size_bytes = 0
        self.faults: list[str] = []
        self.broken: set[tuple[int | None, int]] = set()
        """Ends of the links that cannot be followed."""
        self.doubted: set[Edge] = set()
        """Links that failed once, which may have been the copy's fault."""


@final
class Receiver(Closing):
    """Follows a log and keeps a copy of the weights, or of a wanted part; for one thread at a time.

    It never takes an older version for the newest than it had before, or than the log is known to have: where records
    were deleted, it keeps what it holds. Only who names an older version goes back to it.

    When it wants everything, each version is proven against the state digest of its record; otherwise each chunk
    against the digest in its frame.
    """

    def __init__(self, log: WeightLog, options: ReceiveOptions | None = None, want: Want = EVERYTHING) -> None:
        self._log = log
        self._want = want
        chosen = options or ReceiveOptions()
        self._most_bytes = chosen.most_bytes
        self._fetcher = Fetcher(
            log,
            chosen.link,
            connections=chosen.connections,
            cache_bytes=chosen.cache_bytes,
        )
        self._appliers = ThreadPoolExecutor(chosen.appliers, "apply")
        self._replica: Replica | None = None
        self._at_least = log.at_least
        self._changes = Changes()
        """What has changed since the last arrival, on journeys that broke off, too."""
        self._layouts: dict[str, Layout] = {}

    def close(self) -> None:
        """Stop all threads."""
        self._fetcher.close()
        self._appliers.shutdown(cancel_futures=True)

    @property
    def version(self) -> int | None:
        """The version held, ``None`` before the first arrival."""
        return None if self._replica is None else self._replica.record.version

    @property
    def replica(self) -> Replica:
        """What is held; the next :meth:`advance` changes it in place. Raises ``ValueError`` before the first."""
        if self._replica is None:
            raise ValueError("the receiver holds nothing yet: advance it first")
        return self._replica

    @property
    def fetched_bytes(self) -> int:
        """What has been fetched since the start, for progress bars."""
        return self._fetcher.fetched_bytes

    def weights(self) -> PulledWeights:
        """What is held, as whole tensors in the replica's memory."""
        return self.replica.weights()

    def changed(self, arrival: Arrival) -> dict[str, list[ChangedNumbers]]:
        """The numbers that the last arrival may have changed, by tensor."""
        return self.replica.changed(arrival.changes)

    def changed_share(self, arrival: Arrival) -> float:
        """The share of all numbers held that the last arrival may have changed."""
        return self.replica.changed_share(arrival.changes)

    def prefetch(self) -> int:
        """Fetch what has been announced of the next version before it is committed; returns the bytes fetched."""
        following = 0 if self.version is None else self.version + 1
        announced = self._log.announced(following)
        return self._fetcher.fetch_early(
            pack for announcement in announced for pack in announcement.packs if self._want.rank(pack.rank)
        )

    def plan(self, target: int | None = None) -> Plan:
        """The way to ``target`` (default: the newest version) from what is held."""
        return self._plan(_find(self._log, self._at_least, self.version, target), frozenset())

    def advance(self, target: int | None = None) -> Arrival:
        """Bring the copy to ``target`` (default: the newest version), forwards or backwards, and say what changed.

        Raises :class:`~etude.errors.UserError` when there is no such version, :class:`~etude.errors.DamagedError` when
        there is no sound way to it, or only older ones than there were. Store faults raise
        :class:`~etude.errors.InfrastructureError`. After either the copy is some version of the log, or nothing; the
        next call goes on from there.
        """
        started_s = time.perf_counter()
        journey = _Journey(target)
        version = _find(self._log, self._at_least, self.version, target)
        while self.version != version:
            way = self._way(version, journey)
            if way is None or not all(self._try(edge, journey) for edge in way):
                version = _find(
                    self._log, self._at_least, self.version, target
                )  # the newest may be another by now, and what it was no longer kept
        self._at_least = version
        changes, self._changes = self._changes, Changes()
        return Arrival(
            version=version,
            digest=self.replica.record.digest,
            changes=changes,
            links=journey.links,
            size_bytes=journey.size_bytes,
            faults=tuple(journey.faults),
            seconds=time.perf_counter() - started_s,
        )

    def scrub(self) -> int:
        """Read the copy again and, when any chunk is not what it should be, get it anew; returns how many were not."""
        bad = len(self.replica.scrub())
        if bad:
            version, self._replica = self.version, None
            self.advance(version)
        return bad

    def _way(self, version: int, journey: "_Journey") -> tuple[Edge, ...] | None:
        """The links to follow; ``None`` when none lead to ``version`` but there is a newer one."""
        try:
            return self._plan(version, frozenset(journey.broken)).edges
        except DamagedError as error:
            if self._log.latest() != version and journey.target is None:
                return None
            if journey.target is None:
                plead(self._log)
            met = "; ".join(dict.fromkeys((*journey.faults, *self._log.faults)))
            raise DamagedError(f"{error}; met on the way: {met}" if met else str(error)) from error

    def _try(self, edge: Edge, journey: "_Journey") -> bool:
        """Follow one link if it is sound; else take note of what is wrong with it."""
        held = self.version
        try:
            journey.size_bytes += self._take(edge)
        except DamagedError as error:
            journey.faults.append(str(error))
            if held is None or self.version is not None or edge in journey.doubted:
                journey.broken.add((edge.source, edge.target))  # not to be had, or wrong in itself
            journey.doubted.add(edge)  # or was it the copy that was wrong? Then it will do the next time, from nothing
            return False
        journey.links += 1
        return True

    def _take(self, edge: Edge) -> int:
        """Follow one link; everything is fetched and verified before anything is touched. Returns the bytes fetched."""
        target = _record(self._log, edge.target)
        held = self._replica
        if held is not None and edge.source is not None and edge.source_digest != held.record.digest:
            raise DamagedError(
                f"what leads from weight version {edge.source} to {edge.target} starts from the state "
                f"{(edge.source_digest or '')[:12]}, held is {held.record.digest[:12]}: it continues another history"
            )
        self._layouts = {digest: self._layouts.get(digest) or _layout(self._log, digest) for digest in edge.layouts}
        layouts = [self._layouts[digest] for digest in edge.layouts]
        _require_room(edge.target, layouts, self._most_bytes)
        packs = self._fetcher.fetch(
            pack for pack in edge.packs if pack.rank < len(layouts) and self._want.pack(pack, layouts[pack.rank])
        )
        replica, self._replica = self._replica, None  # of no version until the link has been followed to its end
        if edge.source is None or replica is None:
            self._changes.whole = True
            replica = Replica.empty(target, layouts, self._want)
        elif replica.record.layouts != edge.layouts:
            self._changes.whole = True
            replica = replica.laid_out(layouts)
        self._replica = replica.follow(target, packs, self._appliers, self._changes)
        return sum(len(data) for _, data in packs)

    def _plan(self, target: int, broken: frozenset[tuple[int | None, int]]) -> Plan:
        if self._replica is not None and not _is_kept(self._log, self._replica.record):
            self._replica = None
        return plan(self._log.edges(self.version, target, broken), target, self.version, self._fetcher.link)


def pull(log: WeightLog, target: int | None = None) -> PulledWeights:
    """The weights of version ``target`` (default: the newest) in memory of their own. Raises as
    :meth:`Receiver.advance`.
    """
    with Receiver(log) as receiver:
        receiver.advance(target)
        return receiver.weights()


def pull_share(log: WeightLog, version: int, rank: int, layout: Layout) -> Share:
    """One rank's share of a version, in ``layout``: only that share is fetched when it was published in the same one.

    Raises as :meth:`Receiver.advance`, and ``ValueError`` when the version has other tensors than the layout.
    """
    record = log.read(version)
    if record is not None and rank < len(record.layouts) and record.layouts[rank] == layout.digest:
        try:
            with Receiver(log, want=Want(ranks=frozenset({rank}))) as receiver:
                receiver.advance(version)
                if (share := receiver.replica.shares[rank]) is not None:
                    return share
        except DamagedError:
            pass  # perhaps only for a share: where the ranks changed on the way, everything is needed
    return Share(layout, layout.cut(pull(log, version).state))


def _find(log: WeightLog, at_least: int, held: int | None, target: int | None) -> int:
    """The version to go to. Raises :class:`~etude.errors.UserError` when there is none."""
    version = newest(log, held, at_least) if target is None else target
    if version is None:
        raise UserError(f"no weight version is published in {log.store.url} yet")
    if target is not None and log.read(version) is None:
        raise UserError(f"weight version {version} is not published in {log.store.url}: the newest is {log.latest()}")
    return version


def _is_kept(log: WeightLog, held: WeightVersion) -> bool:
    """True if what is held can be built upon: not of a past that is no longer kept."""
    try:
        return log.read(held.version) is not None
    except DamagedError:
        return True  # the copy was proven when the record could be read


def _record(log: WeightLog, version: int) -> WeightVersion:
    record = log.read(version)
    if record is None:
        raise DamagedError(f"weight version {version} vanished from {log.store.url} while it was read")
    return record


def _require_room(version: int, layouts: Sequence[Layout], most_bytes: int) -> None:
    """Raise :class:`~etude.errors.DamagedError` for a state larger than the reader can mean, before it takes memory."""
    size_bytes = sum(layout.size_bytes for layout in layouts)
    if size_bytes > most_bytes:
        raise DamagedError(
            f"the layouts of weight version {version} are of {size_bytes:,} bytes, expected are at most {most_bytes:,} "
            f"(ReceiveOptions.most_bytes)"
        )


def _layout(log: WeightLog, digest: str) -> Layout:
    data = log.layout(digest)
    if data is None:
        raise DamagedError(f"layout {digest[:12]} is missing from {log.store.url}; run `etude weights verify`")
    return Layout.from_bytes(data)
