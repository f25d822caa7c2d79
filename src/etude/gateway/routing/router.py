"""Which engine gets a call: the pure core of a pool.

    polls, calls, announcements ──facts──▶ Router ──choose──▶ an engine, or why there is none

Owns the engines of a pool, how each of them stands and which session went where. Of the engines that may take a call,
healthy ones come before suspect ones, and near ones before far ones. Among those a session stays where its prefix is
cached, as long as that engine is not much busier than the least busy one; a new session goes to one of the least busy
by rendezvous hashing (Thaler & Ravishankar 1998, "Using name-based mappings to increase hit rates"): gateways that know
nothing of each other choose alike, and an engine that leaves moves its own sessions only.

No clock and no I/O: facts and ``now`` in, in seconds. A fact about an engine that was removed meanwhile is passed over.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from etude.gateway.routing.engine_health import (
    Announcements,
    EngineEntry,
    EngineRecord,
    EngineState,
    EngineView,
    HealthLimits,
    dissent,
)
from etude.protocols import EngineHealth

STICKY_FACTOR, STICKY_CALLS = 2.0, 8
"""A session stays while its engine has at most this factor, plus this many calls, of what the least busy one has. To
read a long prompt again costs as much as several calls' waiting.
"""
FRESH_FACTOR, FRESH_CALLS = 1.25, 2
"""Engines that count as least busy, for a new session: closer together, as it has nothing to lose anywhere."""
DEFAULT_HEALTH = HealthLimits()
DEFAULT_SESSIONS = 65_536
"""Sessions whose engine is remembered; the longest unused is forgotten first, and hashed again."""


class Reason(StrEnum):
    """Why a call goes where it goes, or nowhere."""

    AFFINITY = "affinity"
    """Its session was there before."""
    FRESH = "fresh"
    """One of the least busy."""
    LAST_RESORT = "last_resort"
    """Nothing healthy can take it."""
    VERSION = "version"
    """No engine serves the wanted version yet."""
    UNAVAILABLE = "unavailable"
    """No engine can be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The answer of :meth:`Router.choose`."""

    name: str | None
    """``None``: nowhere, for ``reason``."""
    reason: Reason
    newest: int | None = None
    """The newest version that is served by an engine that may be routed to, with ``VERSION``."""


class Router:
    """The engines of a pool and who uses them."""

    def __init__(self, limits: HealthLimits = DEFAULT_HEALTH, max_sessions: int = DEFAULT_SESSIONS) -> None:
        self._limits = limits
        self._max_sessions = max_sessions
        self._records: dict[str, EngineRecord] = {}
        self._announced = Announcements(limits)
        self._inflight: Counter[str] = Counter()  # also of engines that were removed, until their calls end
        self._affinity: OrderedDict[str, str] = OrderedDict()  # session → engine, the longest unused first

    def add(self, entry: EngineEntry, now: float) -> None:
        """Register an engine; it is suspect until it was seen. Raises ``ValueError`` if the name is taken."""
        if entry.name in self._records:
            raise ValueError(f"an engine {entry.name!r} is registered already: remove it first, or use another name")
        self._records[entry.name] = EngineRecord(entry=entry, heard_at=now, poll_at=now)

    def remove(self, name: str) -> None:
        """Send nothing more to an engine. Raises ``ValueError`` if there is none of this name."""
        if name not in self._records:
            raise ValueError(f"no engine {name!r} is registered, only {sorted(self._records)}")
        del self._records[name]

    def engines(self) -> tuple[EngineView, ...]:
        """What is known of each engine, in the order of registration."""
        return tuple(
            EngineView(
                entry=record.entry,
                state=record.state,
                reason=record.reason,
                health=record.health,
                inflight=self._inflight[name],
            )
            for name, record in self._records.items()
        )

    def due(self, now: float) -> list[str]:
        """Engines to be polled now; each is named once until :meth:`report` or :meth:`failed` says how it went."""
        due = [name for name, record in self._records.items() if not record.asked and record.poll_at <= now]
        for name in due:
            self._records[name].asked = True
        return due

    def report(self, name: str, health: EngineHealth, now: float) -> None:
        """A poll was answered."""
        record = self._records.get(name)
        if record is None:
            return
        record.hear(now)
        record.note(health, now, self._inflight[name])
        record.judge(self._fault(record, now), now)
        record.asked, record.poll_at = False, now + self._limits.poll_s(record.state)

    def failed(self, name: str, reason: str, now: float, *, in_call: bool) -> EngineState | None:
        """A call, or else a poll, was not answered; says how the engine stands now."""
        record = self._records.get(name)
        if record is None:
            return None
        silent_s = now - record.heard_at
        if record.state is EngineState.HEALTHY:
            if in_call:
                record.lose(now)
            record.move(EngineState.SUSPECT, reason)
        elif record.state is not EngineState.DEAD and silent_s > self._limits.dead_s:
            record.move(EngineState.DEAD, f"nothing heard for {silent_s:.0f} s, at last: {reason}")
        elif record.state is EngineState.SUSPECT:
            record.move(EngineState.SUSPECT, reason)
        if in_call:
            record.poll_at = min(record.poll_at, now)
        else:
            record.asked, record.poll_at = False, now + self._limits.poll_s(record.state)
        return record.state

    def answered(self, name: str, now: float, version: int | None = None) -> None:
        """A call was answered, perhaps with a refusal; ``version`` sampled its last token.

        An engine with newer weights than it reported is asked at once what they are.
        """
        record = self._records.get(name)
        if record is None:
            return
        record.hear(now)
        if version is None:
            return
        record.losses, record.distrusted_until = 0, now
        known = record.health
        if record.state is not EngineState.HEALTHY or known is None or version > known.version:
            record.poll_at = min(record.poll_at, now)

    def announce(self, version: int, digest: str, now: float) -> None:
        """The weight log says which digest a version has. Raises ``ValueError`` if it said otherwise before.

        Engines whose last report it contradicts get no more calls; like all stale ones they are asked again at once.
        """
        self._announced.announce(version, digest)
        for record in self._records.values():
            if _serves(record) and record.health and (fault := self._fault(record, now)):
                record.move(EngineState.STALE, fault)
            if record.state is EngineState.STALE:
                record.poll_at = min(record.poll_at, now)

    def heard(self, name: str) -> int:
        """Signs of life that an engine gave so far; 0 for one that is not registered."""
        record = self._records.get(name)
        return 0 if record is None else record.heard

    def waiting(self) -> int:
        """Calls that wait in engines' own lines, as they last said."""
        return sum(record.health.waiting for record in self._records.values() if _serves(record) and record.health)

    def choose(
        self, session: str, *, min_version: int | None = None, region: str | None = None, avoid: Collection[str] = ()
    ) -> Choice:
        """Where the next call of ``session`` goes; an empty session is nobody's and remembered nowhere.

        ``avoid`` are engines that this call shall not go to.
        """
        serving = [record for record in self._records.values() if _serves(record)]
        able = serving
        if min_version is not None:
            able = [record for record in serving if record.health and record.health.version >= min_version]
            newest = max((record.health.version for record in serving if record.health), default=None)
            if not able and newest is not None:
                return Choice(name=None, reason=Reason.VERSION, newest=newest)
        ranked = [(_rank(record, region), record) for record in able if record.entry.name not in avoid]
        if not ranked:
            return Choice(name=None, reason=Reason.UNAVAILABLE)
        first = min(rank for rank, _ in ranked)
        return self._place(session, [record for rank, record in ranked if rank == first])

    def began(self, name: str) -> None:
        """A call goes to an engine."""
        self._inflight[name] += 1

    def ended(self, name: str) -> None:
        """A call that began is over, however."""
        self._inflight[name] -= 1
        if not self._inflight[name]:
            del self._inflight[name]

    def _place(self, session: str, tier: list[EngineRecord]) -> Choice:
        """One of engines that are equally good but for their load."""
        loads = {record.entry.name: record.foreign + self._inflight[record.entry.name] for record in tier}
        least = min(loads.values())
        known = self._affinity.get(session)
        healthy = tier[0].state is EngineState.HEALTHY
        if known in loads and loads[known] <= STICKY_FACTOR * least + STICKY_CALLS:
            self._affinity.move_to_end(session)
            return Choice(name=known, reason=Reason.AFFINITY if healthy else Reason.LAST_RESORT)
        calm = [name for name, load in loads.items() if load <= FRESH_FACTOR * least + FRESH_CALLS]
        name = max(calm, key=lambda name: _affinity_hash(session, name))
        if not healthy:
            return Choice(name=name, reason=Reason.LAST_RESORT)
        if session:
            self._affinity[session] = name
            self._affinity.move_to_end(session)
            if len(self._affinity) > self._max_sessions:
                self._affinity.popitem(last=False)
        return Choice(name=name, reason=Reason.FRESH)

    def _fault(self, record: EngineRecord, now: float) -> str:
        """What is wrong with the weights that an engine last reported; empty for nothing."""
        health = record.health
        assert health is not None, "it has not reported any"
        fault = self._announced.fault(health, now)
        return fault if fault or self._announced.knows(health.version) else dissent(record, self._records.values())


def _serves(record: EngineRecord) -> bool:
    return record.state is EngineState.HEALTHY or record.state is EngineState.SUSPECT


def _rank(record: EngineRecord, region: str | None) -> tuple[bool, bool]:
    """The lower, the rather."""
    return record.state is not EngineState.HEALTHY, region is not None and record.entry.region != region


def _affinity_hash(session: str, name: str) -> bytes:
    return blake2b(f"{name}\0{session}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
