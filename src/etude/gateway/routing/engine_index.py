"""Index of engines by routing properties and load, so that a choice does not scan all engines. Pure.

    (healthy, region, version, digest) ──▶ load ──▶ names of engines          a few kinds, a few dozen loads

A pool of thousands has only a handful of kinds: its regions times the weight versions in use. A tier is one or several
kinds, minus the engines to avoid, up to a load; it is never materialised, but counts, finds and lists its engines.
:mod:`etude.gateway.routing.router` decides which kinds suit a call.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast, final


class EngineKind(NamedTuple):
    """Properties that several engines share and that routing depends on."""

    is_healthy: bool
    """False for a suspect engine."""
    region: str
    version: int | None
    """Weight version in the last report; ``None`` before the first."""
    digest: str | None
    """Digest of those weights."""


@dataclass(slots=True)
class _IndexedEngine:
    kind: EngineKind
    group: "_EnginesByLoad"
    """The engines of its kind."""
    load: int
    """Its calls in progress, as far as the router knows."""
    waiting: int
    """Its calls that wait in its own queue."""


@dataclass(slots=True, eq=False)
class _EnginesByLoad:
    """The engines of one kind, by load."""

    names: dict[int, dict[str, None]] = field(default_factory=dict)
    loads: list[int] = field(default_factory=list)
    """The keys of ``names``, ascending."""

    def add(self, name: str, load: int) -> None:
        names = self.names.get(load)
        if names is None:
            names = self.names[load] = {}
            insort(self.loads, load)
        names[name] = None

    def __iter__(self) -> Iterator[str]:
        return (name for load in self.loads for name in self.names[load])

    def remove(self, name: str, load: int) -> None:
        names = self.names[load]
        del names[name]
        if not names:
            del self.names[load]
            del self.loads[bisect_left(self.loads, load)]


@final
class EngineIndex:
    """The engines that may get calls."""

    def __init__(self) -> None:
        self._entries: dict[str, _IndexedEngine] = {}
        self._kinds: dict[EngineKind, _EnginesByLoad] = {}
        self.waiting = 0
        """Calls in the queues of all engines."""

    @property
    def kinds(self) -> Collection[EngineKind]:
        """The kinds with at least one engine."""
        return self._kinds.keys()

    def put(self, name: str, kind: EngineKind, load: int, waiting: int) -> None:
        """Add an engine that has ``load`` calls, ``waiting`` of them in its queue, or update an existing one."""
        self.discard(name)
        group = self._kinds.setdefault(kind, _EnginesByLoad())
        self._entries[name] = _IndexedEngine(kind, group, load, waiting)
        group.add(name, load)
        self.waiting += waiting

    def add_load(self, name: str, calls: int) -> None:
        """Change an engine's load by a number of calls, if the engine is present."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.group.remove(name, entry.load)
            entry.load += calls
            entry.group.add(name, entry.load)

    def discard(self, name: str) -> None:
        """Remove an engine, if it is present."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        entry.group.remove(name, entry.load)
        if not entry.group.names:
            del self._kinds[entry.kind]
        self.waiting -= entry.waiting

    def tier(self, kinds: Sequence[EngineKind], avoid: Collection[str]) -> "Tier":
        """The engines of some kinds, without ``avoid``."""
        return Tier(self._entries, [self._kinds[kind] for kind in kinds], avoid, math.inf)


@final
class Tier(Collection[str]):
    """Engines that suit a call equally well apart from their load; valid until the index changes."""

    __slots__ = ("_avoid", "_entries", "_groups", "_most")

    def __init__(
        self,
        entries: Mapping[str, _IndexedEngine],
        groups: Sequence[_EnginesByLoad],
        avoid: Collection[str],
        most: float,
    ) -> None:
        """Made by an index; ``most`` is the highest load of an engine."""
        self._entries = entries
        self._groups = groups
        self._avoid = avoid
        self._most = most

    def __contains__(self, name: object) -> bool:
        """True if an engine is in the tier."""
        return self._is_within(name) and name not in self._avoid

    def __iter__(self) -> Iterator[str]:
        """The names of the engines, kind by kind, the least busy first."""
        return (name for names in self._by_load() for name in names if name not in self._avoid)

    def __len__(self) -> int:
        """The number of engines."""
        return sum(map(len, self._by_load())) - sum(map(self._is_within, self._avoid))

    def least_load(self) -> int | None:
        """The load of the least busy one; ``None`` if there is none."""
        firsts = (next((name for name in group if name not in self._avoid), None) for group in self._groups)
        return min((self._entries[name].load for name in firsts if name is not None), default=None)

    def within(self, load: float) -> "Tier":
        """The engines of the tier with at most ``load`` calls."""
        return Tier(self._entries, self._groups, self._avoid, load)

    def _is_within(self, name: object) -> bool:
        """True if an engine is in the tier or among the engines to avoid."""
        entry = self._entries.get(cast(str, name))
        return entry is not None and entry.load <= self._most and entry.group in self._groups

    def _by_load(self) -> Iterator[Collection[str]]:
        for group in self._groups:
            for load in group.loads:
                if load > self._most:
                    break
                yield group.names[load]
