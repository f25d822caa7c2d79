"""The log of weight versions: which exist, who may add one, and what leads from one to another.

A version exists from the moment its commit record does; packs without a record are rubbish that harms nothing. The
record is also the fence: a second writer of the same version loses. This file owns reading and writing what
``records.py`` describes and the objects that records refer to, each checked against its digest. Three habits hold for
all of it: an object that is there with our bytes is ours, a record that has been read is not read again, and a record
of another log is damage. What to fetch is ``plan.py``'s, what to delete ``retention.py``'s, what is inside a pack
``packs.py``'s.

    writer   put_layout, put_pack … ─▶ announce … ─▶ commit            (then, in the background, add_link)
    reader   latest ─▶ lease ─▶ edges ─▶ plan ─▶ layout, pack …        (no sound way: request_full)

A reader that no sound way leads on asks for a full snapshot: else it would wait for the next anchor. The request is an
empty object that names the version to be published whole. That version is two ahead, so that it is seen before the
publisher starts on it. Requests are not signed: all that they can bring about is a large version.
"""

import hashlib
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from threading import Lock
from typing import cast, final

from etude import clock
from etude.errors import DamagedError, FencedError, InfrastructureError, UserError
from etude.objects import Objects, check_put_if_absent
from etude.types import WeightPack, WeightVersion
from etude.weights.packs import FilledPack
from etude.weights.plan import Edge, edge_of, reachable
from etude.weights.records import (
    LOG_KEY,
    Announcement,
    Link,
    LogStart,
    ReaderLease,
    Record,
    RecordT,
    commit_key,
    layout_key,
    lease_folder,
    link_key,
    pack_key,
    parse_commit_key,
    parse_link_key,
    parse_record,
    record_bytes,
    record_key,
    require_log_id,
    staged_folder,
)

_LAYOUTS_KEPT = 16
"""Layouts in the cache: of this launch of the trainer and some before."""
_LEASES_HELD = 2
"""A reader's newest lease and the one before, so that no listing finds it between two."""
FULL_REQUEST_FOLDER = "full-requests"
"""Folder in which readers request full snapshots; what is old there may be deleted."""
FULL_REQUEST_AHEAD = 2
"""Distance from the newest version to the one that is to be whole."""
_CREATE_TRIES = 3
"""Tries to send an object whose answers get lost; the store has its own retries below that."""
_CACHE_BYTES = 64 << 20
"""Bytes of records, as stored, that stay parsed."""
_READERS = 16
"""Records that are fetched at a time."""


