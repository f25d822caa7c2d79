"""Garbage collection of the weight store: the decision what may be deleted, and deleting it.

Everything from a *floor* on is kept. The floor is a version that can be had from nothing by what is in the store, and
lies neither above what any reader has leased nor within the versions to keep anyway. This file owns that decision
(:func:`deletions_of`, pure) and acting on it (:func:`collect`); it is the only place that deletes.

Who is at work meanwhile is safe. A writer: its uploads are younger than the grace period, and what it uploads again
counts as new. A reader with a lease: the floor is not above it. A reader without: it finds packs missing and plans
again. Ages and leases are told by the storage's clock only.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from etude.errors import UserError
from etude.objects import CLOCK_FOLDER, ObjectEntry
from etude.types import WeightVersion
from etude.weights.log import FULL_REQUEST_FOLDER, WeightLog
from etude.weights.pack_parts import FOLDER as PARTS_FOLDER
from etude.weights.plan import Edge, Place, edge_of, reachable
from etude.weights.records import Link, ReaderLease, commit_key, layout_key, link_key, pack_key, record_key

_DELETE_BATCH = 500
"""Objects removed per request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Versions and links to delete from the log."""

    keep_from: int | None
    """The floor: nothing from it on is dropped; ``None`` for an empty log."""
    drop_versions: tuple[int, ...]
    """Ascending."""
    drop_links: tuple[tuple[int | None, int], ...]
    """Source and target of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectReport:
    """Report of a collection: what it removed, or would have."""

    keep_from: int | None
    """The oldest version that was kept on purpose; ``None`` for an empty log."""
    versions: int
    """Number of versions dropped."""
    objects: int
    """Number of objects removed, records included."""
    size_bytes: int
    """Their size together."""
    dry_run: bool
    """True if nothing was really removed."""


def deletions_of(
    versions: Sequence[WeightVersion],
    links: Sequence[Link],
    leases: Iterable[int],
    keep: int,
    stored: Collection[str],
) -> Decision:
    """Decide which versions and links to delete: as many as possible without cutting off any that is needed.

    ``leases`` are the versions that readers hold, ``keep`` is how many versions before the newest stay anyway, and
    ``stored`` are the digests of the packs that exist: what rests on any other does not count as a way. The floor is
    the newest version, not above any of those, that can be had from nothing without what is below it. Whatever can be
    reached now among the versions kept, from nothing or from a leased version, can be reached afterwards. A lease of a
    version that the log no longer has protects nothing: its holder can only start from nothing.
    """
    numbers = sorted(record.version for record in versions)
    if not numbers:
        return Decision(keep_from=None, drop_versions=(), drop_links=())
    edges = [*map(edge_of, versions), *map(edge_of, links)]
    sound = [edge for edge in edges if all(pack.digest in stored for pack in edge.packs)]
    leased = frozenset(leases) & frozenset(numbers)
    highest = min(*leased, numbers[-1] - keep, numbers[-1])
    before = {start: reachable(sound, (start,)) for start in (None, *leased)}
    anchors = {edge.target for edge in sound if edge.source is None and edge.target <= highest}
    for floor in sorted(anchors, reverse=True):
        if floor in numbers and _keeps_all_ways(sound, before, floor):
            return Decision(
                keep_from=floor,
                drop_versions=tuple(number for number in numbers if number < floor),
                drop_links=tuple((link.source, link.target) for link in links if not _is_above(edge_of(link), floor)),
            )
    return Decision(keep_from=numbers[0], drop_versions=(), drop_links=())


