"""The choice of packs to fetch: the fastest way from what a reader has to the version it wants.

Versions are points and everything that turns one into another is an edge: deltas, merged deltas, inverses, and anchors,
which start from nothing. This file owns the choice among them, and which shortcuts are worth writing. It is pure: no
I/O, no clock, and equal input gives equal plans everywhere.

    nothing ──anchor──▶ 64 ──delta──▶ 65 ──delta──▶ 66
                         └───────────merged──────────▶ 68 ──delta──▶ 69
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from etude.errors import DamagedError
from etude.types import WeightPack, WeightVersion
from etude.weights.records import Link

Place: TypeAlias = int | None
"""A weight version, or ``None`` for having nothing yet."""

_Cost: TypeAlias = tuple[int, int, int]
"""Microseconds, bytes to download, edges: integers, so that sums do not depend on their order."""

LADDER_BASE = 4
LADDER_LEVELS = (1, 2, 3)
"""Merged links span 4, 16 and 64 versions: a reader needs at most 3 of each, and the writer merges each frame 3 times.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One update path to ``target``, and all that a receiver needs to take it."""

    source: Place
    """The version to start from; ``None`` when the packs hold everything."""
    source_digest: str | None
    """Digest of the whole state at ``source``; ``None`` where that is."""
    target: int
    kind: Literal["delta", "merged", "anchor", "inverse"]
    digest: str
    """Digest of the whole state at ``target``, 32 hex digits."""
    layout: str
    """SHA-256 of the layout."""
    packs: tuple[WeightPack, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the packs together."""
        return sum(pack.size_bytes for pack in self.packs)