@final
class WeightLog:
    """The weight versions in one store. Safe to share between threads.

    With a ``key`` records are signed and unsigned ones are damage: a writer to the bucket that lacks the key
    cannot make a reader load anything that this log did not publish. What it published can still be hidden, so a reader
    that knows says which log it means (``log_id``) and which version there is ``at_least``. Every method raises
    :class:`~etude.errors.InfrastructureError` when the storage does not do its part.
    """

    def __init__(
        self, store: Objects, *, key: bytes | None = None, log_id: str | None = None, at_least: int = 0
    ) -> None:
        if key is not None and len(key) < 16:
            raise UserError(f"the key that signs weight records has {len(key)} bytes; give it at least 16")
        self.store = store
        self._layouts: dict[str, bytes] = {}
        self.key = key
        """Key that signs records; ``None`` when they are not signed."""
        self.at_least = at_least
        """A version that is known to be there: an older one is not the newest, whatever the storage says."""
        self.records = RecordFiles(store, key, log_id)

    @property
    def faults(self) -> tuple[str, ...]:
        """Faults of the records that ``edges``, ``links`` and ``announced`` passed over."""
        return self.records.faults

    # --- Versions ---

    def commit(self, record: WeightVersion) -> WeightVersion:
        """Make a version visible to everyone and return the record that the log now holds.

        Its packs must be there already. Committing the same weights again (a writer that restarted) returns the first
        record. Raises :class:`~etude.errors.FencedError` when the version exists with other weights: another writer is
        at work, or this one went back in time without going back in the log.
        """
        existing = self.records.add(record)
        if existing.digest != record.digest:
            raise FencedError(
                f"weight version {record.version} is already committed in {self.store.url} with other weights (state "
                f"{existing.digest[:12]}, ours {record.digest[:12]}): another writer holds this log; stop this one"
            )
        return existing

    def read(self, version: int) -> WeightVersion | None:
        """The record of a version, ``None`` if it was never committed.

        Raises :class:`~etude.errors.DamagedError` when the record is there but is not one.
        """
        return self.records.read(WeightVersion, commit_key(version))

    def versions(self) -> list[int]:
        """All committed versions, ascending."""
        return sorted(version for version in map(parse_commit_key, self.store.list("commits")) if version is not None)

    def latest(self, after: int | None = None) -> int | None:
        """The newest committed version, ``None`` if there is none.

        With ``after`` it looks at the records that should follow and lists all only when the first of them is not
        there: there may be nothing new, or a version that was never committed. Behind such a gap it may give a version
        that is newer than ``after`` but not the newest; asked again with that, it gets there.
        """
        if after is None:
            return max(self.versions(), default=None)
        step = 1
        while _is_committed(self.store, after + step):
            step *= 2
        if step == 1:
            return self.latest()
        low, high = after + step // 2, after + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _is_committed(self.store, middle) else (low, middle)
        return low

    # --- Ways between versions ---

    def add_link(self, link: Link) -> Link:
        """Add another way to a version and return the one that the log now holds, which may be another process's.

        Raises :class:`~etude.errors.FencedError` when the existing one leads to other weights.
        """
        existing = self.records.add(link)
        if existing.digest != link.digest:
            raise FencedError(
                f"{record_key(link)} in {self.store.url} leads to state {existing.digest[:12]}, ours to "
                f"{link.digest[:12]}: two writers disagree about version {link.target}; run `etude weights verify`"
            )
        return existing

    def links(self) -> list[Link]:
        """All links that can be read, by ascending key; damaged ones are noted in ``faults``."""
        return self.records.read_sound(Link, [link_key(*ends) for ends in _link_ends(self.store)])

    def edges(
        self, have: int | None, target: int, without: frozenset[tuple[int | None, int]] = frozenset()
    ) -> list[Edge]:
        """The edges that may help to get from ``have``, or from nothing, to ``target``; :func:`etude.weights.plan.plan`
        chooses.

        ``without`` names the ends of edges that turned out broken: they are left out, and older ways are looked for.
        Records below the newest usable anchor and below ``have`` are not read. Damaged ones are noted in ``faults``;
        what they said is not needed as long as other ways are open.
        """
        if have is not None and target == have + 1 and not without:
            following = self.records.read_sound(WeightVersion, [commit_key(target)])
            if following and following[0].base == have:
                return [edge_of(following[0])]  # what a reader that keeps up needs, without listing anything
        ends = _link_ends(self.store)
        committed = self.versions()
        anchors = sorted((end for start, end in ends if start is None and end <= target), reverse=True)
        floors, highest = [*anchors, 0], target
        if have is not None and (have in committed or any(start == have for start, _ in ends)):
            floors[0], highest = min(have, floors[0]), max(have, target)
        usable: list[Edge] = []
        for floor in floors:
            commits = [commit_key(version) for version in committed if floor <= version <= target]
            spanned = [link_key(*pair) for pair in ends if _lies_within(pair, floor, highest)]
            edges = _edges(self.records, commits, spanned)
            usable = [edge for edge in edges if (edge.source, edge.target) not in without]
            if target in reachable(usable, {None, have}):
                break
        return usable

    # --- Payloads ---

    def put_layout(self, data: bytes, *, again: bool = False) -> str:
        """Store a layout, unless this object has done so before and need not do it ``again``; return its SHA-256."""
        digest = hashlib.sha256(data).hexdigest()
        if again or digest not in self._layouts:
            put_content(self.store, layout_key(digest), data)
            _remember(self._layouts, digest, data)
        return digest

    def layout(self, digest: str) -> bytes | None:
        """The layout with this SHA-256, ``None`` if it is not there, :class:`~etude.errors.DamagedError` if broken."""
        data = self._layouts.get(digest)
        if data is None:
            data = self.store.get(layout_key(digest))
            if data is not None:
                _check_content(layout_key(digest), data, digest)
                _remember(self._layouts, digest, data)
        return data

    def put_pack(self, data: bytes) -> str:
        """Store a pack and return its SHA-256.

        A pack that is there already counts as written now, so that no collector takes it for an old unused one.
        """
        digest = hashlib.sha256(data).hexdigest()
        put_content(self.store, pack_key(digest), data)
        return digest

    def put_filled(self, filled: FilledPack) -> WeightPack:
        """Store a filled pack and return its description for a record."""
        digest = self.put_pack(filled.data)
        return WeightPack(digest=digest, size_bytes=len(filled.data), first=filled.first, last=filled.last)

    def pack(self, pack: WeightPack) -> bytes:
        """The bytes of a pack. Raises :class:`~etude.errors.DamagedError` if they are gone or not what they were."""
        data = self.store.get(pack_key(pack.digest))
        if data is None:
            raise DamagedError(f"{pack_key(pack.digest)} is not in {self.store.url}; run `etude weights verify`")
        if len(data) != pack.size_bytes:
            raise DamagedError(f"{pack_key(pack.digest)} has {len(data)} bytes, its record says {pack.size_bytes}")
        _check_content(pack_key(pack.digest), data, pack.digest)
        return data

    def pack_from(self, pack: WeightPack, first: int, part_bytes: int) -> Iterator[bytes]:
        """The bytes of a pack from ``first`` on, as they arrive, in parts of about ``part_bytes``; not verified.

        Raises :class:`~etude.errors.DamagedError` if they are gone.
        """
        if first >= pack.size_bytes:
            return
        parts = self.store.stream(pack_key(pack.digest), first, part_bytes)
        if parts is None:
            raise DamagedError(f"{pack_key(pack.digest)} is not in {self.store.url}; run `etude weights verify`")
        yield from parts

    # --- Ahead of commits, and behind them ---

    def announce(self, announcement: Announcement) -> None:
        """Tell readers of packs that are up. Raises :class:`~etude.errors.FencedError` if that was said differently."""
        if self.records.add(announcement) != announcement:
            raise FencedError(
                f"{record_key(announcement)} in {self.store.url} announces other packs: a second process writes as "
                f"{announcement.writer!r}; give each process its own name"
            )

    def announced(self, version: int) -> list[Announcement]:
        """The announcements for a version, by writer and sequence; damaged ones are noted in ``faults``."""
        usable = self.records.read_sound(Announcement, self.store.list(staged_folder(version)))
        return sorted(usable, key=lambda one: (one.writer, one.sequence))

    def lease(self, reader: str) -> "LeaseHolder":
        """The leases that keep what ``reader`` needs from being deleted; each reader has its own name.

        Raises :class:`~etude.errors.UserError` for a name that cannot be part of a key.
        """
        try:
            ReaderLease(reader=reader, version=0, sequence=0)
        except ValueError as error:
            raise UserError(str(error)) from error
        return LeaseHolder(self.store, self.records, reader)

    # --- Full snapshots on request ---

    def request_full(self) -> None:
        """Ask for a full snapshot soon. A reader that may not write, or cannot, waits for the next anchor."""
        with suppress(InfrastructureError):
            version = self.latest()
            if version is not None:
                self.store.put_if_absent(_full_request_key(version + FULL_REQUEST_AHEAD), b"")

    def is_full_requested(self, before: WeightVersion, version: int) -> bool:
        """Return true if ``version`` shall be whole; ``before`` is the one of which it would else be a change.

        A request for ``version`` speaks of older ones than ``before``, hence counts for nothing when that is whole; one
        for the next version is answered at once.
        """
        if self.store.exists(_full_request_key(version + 1)):
            return True
        return before.base is not None and self.store.exists(_full_request_key(version))