def collect(
    log: WeightLog,
    *,
    keep: int,
    grace_s: float,
    lease_s: float,
    needed: Collection[int] = (),
    dry_run: bool = False,
) -> CollectReport:
    """Delete versions that are not needed and objects that nothing refers to; ``dry_run`` only counts them.

    ``keep`` versions before the newest stay anyway, and all from the oldest of ``needed`` on, which will be read
    again who holds no lease. Unreferenced objects are deleted once they are ``grace_s`` old,
    which must be longer than any upload of a version takes; leases count for ``lease_s``. Records go first: whoever
    dies in between leaves unreferenced objects for the next collection. Damaged links stay, their packs do not.

    Raises :class:`~etude.errors.DamagedError`, and deletes nothing, when a commit record cannot be read (what it refers
    to is unknown), and :class:`~etude.errors.UserError` for negative arguments. What remains possible: a pack that
    has lain unreferenced for longer than the grace period and is uploaded again in the moment between the last listing
    and the deletion that follows at once.
    """
    if min(keep, grace_s, lease_s) < 0:
        raise UserError(f"collect: keep={keep}, grace_s={grace_s} and lease_s={lease_s} must not be negative")
    now_s = log.store.now()
    versions, links = _read_commits(log), log.links()
    stored = {entry.key.removeprefix("packs/") for entry in log.store.entries("packs")}
    decision = deletions_of(versions, links, {*needed, *_leased(log, now_s - lease_s)}, keep, stored)
    dropped = {commit_key(version) for version in decision.drop_versions}
    dropped |= {link_key(*ends) for ends in decision.drop_links}
    records = [entry for folder in ("commits", "links") for entry in log.store.entries(folder) if entry.key in dropped]
    if not dry_run:
        _delete(log, records)

    rubbish = _unreferenced(log, dropped, now_s - grace_s)
    rubbish += [entry for entry in log.store.entries("leases") if entry.modified_s < now_s - max(lease_s, grace_s)]
    if not dry_run:
        rubbish = _untouched(log, rubbish)
        _delete(log, rubbish)
    removed = [*records, *rubbish]
    return CollectReport(
        keep_from=decision.keep_from,
        versions=len(decision.drop_versions),
        objects=len(removed),
        size_bytes=sum(entry.size_bytes for entry in removed),
        dry_run=dry_run,
    )


def _keeps_all_ways(edges: Sequence[Edge], before: dict[Place, frozenset[Place]], floor: int) -> bool:
    """Return true if without all that is below ``floor`` each start still leads to all versions from there on it leads
    to.
    """
    left = [edge for edge in edges if _is_above(edge, floor)]
    for start, places in before.items():
        needed = {place for place in places if place is not None and place >= floor}
        if not needed <= reachable(left, (start,)):
            return False
    return True


def _is_above(edge: Edge, floor: int) -> bool:
    return edge.target >= floor and (edge.source is None or edge.source >= floor)


def _read_commits(log: WeightLog) -> list[WeightVersion]:
    """All versions. Raises :class:`~etude.errors.DamagedError` if one cannot be read."""
    numbers = log.versions()
    log.records.read_sound(WeightVersion, map(commit_key, numbers))  # fetched together; the next line finds them cached
    return [record for record in map(log.read, numbers) if record is not None]


def _leased(log: WeightLog, expired_s: float) -> list[int]:
    """The versions that readers hold. Raises :class:`~etude.errors.DamagedError` if a live lease cannot be read."""
    names = [entry.key for entry in log.store.entries("leases") if entry.modified_s >= expired_s]
    leases = [log.records.read(ReaderLease, name) for name in names]
    return [lease.version for lease in leases if lease is not None]


def _unreferenced(log: WeightLog, dropped: Collection[str], before_s: float) -> list[ObjectEntry]:
    """Objects that were written before ``before_s`` and no record refers to, but those whose keys are ``dropped``.

    First the objects are listed, then the records read again: what a commit made in between refers to is kept.
    Announcements count for nothing: what they tell of is either committed or younger than the grace period.
    """
    folders = ("packs", PARTS_FOLDER, "layouts", "staged", CLOCK_FOLDER, FULL_REQUEST_FOLDER)
    old = [entry for folder in folders for entry in log.store.entries(folder) if entry.modified_s < before_s]
    referenced: set[str] = set()
    records: list[WeightVersion | Link] = [*_read_commits(log), *log.links()]
    for record in records:
        if record_key(record) not in dropped:
            referenced.update(pack_key(pack.digest) for pack in record.packs)
            referenced.add(layout_key(record.layout))
    return [entry for entry in old if entry.key not in referenced]


def _untouched(log: WeightLog, entries: Sequence[ObjectEntry]) -> list[ObjectEntry]:
    """The entries that are still as they were listed: objects that were written again meanwhile are in use."""
    folders = {entry.key.partition("/")[0] for entry in entries}
    now = {entry.key: entry.modified_s for folder in sorted(folders) for entry in log.store.entries(folder)}
    return [entry for entry in entries if now.get(entry.key) == entry.modified_s]


def _delete(log: WeightLog, entries: Sequence[ObjectEntry]) -> None:
    for start in range(0, len(entries), _DELETE_BATCH):
        log.store.delete(*(entry.key for entry in entries[start : start + _DELETE_BATCH]))