def edge_of(record: WeightVersion | Link) -> Edge:
    """The edge of a log record."""
    return Edge(
        source=record.source if isinstance(record, Link) else record.base,
        source_digest=record.source_digest if isinstance(record, Link) else record.base_digest,
        target=record.target if isinstance(record, Link) else record.version,
        kind=record.kind if isinstance(record, Link) else ("anchor" if record.base is None else "delta"),
        digest=record.digest,
        layout=record.layout,
        packs=record.packs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Download and decoding speed of a reader. Both rates are of packs, hence of compressed bytes."""

    bytes_per_s: float = 1.25e9
    """Download; the default is a 10 Gb/s network."""
    apply_bytes_per_s: float = 4e9
    """Decoding and applying, all cores together."""
    seconds_per_edge: float = 0.3
    """Round trips, digests and whatever else does not grow with size."""

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.apply_bytes_per_s <= 0 or self.seconds_per_edge < 0:
            raise ValueError(f"{self} cannot be: rates are positive and times not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The edges to take, in order; none when the reader is there already."""

    edges: tuple[Edge, ...]
    size_bytes: int
    """Bytes to download."""
    seconds: float
    """The estimate that made it the best."""


def plan(edges: Iterable[Edge], target: int, have: int | None, speed: LinkSpeed) -> Plan:
    """The fastest way to ``target`` from ``have`` or from nothing, whichever is faster.

    An edge takes ``seconds_per_edge`` and the longer of its download and its application, which overlap. Of equally
    fast ways the one with fewer bytes wins, then the one with fewer edges. Raises :class:`~etude.errors.DamagedError`,
    naming what is missing, when no way leads to ``target``.

    Example: deltas 0→1→2→3→4, merged 0→4 and ``have=0`` give the one merged edge.
    """
    if have == target:
        return Plan(edges=(), size_bytes=0, seconds=0.0)
    ways = list(edges)
    leaving: dict[Place, list[Edge]] = defaultdict(list)
    for edge in ways:
        leaving[edge.source].append(edge)
    starts: set[Place] = {None, have}
    arrivals: dict[int, tuple[_Cost, Edge]] = {}
    queue: list[tuple[_Cost, int]] = []

    def leave(place: Place, cost: _Cost) -> None:
        for edge in leaving[place]:
            total = _add(cost, _edge_cost(edge, speed))
            if edge.target not in starts and (edge.target not in arrivals or total < arrivals[edge.target][0]):
                arrivals[edge.target] = total, edge
                heapq.heappush(queue, (total, edge.target))

    for start in starts:
        leave(start, (0, 0, 0))
    while queue:
        cost, version = heapq.heappop(queue)
        if version == target:
            microseconds, size_bytes, _ = cost
            return Plan(edges=_way(arrivals, target), size_bytes=size_bytes, seconds=microseconds / 1e6)
        if cost == arrivals[version][0]:
            leave(version, cost)
    raise DamagedError(_missing(ways, target, have))


def reachable(edges: Iterable[Edge], starts: Iterable[Place]) -> frozenset[Place]:
    """All versions that edges lead to from ``starts``, these included."""
    leaving: dict[Place, list[int]] = defaultdict(list)
    for edge in edges:
        leaving[edge.source].append(edge.target)
    seen = set(starts)
    open_places = list(seen)
    while open_places:
        for target in leaving[open_places.pop()]:
            if target not in seen:
                seen.add(target)
                open_places.append(target)
    return frozenset(seen)


def ladder(version: int, base: int = LADDER_BASE, levels: Collection[int] = LADDER_LEVELS) -> list[tuple[int, int]]:
    """The merged links to write once ``version`` is committed, short ones first: each ``base**level`` versions long.

    With all of them written, a reader takes at most ``base − 1`` links of each length on its way up, and as many on its
    way down from the longest.

    Example: 4 → (0, 4); 16 → (12, 16), (0, 16); 20 → (16, 20); 5 → none.
    """
    if base < 2 or any(level < 1 for level in levels):
        raise ValueError(f"a ladder of base {base} and levels {levels!r} merges nothing: base from 2, levels from 1")
    spans = sorted(base**level for level in levels)
    return [(version - span, version) for span in spans if version >= span and version % span == 0]


def needs_anchor(version: int, every: int) -> bool:
    """True if ``version`` should have an anchor: multiples of ``every``, except 0, which is whole itself."""
    if every < 1:
        raise ValueError(f"anchors every {every} versions: expected at least 1")
    return version > 0 and version % every == 0


def _edge_cost(edge: Edge, speed: LinkSpeed) -> _Cost:
    transfer_s = edge.size_bytes / min(speed.bytes_per_s, speed.apply_bytes_per_s)
    return round((speed.seconds_per_edge + transfer_s) * 1e6), edge.size_bytes, 1


def _add(one: _Cost, two: _Cost) -> _Cost:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2]


def _way(arrivals: Mapping[int, tuple[_Cost, Edge]], target: int) -> tuple[Edge, ...]:
    way: list[Edge] = []
    place: Place = target
    while place is not None and place in arrivals:
        _, edge = arrivals[place]
        way.append(edge)
        place = edge.source
    return tuple(reversed(way))


def _missing(edges: list[Edge], target: int, have: int | None) -> str:
    """Message why ``target`` cannot be reached: what would have to be there."""
    arriving: dict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        arriving[edge.target].append(edge)
    needed, open_versions = {target}, [target]
    while open_versions:
        for edge in arriving[open_versions.pop()]:
            if edge.source is not None and edge.source not in needed:
                needed.add(edge.source)
                open_versions.append(edge.source)
    dead_ends = sorted(version for version in needed if version not in arriving or not arriving[version])
    start = "nothing" if have is None else f"nothing or from version {have}"
    if dead_ends == [target]:
        reason = "no record leads to it"
    else:
        reason = f"it rests on {_listed(dead_ends or sorted(needed))}, to which no record leads"
    return f"weight version {target} cannot be reached from {start}: {reason}; run `etude weights verify`"


def _listed(versions: list[int]) -> str:
    shown = ", ".join(map(str, versions[:5]))
    return f"version {shown}" if len(versions) <= 5 else f"version {shown} and {len(versions) - 5} more"