@final
class RecordFiles:
    """The records of one store: signed, checked, and parsed once. Safe to share between threads.

    Records never change, so what has been read is not read again, also if it has been deleted since: ask a listing
    what exists.

    All are of one log: of ``log_id`` where that is given, else, with a ``key``, of the log that is there at the first
    look. Without either the storage is trusted, since a writer to it could write any id.
    """

    def __init__(self, store: Objects, key: bytes | None, log_id: str | None = None) -> None:
        if log_id is not None:
            try:
                require_log_id(log_id)
            except ValueError as error:
                raise UserError(str(error)) from error
        self._store = store
        self._key = key
        self._expected = log_id
        self._written: str | None = None
        self._lock = Lock()
        self._cache: OrderedDict[str, tuple[Record, int]] = OrderedDict()
        self._cached_bytes = 0
        self._faults: dict[str, str] = {}

    @property
    def faults(self) -> tuple[str, ...]:
        """Faults of the records that were passed over, by ascending name."""
        with self._lock:
            return tuple(message for _, message in sorted(self._faults.items()))

    def add(self, record: RecordT) -> RecordT:
        """Write a record unless there is one at its place, and return the one that is there now."""
        name = record_key(record)
        if create(self._store, name, record_bytes(record, self._started(), self._key)):
            return record
        existing = self.read(type(record), name)
        if existing is None:
            raise DamagedError(f"{name} vanished from {self._store.url}: something deletes from the log")
        return existing

    def read(self, kind: type[RecordT], name: str) -> RecordT | None:
        """The record at an object key, ``None`` if there is none. Raises :class:`~etude.errors.DamagedError`."""
        with self._lock:
            if name in self._cache:
                self._cache.move_to_end(name)
                return cast(RecordT, self._cache[name][0])
        return self.read_again(kind, name)

    def read_again(self, kind: type[RecordT], name: str) -> RecordT | None:
        """Read as :meth:`read`, but from the store, whatever has been read before."""
        data = self._store.get(name)
        if data is None:
            return None
        record = self.parse(data, kind, name)
        self._remember(name, record, len(data))
        return record

    def parse(self, data: bytes, kind: type[RecordT], name: str) -> RecordT:
        """The record in the bytes of an object. Raises :class:`~etude.errors.DamagedError`, also for another log's."""
        record, log_id = parse_record(data, kind, name, self._key)
        if self._expected is None and self._key is not None:
            self._expected = self.log_id() or log_id
        if self._expected not in (None, log_id):
            raise DamagedError(f"record {name} is of log {log_id}, this is log {self._expected}")
        return record

    def log_id(self) -> str | None:
        """The id that the log in this store bears, of its first record or else of its newest; ``None`` for no log."""
        if (log_id := self._id_in(LOG_KEY, LogStart)) is not None:
            return log_id
        commits = [name for name in self._store.list("commits") if parse_commit_key(name) is not None]
        ids = (self._id_in(name, WeightVersion) for name in reversed(commits))
        return next(filter(None, ids), None)

    def _id_in(self, name: str, kind: type[Record]) -> str | None:
        data = self._store.get(name)
        try:
            return None if data is None else parse_record(data, kind, name, self._key)[1]
        except DamagedError:
            return None

    def _started(self) -> str:
        """The id of the log, which begins now if there is none.

        Raises :class:`~etude.errors.FencedError` where another log is than the one that is expected,
        :class:`~etude.errors.UserError` where a log cannot begin.
        """
        if self._written is None:
            log_id = self.log_id()
            if log_id is None:
                with suppress(InfrastructureError):  # the write that follows says it again, if it lasts
                    check_put_if_absent(self._store)
                log_id = self._expected or secrets.token_hex(16)
                if not create(self._store, LOG_KEY, self._first_record(log_id)):
                    log_id = self.log_id() or self.begin_again(log_id)
            if self._expected not in (None, log_id):
                raise FencedError(
                    f"{self._store.url} holds the log {log_id}, what should be written is of log {self._expected}: "
                    f"give each run a store of its own"
                )
            self._written = log_id
        return self._written

    def begin_again(self, log_id: str) -> str:
        """Write the first record over one that cannot be read; returns the id."""
        self._store.renew(LOG_KEY, self._first_record(log_id))
        return log_id

    def _first_record(self, log_id: str) -> bytes:
        return record_bytes(LogStart(created=clock.date_utc()), log_id, self._key)

    def read_sound(self, kind: type[RecordT], names: Iterable[str]) -> list[RecordT]:
        """The records at many keys, fetched together; absent ones are left out, damaged ones noted in ``faults``."""

        def read(name: str) -> RecordT | None:
            try:
                return self.read(kind, name)
            except DamagedError as error:
                self.note_fault(name, str(error))
                return None

        requested = list(names)
        with self._lock:
            unread = [name for name in requested if name not in self._cache]
        if len(unread) <= 1:
            usable = list(map(read, requested))
        else:
            with ThreadPoolExecutor(min(_READERS, len(unread))) as pool:
                usable = list(pool.map(read, requested))
        return [record for record in usable if record is not None]

    def note_fault(self, name: str, message: str) -> None:
        """Remember why the record ``name`` was passed over."""
        with self._lock:
            self._faults[name] = message

    def _remember(self, name: str, record: Record, size_bytes: int) -> None:
        with self._lock:
            self._faults.pop(name, None)
            if name not in self._cache:
                self._cache[name] = record, size_bytes
                self._cached_bytes += size_bytes
            while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
                _, (_, freed_bytes) = self._cache.popitem(last=False)
                self._cached_bytes -= freed_bytes


