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
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import final

from etude.closing import Closing
from etude.errors import DamagedError, UserError
from etude.types import WeightPack, WeightVersion
from etude.weights.chunks import Layout
from etude.weights.log import WeightLog, newest
from etude.weights.plan import Edge, LinkSpeed, Plan, plan
from etude.weights.replica import ChangedNumbers, ChangedPlaces, PulledWeights, Replica

SMALLEST_SAMPLE = 1 << 20
"""Transfers below a megabyte measure the round trip, not the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOptions:
    """Options of a receiver; the defaults suit anything from a laptop to a cluster."""

    connections: int = 16
    """Packs fetched at once: over a long distance one connection does not fill the link."""
    appliers: int = 2
    """Threads that decode and apply."""
    cache_bytes: int = 4 << 30
    """Packs held in memory before their version is committed."""
    link: LinkSpeed = field(default_factory=lambda: LinkSpeed(bytes_per_s=1.25e9, apply_bytes_per_s=2e9))
    """The way to the store, until it has been measured."""
    most_bytes: int = field(default_factory=lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    """The largest state; by default as large as this machine's memory, where it is to be held."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """Report that a receiver's copy has reached a version."""

    version: int
    digest: str
    changes: ChangedPlaces
    """Places that may have changed since the arrival before."""
    links: int
    """Number of links that led here."""
    size_bytes: int
    """Bytes fetched for it."""
    faults: tuple[str, ...]
    """Damage on the way that was got around."""
    seconds: float


class _Journey:
    """State of the way to a version: what has been fetched and found broken."""

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
    """Follows a log and keeps a copy of the weights; for one thread at a time.

    It never takes an older version for the newest than it had before, or than the log is known to have: where records
    were deleted, it keeps what it holds. Only a caller that names an older version goes back to it. Each version is
    proven against the state digest of its record.
    """

    def __init__(self, log: WeightLog, options: ReceiveOptions | None = None) -> None:
        self._log = log
        chosen = options or ReceiveOptions()
        self._most_bytes = chosen.most_bytes
        self._fetcher = PackFetcher(log, chosen.link, connections=chosen.connections, cache_bytes=chosen.cache_bytes)
        self._appliers = ThreadPoolExecutor(chosen.appliers, "apply")
        self._current: tuple[WeightVersion, Replica] | None = None
        self._at_least = log.at_least
        self._changes = ChangedPlaces()
        """Places that have changed since the last arrival, on journeys that broke off, too."""
        self._layout: Layout | None = None

    def close(self) -> None:
        """Stop all threads."""
        self._fetcher.close()
        self._appliers.shutdown(cancel_futures=True)

    @property
    def version(self) -> int | None:
        """The version held, ``None`` before the first arrival."""
        return None if self._current is None else self._current[0].version

    @property
    def replica(self) -> Replica:
        """The copy; the next :meth:`advance` changes it in place. Raises ``ValueError`` before the first."""
        return self._require_current()[1]

    @property
    def fetched_bytes(self) -> int:
        """Bytes fetched since the start, for progress bars."""
        return self._fetcher.fetched_bytes

    def weights(self) -> PulledWeights:
        """The copy as tensors, in the replica's memory."""
        record, replica = self._require_current()
        return PulledWeights(version=record.version, digest=record.digest, state=replica.tensors)

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
        return self._fetcher.fetch_early(pack for announcement in announced for pack in announcement.packs)

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
                # The newest may be another by now, and what it was no longer kept.
                version = _find(self._log, self._at_least, self.version, target)
        self._at_least = version
        changes, self._changes = self._changes, ChangedPlaces()
        return Arrival(
            version=version,
            digest=self._require_current()[0].digest,
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
            version, self._current = self.version, None
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
                self._log.request_full()
            met = "; ".join(dict.fromkeys((*journey.faults, *self._log.faults)))
            raise DamagedError(f"{error}; met on the way: {met}" if met else str(error)) from error

    def _try(self, edge: Edge, journey: "_Journey") -> bool:
        """Follow one link if it is sound; else take note of what is wrong with it."""
        current = self.version
        try:
            journey.size_bytes += self._take(edge)
        except DamagedError as error:
            journey.faults.append(str(error))
            if current is None or self.version is not None or edge in journey.doubted:
                journey.broken.add((edge.source, edge.target))  # not to be had, or wrong in itself
            journey.doubted.add(edge)  # or was it the copy that was wrong? Then it will do the next time, from nothing
            return False
        journey.links += 1
        return True

    def _take(self, edge: Edge) -> int:
        """Follow one link; everything is fetched and verified before anything is touched. Returns the bytes fetched."""
        target = _record(self._log, edge.target)
        current = self._current
        if current is not None and edge.source is not None and edge.source_digest != current[0].digest:
            raise DamagedError(
                f"what leads from weight version {edge.source} to {edge.target} starts from the state "
                f"{(edge.source_digest or '')[:12]}, held is {current[0].digest[:12]}: it continues another history"
            )
        layout = self._read_layout(edge.layout)
        _require_room(edge.target, layout, self._most_bytes)
        packs = self._fetcher.fetch(edge.packs)
        self._current = None  # of no version until the link has been followed to its end
        if edge.source is None or current is None:
            self._changes.whole = True
            replica = Replica.empty(layout)
        else:
            replica = self._laid_out(current, layout)
        replica.follow(target, packs, self._appliers, self._changes)
        self._current = target, replica
        return sum(map(len, packs))

    def _read_layout(self, digest: str) -> Layout:
        """The layout of this digest: as a rule the one before."""
        if self._layout is None or self._layout.digest != digest:
            self._layout = _layout(self._log, digest)
        return self._layout

    def _laid_out(self, current: tuple[WeightVersion, Replica], layout: Layout) -> Replica:
        """The copy in the layout of a link."""
        record, replica = current
        if layout == replica.layout:
            return replica
        self._changes.whole = True
        try:
            return replica.laid_out(layout)
        except ValueError as error:
            raise DamagedError(f"no change leads from weight version {record.version} on: {error}") from error

    def _require_current(self) -> tuple[WeightVersion, Replica]:
        if self._current is None:
            raise ValueError("the receiver holds nothing yet: advance it first")
        return self._current

    def _plan(self, target: int, broken: frozenset[tuple[int | None, int]]) -> Plan:
        if self._current is not None and not _is_kept(self._log, self._current[0]):
            self._current = None
        return plan(self._log.edges(self.version, target, broken), target, self.version, self._fetcher.link)


@final
class PackFetcher:
    """Fetches verified packs over ``connections`` at once, early where they were announced; for one thread at a
    time.
    """

    def __init__(self, log: WeightLog, link: LinkSpeed, *, connections: int, cache_bytes: int) -> None:
        self.fetched_bytes = 0
        """Size of the packs that have arrived since the start."""
        self.link = link
        """The way to the store, as far as transfers have shown."""
        self._cache = PackCache(log, cache_bytes)
        self._threads = ThreadPoolExecutor(connections, "fetch")

    def close(self) -> None:
        """Stop all threads."""
        self._threads.shutdown(cancel_futures=True)

    def fetch(self, packs: Sequence[WeightPack]) -> list[bytes]:
        """Some packs, verified, in their order.

        Raises :class:`~etude.errors.DamagedError` for a pack that is missing or is not what its name says,
        :class:`~etude.errors.InfrastructureError` when the store does not do its part.
        """
        started_s = time.perf_counter()
        futures = [self._threads.submit(self._fetch_one, pack) for pack in packs]
        try:
            data = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
        size_bytes, seconds = sum(map(len, data)), time.perf_counter() - started_s
        if size_bytes >= SMALLEST_SAMPLE and seconds > 0:
            self.link = replace(self.link, bytes_per_s=(self.link.bytes_per_s + size_bytes / seconds) / 2)
        return data

    def fetch_early(self, packs: Iterable[WeightPack]) -> int:
        """Fetch announced packs into the cache; returns the bytes that came."""
        return sum(self._threads.map(self._cache.fetch_early, packs))

    def _fetch_one(self, pack: WeightPack) -> bytes:
        data = self._cache.fetch(pack)
        self.fetched_bytes += len(data)
        return data


@final
class PackCache:
    """Verified packs in memory, within a bound, the oldest given up first; safe to share between threads.

    What is announced may never be committed, and what is committed may be announced twice; a pack is named by its
    content, so neither does harm: it is fetched once.
    """

    def __init__(self, log: WeightLog, most_bytes: int) -> None:
        self._log = log
        self._most_bytes = most_bytes
        self._size_bytes = 0
        self._packs: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    def fetch(self, pack: WeightPack) -> bytes:
        """A pack's bytes, verified; it leaves the cache, since it is applied now.

        Raises :class:`~etude.errors.DamagedError` when it is missing or is not what its name says.
        """
        with self._lock:
            data = self._packs.pop(pack.digest, None)
            if data is not None:
                self._size_bytes -= len(data)
                return data
        return self._log.pack(pack)

    def fetch_early(self, pack: WeightPack) -> int:
        """Fetch a pack into the cache if it is there and there is room; returns the bytes fetched."""
        with self._lock:
            if pack.digest in self._packs or pack.size_bytes > self._most_bytes:
                return 0
        try:
            data = self._log.pack(pack)
        except DamagedError:
            return 0  # announced and not sound: whatever commits it will answer for it
        with self._lock:
            if pack.digest in self._packs:  # another thread was faster
                return len(data)
            self._packs[pack.digest] = data
            self._size_bytes += len(data)
            while self._size_bytes > self._most_bytes:
                _, oldest = self._packs.popitem(last=False)
                self._size_bytes -= len(oldest)
        return len(data)


def pull(log: WeightLog, target: int | None = None) -> PulledWeights:
    """The weights of version ``target`` (default: the newest) in memory of their own. Raises as
    :meth:`Receiver.advance`.
    """
    with Receiver(log) as receiver:
        receiver.advance(target)
        return receiver.weights()


def _find(log: WeightLog, at_least: int, current: int | None, target: int | None) -> int:
    """The version to go to. Raises :class:`~etude.errors.UserError` when there is none."""
    version = newest(log, current, at_least) if target is None else target
    if version is None:
        raise UserError(f"no weight version is published in {log.store.url} yet")
    if target is not None and log.read(version) is None:
        raise UserError(f"weight version {version} is not published in {log.store.url}: the newest is {log.latest()}")
    return version


def _is_kept(log: WeightLog, current: WeightVersion) -> bool:
    """True if what is held can be built upon: not of a past that is no longer kept."""
    try:
        return log.read(current.version) is not None
    except DamagedError:
        return True  # the copy was proven when the record could be read


def _record(log: WeightLog, version: int) -> WeightVersion:
    record = log.read(version)
    if record is None:
        raise DamagedError(f"weight version {version} vanished from {log.store.url} while it was read")
    return record


def _require_room(version: int, layout: Layout, most_bytes: int) -> None:
    """Raise :class:`~etude.errors.DamagedError` for a state larger than the reader can mean, before it takes memory."""
    if layout.size_bytes > most_bytes:
        raise DamagedError(
            f"the layout of weight version {version} is of {layout.size_bytes:,} bytes, expected are at most "
            f"{most_bytes:,} (ReceiveOptions.most_bytes)"
        )


def _layout(log: WeightLog, digest: str) -> Layout:
    data = log.layout(digest)
    if data is None:
        raise DamagedError(f"layout {digest[:12]} is missing from {log.store.url}; run `etude weights verify`")
    return Layout.from_bytes(data)
