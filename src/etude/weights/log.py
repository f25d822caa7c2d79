"""The log of weight versions: which exist, who may add one, and what leads from one to another.

A version exists from the moment its commit record does; packs without a record are rubbish that harms nobody. The
record is also the fence: a second writer of the same version loses. This file owns reading and writing what
``records.py`` describes and the objects that records refer to, each checked against its digest. What to fetch is
``plan.py``'s, what to delete ``retention.py``'s, what is inside a pack ``packs.py``'s.

    writer   put_layout, put_pack … ─▶ announce … ─▶ commit            (then, in the background, add_link)
    reader   latest ─▶ lease ─▶ edges ─▶ plan ─▶ layout, pack …
"""

import hashlib
import re
from collections.abc import Iterable
from typing import final

from etude.errors import DamagedError, FencedError, InfrastructureError, UserError
from etude.types import WeightPack, WeightVersion
from etude.weights.plan import Edge, edge_of, reachable
from etude.weights.record_files import RecordShelf, put_content
from etude.weights.records import (
    Announcement,
    Lease,
    Link,
    commit_key,
    layout_key,
    lease_folder,
    link_key,
    pack_key,
    parse_commit_key,
    parse_link_key,
    record_key,
    staged_folder,
)
from etude.weights.store import Objects

_LAYOUTS_KEPT = 1024
"""One for each rank of a large trainer, and some of the launch before."""
_LEASES_HELD = 2
"""A reader's newest lease and the one before, so that no listing finds it between two."""


@final
class LeaseHolder:
    """One reader's word for what it still needs; used by one thread at a time.

    Lease the version you hold before planning with it, and again once you hold another. A reader that holds nothing
    leases the first target of its plan. A lease that is not renewed expires by itself.
    """

    def __init__(self, store: Objects, records: RecordShelf, reader: str) -> None:
        self._store = store
        self._records = records
        self._reader = reader
        self._next = 1 + max(map(_sequence, store.list(lease_folder(reader))), default=-1)
        self._held: list[str] = []

    def renew(self, version: int) -> None:
        """Say that ``version`` is needed, from now on and for the time that the collector grants.

        The lease before the last is removed; storage that fails at that is forgiven until the next renewal.
        """
        lease = Lease(reader=self._reader, version=version, sequence=self._next)
        while self._records.add(lease) != lease:
            # Another process reads under this name; both leases hold.
            lease = Lease(reader=self._reader, version=version, sequence=lease.sequence + 1)
        self._next = lease.sequence + 1
        self._held.append(record_key(lease))
        stale = self._held[:-_LEASES_HELD]
        try:
            self._store.delete(*stale)
        except InfrastructureError:
            return
        del self._held[: len(stale)]

    def release(self) -> None:
        """Take back what was said; calling it twice is harmless."""
        self._store.delete(*self._held)
        self._held.clear()


@final
class WeightLog:
    """The weight versions in one store. Safe to share between threads.

    With a ``key`` records are signed and unsigned ones are damage: whoever can write to the bucket but lacks the key
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
        """What records are signed with; ``None`` when they are not."""
        self.at_least = at_least
        """A version that is known to be there: an older one is not the newest, whatever the storage says."""
        self.records = RecordShelf(store, key, log_id)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with the records that ``edges``, ``links`` and ``announced`` passed over."""
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
        """Add another way to a version and return the one that the log now holds, which may be somebody else's.

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
        """What may help to get from ``have``, or from nothing, to ``target``; :func:`etude.weights.plan.plan` chooses.

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
        found: list[Edge] = []
        for floor in floors:
            commits = [commit_key(version) for version in committed if floor <= version <= target]
            spanned = [link_key(*pair) for pair in ends if _lies_within(pair, floor, highest)]
            told = _edges(self.records, commits, spanned)
            found = [edge for edge in told if (edge.source, edge.target) not in without]
            if target in reachable(found, {None, have}):
                break
        return found

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

    def pack(self, pack: WeightPack) -> bytes:
        """The bytes of a pack. Raises :class:`~etude.errors.DamagedError` if they are gone or not what they were."""
        data = self.store.get(pack_key(pack.digest))
        if data is None:
            raise DamagedError(f"{pack_key(pack.digest)} is not in {self.store.url}; run `etude weights verify`")
        if len(data) != pack.size_bytes:
            raise DamagedError(f"{pack_key(pack.digest)} has {len(data)} bytes, its record says {pack.size_bytes}")
        _check_content(pack_key(pack.digest), data, pack.digest)
        return data

    # --- Ahead of commits, and behind them ---

    def announce(self, announcement: Announcement) -> None:
        """Tell readers of packs that are up. Raises :class:`~etude.errors.FencedError` if that was said differently."""
        if self.records.add(announcement) != announcement:
            raise FencedError(
                f"{record_key(announcement)} in {self.store.url} announces other packs: a second process writes as "
                f"{announcement.writer!r}; give each process its own name"
            )

    def announced(self, version: int) -> list[Announcement]:
        """What has been announced for a version, by writer, rank and sequence; damaged ones are noted in ``faults``."""
        found = self.records.read_sound(Announcement, self.store.list(staged_folder(version)))
        return sorted(found, key=lambda one: (one.writer, one.rank, one.sequence))

    def lease(self, reader: str) -> LeaseHolder:
        """The means to keep what ``reader`` needs from being deleted; each reader has its own name.

        Raises :class:`~etude.errors.UserError` for a name that cannot be part of a key.
        """
        try:
            Lease(reader=reader, version=0, sequence=0)
        except ValueError as error:
            raise UserError(str(error)) from error
        return LeaseHolder(self.store, self.records, reader)


def newest(log: WeightLog, held: int | None, at_least: int) -> int | None:
    """The newest version, for who has ``held``; ``None`` if there is none and none has to be.

    Raises :class:`~etude.errors.DamagedError` when it is older than what is held, or than ``at_least``.
    """
    version, known = log.latest(after=held), max(-1 if held is None else held, at_least or -1)
    if known > (-1 if version is None else version):
        raise DamagedError(
            f"the newest weight version in {log.store.url} is {version}, but version {known} was published: records "
            f"were deleted, or this is an older copy of the log; repair it from a mirror, or name the version to go "
            f"back to"
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


def _edges(records: RecordShelf, commits: Iterable[str], links: Iterable[str]) -> list[Edge]:
    """Edges from the records at these keys. Links that contradict the commit of their target are noted as faults."""
    versions = records.read_sound(WeightVersion, commits)
    digests = {record.version: record.digest for record in versions}
    found = [edge_of(record) for record in versions]
    for link in records.read_sound(Link, links):
        committed = digests.get(link.target, link.digest)
        if link.digest == committed:
            found.append(edge_of(link))
        else:
            name = record_key(link)
            records.note_fault(name, f"record {name} leads to state {link.digest}, its version is {committed}")
    return found


def _lies_within(ends: tuple[int | None, int], lowest: int, highest: int) -> bool:
    source, target = ends
    return lowest <= target <= highest and (source is None or lowest <= source <= highest)


def _sequence(key: str) -> int:
    match = re.search(r"/(\d{8,15})\.json$", key, re.ASCII)
    return int(match[1]) if match else -1