@final
class LeaseHolder:
    """One reader's leases on the versions that it still needs; used by one thread at a time.

    Lease the version you hold before planning with it, and again once you hold another. A reader that holds nothing
    leases the first target of its plan. A lease that is not renewed expires by itself.
    """

    def __init__(self, store: Objects, records: RecordFiles, reader: str) -> None:
        self._store = store
        self._records = records
        self._reader = reader
        self._next = 1 + max(map(_sequence, store.list(lease_folder(reader))), default=-1)
        self._lease_keys: list[str] = []

    def renew(self, version: int) -> None:
        """Say that ``version`` is needed, from now on and for the time that the collector grants.

        The lease before the last is removed; storage that fails at that is forgiven until the next renewal.
        """
        lease = ReaderLease(reader=self._reader, version=version, sequence=self._next)
        while self._records.add(lease) != lease:
            # Another process reads under this name; both leases hold.
            lease = ReaderLease(reader=self._reader, version=version, sequence=lease.sequence + 1)
        self._next = lease.sequence + 1
        self._lease_keys.append(record_key(lease))
        stale = self._lease_keys[:-_LEASES_HELD]
        try:
            self._store.delete(*stale)
        except InfrastructureError:
            return
        del self._lease_keys[: len(stale)]

    def release(self) -> None:
        """Take back what was said; calling it twice is harmless."""
        self._store.delete(*self._lease_keys)
        self._lease_keys.clear()


