"""Engines by what a choice tells apart, and by load: so that no choice walks all of them. Pure.

    (healthy, region, version, digest) ──▶ load ──▶ names of engines          a few kinds, a few dozen loads

A pool of thousands has a handful of kinds: its regions, times the weight versions that are in use. A tier is one or
some of these kinds, without engines that are to be avoided, up to a load; it is never written out, but counts, finds
and lists its engines. Which kinds are good for a call is :mod:`etude.gateway.routing.router`'s.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast, final


class EngineKind(NamedTuple):
    """Properties that some engines share, and that a choice looks at."""

    is_healthy: bool
    """Otherwise they are suspect."""
    region: str
    version: int | None
    """Weight version of the last report; ``None`` before the first."""
    digest: str | None
    """Digest of those weights."""


@dataclass(slots=True)
class _IndexedEngine:
    kind: EngineKind
    group: "_EnginesByLoad"
    """The engines of its kind."""
    load: int
    """Calls that it has, as far as is known."""
    waiting: int
    """Calls of these that are in its own queue."""


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
        """Calls in the queues of all."""

    @property
    def kinds(self) -> Collection[EngineKind]:
        """The kinds of which there is an engine."""
        return self._kinds.keys()

    def put(self, name: str, kind: EngineKind, load: int, waiting: int) -> None:
        """Add an engine that has ``load`` calls, of which ``waiting`` are in its queue; or move it to where it belongs
        now.
        """
        self.discard(name)
        group = self._kinds.setdefault(kind, _EnginesByLoad())
        self._entries[name] = _IndexedEngine(kind, group, load, waiting)
        group.add(name, load)
        self.waiting += waiting

    def add_load(self, name: str, calls: int) -> None:
        """Add a number of calls, maybe negative, to an engine's load, if the engine is there."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.group.remove(name, entry.load)
            entry.load += calls
            entry.group.add(name, entry.load)

    def discard(self, name: str) -> None:
        """Take an engine out, if it is there."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        entry.group.remove(name, entry.load)
        if not entry.group.names:
            del self._kinds[entry.kind]
        self.waiting -= entry.waiting

    def tier(self, kinds: Sequence[EngineKind], avoid: Collection[str]) -> "Tier":
        """The engines of some kinds but for ``avoid``."""
        return Tier(self._entries, [self._kinds[kind] for kind in kinds], avoid, math.inf)


@final
class Tier(Collection[str]):
    """Engines that are equally good for a call but for their load; it holds until the index changes."""

    __slots__ = ("_avoid", "_entries", "_groups", "_most")

    def __init__(
        self,
        entries: Mapping[str, _IndexedEngine],
        groups: Sequence[_EnginesByLoad],
        avoid: Collection[str],
        most: float,
    ) -> None:
        """``most`` is the highest load of an engine; made by an index."""
        self._entries = entries
        self._groups = groups
        self._avoid = avoid
        self._most = most

    def __contains__(self, name: object) -> bool:
        """Say whether an engine is one of them."""
        return self._is_within(name) and name not in self._avoid

    def __iter__(self) -> Iterator[str]:
        """Their names, kind by kind, the least busy first."""
        return (name for names in self._by_load() for name in names if name not in self._avoid)

    def __len__(self) -> int:
        """The number of engines."""
        return sum(map(len, self._by_load())) - sum(map(self._is_within, self._avoid))

    def least_load(self) -> int | None:
        """The load of the least busy one; ``None`` if there is none."""
        if not self._avoid:
            return min((group.loads[0] for group in self._groups), default=None)
        firsts = (next((name for name in group if name not in self._avoid), None) for group in self._groups)
        return min((self._entries[name].load for name in firsts if name is not None), default=None)

    def within(self, load: float) -> "Tier":
        """The engines of the tier with at most ``load`` calls."""
        return Tier(self._entries, self._groups, self._avoid, load)

    def _is_within(self, name: object) -> bool:
        """Say whether an engine is one of them, or of those to be avoided."""
        entry = self._entries.get(cast(str, name))
        return entry is not None and entry.load <= self._most and entry.group in self._groups

    def _by_load(self) -> Iterator[Collection[str]]:
        for group in self._groups:
            for load in group.loads:
                if load > self._most:
                    break
                yield group.names[load]