def newest(log: WeightLog, current: int | None, at_least: int) -> int | None:
    """The newest version, for a reader that has ``current``; ``None`` if there is none and none has to be.

    Raises :class:`~etude.errors.DamagedError` when it is older than ``current``, or than ``at_least``.
    """
    version, newest_known = log.latest(after=current), max(-1 if current is None else current, at_least or -1)
    if newest_known > (-1 if version is None else version):
        raise DamagedError(
            f"the newest weight version in {log.store.url} is {version}, but version {newest_known} was published: "
            f"records were deleted, or this is an older copy of the log; repair it from a mirror, or name the "
            f"version to go back to"
        )
    return version


def _remember(layouts: dict[str, bytes], digest: str, data: bytes) -> None:
    """Keep a layout: every version names it, and it hardly ever changes."""
    layouts[digest] = data
    while len(layouts) > _LAYOUTS_KEPT:
        del layouts[next(iter(layouts))]


def _check_content(name: str, data: bytes, digest: str) -> None:
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise DamagedError(f"{name} is damaged: its SHA-256 is {actual}; run `etude weights verify`")


def _is_committed(store: Objects, version: int) -> bool:
    return store.exists(commit_key(version))


def _link_ends(store: Objects) -> list[tuple[int | None, int]]:
    """Between which versions there are links, by ascending key; only names are looked at."""
    return [ends for ends in map(parse_link_key, store.list("links")) if ends is not None]


def _edges(records: RecordFiles, commits: Iterable[str], links: Iterable[str]) -> list[Edge]:
    """Edges from the records at these keys. Links that contradict the commit of their target are noted as faults."""
    versions = records.read_sound(WeightVersion, commits)
    digests = {record.version: record.digest for record in versions}
    usable = [edge_of(record) for record in versions]
    for link in records.read_sound(Link, links):
        committed = digests.get(link.target, link.digest)
        if link.digest == committed:
            usable.append(edge_of(link))
        else:
            name = record_key(link)
            records.note_fault(name, f"record {name} leads to state {link.digest}, its version is {committed}")
    return usable


def _lies_within(ends: tuple[int | None, int], lowest: int, highest: int) -> bool:
    source, target = ends
    return lowest <= target <= highest and (source is None or lowest <= source <= highest)


def _sequence(key: str) -> int:
    match = re.search(r"/(\d{8,15})\.json$", key, re.ASCII)
    return int(match[1]) if match else -1


def _full_request_key(version: int) -> str:
    return f"{FULL_REQUEST_FOLDER}/{version:08d}"


def create(store: Objects, key: str, data: bytes) -> bool:
    """Create an object; false, and nothing is changed, when ``key`` is there with other bytes.

    An object with the same bytes counts as ours: it is what an earlier call made whose answer got lost.
    """
    return _place(store, key, data) is not _Creation.OTHER


def put_content(store: Objects, key: str, data: bytes) -> None:
    """Store an object that is named by its content; one that is there already counts as written now.

    What lies there and is not what its name says is damage, and is replaced: it could not have been used.
    """
    if _place(store, key, data) is not _Creation.NEW:
        store.renew(key, data)


class _Creation(Enum):
    """Outcome of creating an object."""

    NEW = "new"
    SAME = "it was there"
    OTHER = "something else was there"


def _place(store: Objects, key: str, data: bytes) -> _Creation:
    """Create an object whatever answers get lost, and say what is there now."""
    for last_try in (*[False] * (_CREATE_TRIES - 1), True):
        try:
            if store.put_if_absent(key, data):
                return _Creation.NEW
            existing = store.get(key)
        except InfrastructureError:
            if last_try:
                raise
            continue
        if existing is not None:
            return _Creation.SAME if existing == data else _Creation.OTHER
    raise DamagedError(f"{key} comes and goes in {store.url}: something deletes from the log")
