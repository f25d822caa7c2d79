"""The choice of an engine for a call, and the health of each engine: the pure core of the pool.

    polls, calls, announcements ──facts──▶ Router ──choose──▶ an engine, or why there is none

              ┌────── a call or a poll failed ─────┐
    HEALTHY ──┤                                    ├──▶ SUSPECT ── no contact for dead_s ──▶ DEAD
       ▲      └──────────── wrong weights ──▶ STALE ───────────── no contact for dead_s ──────▲ │
       └────────────── a good report ───────────┴──────┘     SUSPECT ◀── it answers again ─────────┘

Owns the engines of a pool, the health of each as a state machine, the digests to compare their weights with, and the
engine of each session; the lookup of engines by load is :mod:`etude.gateway.routing.engine_index`'s. Of the engines
that may take a call, healthy ones come before suspect ones, and near ones before far ones. Among those, a session stays
where its prefix is cached unless that engine is much busier than the least busy one. A new session goes to one of the
least busy engines by consistent hashing (:mod:`etude.gateway.routing.hash_ring`): independent gateways choose alike,
and an engine that leaves moves only its own sessions. The time of a choice does not grow with the number of engines.

No clock and no I/O: facts and ``now``, in seconds, are arguments. A fact about an engine that was removed is ignored.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from urllib.parse import urlsplit

from etude.backoff import Backoff
from etude.gateway.routing.engine_index import EngineIndex, EngineKind, Tier
from etude.gateway.routing.hash_ring import HashRing
from etude.protocols import EngineHealth

LOSS_BACKOFF = Backoff(first_s=1.0, longest_s=31.0)
"""Pauses before an engine that repeatedly loses calls gets new ones, minus the first pause: 0, 1, 3, 7 … 30 s. A
repaired engine is back in use within that time.
"""
ANNOUNCEMENTS = 256
"""Versions whose digests are remembered; far more than engines may lag behind."""
SHOWN_DIGITS = 12
"""Digits of a digest shown in messages."""


class EngineState(StrEnum):
    """The health of an engine, which determines the calls it gets."""

    HEALTHY = "healthy"
    """Alive with the announced weights: gets all calls."""
    SUSPECT = "suspect"
    """Not yet seen, or a call or a poll failed: gets only calls that no healthy engine can take, and no new sessions.
    """
    STALE = "stale"
    """Alive with weights that are wrong or too old: gets no calls."""
    DEAD = "dead"
    """Silent: gets no calls and is polled less often."""


MOVES: Mapping[EngineState, frozenset[EngineState]] = MappingProxyType(
    {
        EngineState.HEALTHY: frozenset({EngineState.SUSPECT, EngineState.STALE}),
        EngineState.SUSPECT: frozenset({EngineState.HEALTHY, EngineState.STALE, EngineState.DEAD}),
        EngineState.STALE: frozenset({EngineState.HEALTHY, EngineState.SUSPECT, EngineState.DEAD}),
        EngineState.DEAD: frozenset({EngineState.SUSPECT, EngineState.STALE}),
    }
)
"""State of an engine → possible next states. A healthy engine never becomes dead at once: the cause of one failure may
be the gateway.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """Limits beyond which an engine counts as unhealthy, and the pauses between polls."""

    dead_s: float = 15.0
    """Silence, with failures, after which an engine counts as dead."""
    max_lag: int | None = 8
    """Versions that an engine may lag behind the newest announced one; ``None`` for any number."""
    grace_s: float = 30.0
    """Time that a version may be served before it is announced: the gateway may read the log later than the engine
    does.
    """
    healthy_poll_s: float = 0.5
    """Pause between two polls: the longest time that a new or a wrong version stays unnoticed."""
    suspect_poll_s: float = 0.25
    """Pause between two polls of a suspect engine: limits how long calls wait for an engine that restarts."""
    stale_poll_s: float = 1.0
    dead_poll_s: float = 2.0

    def __post_init__(self) -> None:
        if self.max_lag is not None and not 0 <= self.max_lag < ANNOUNCEMENTS:
            raise ValueError(
                f"max_lag={self.max_lag}: expected 0 … {ANNOUNCEMENTS - 1}, as many digests are remembered"
            )

    def poll_s(self, state: EngineState) -> float:
        """Seconds between two polls."""
        match state:
            case EngineState.HEALTHY:
                return self.healthy_poll_s
            case EngineState.SUSPECT:
                return self.suspect_poll_s
            case EngineState.STALE:
                return self.stale_poll_s
            case EngineState.DEAD:
                return self.dead_poll_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """The registration of an engine."""

    name: str
    """Unique in its pool."""
    url: str
    region: str = ""
    """Its location; callers may request engines near them."""
    is_lent: bool = False
    """True if it may be taken back at any moment: even whole answers are fetched token by token, so no token is sampled
    twice.
    """


def is_engine_url(url: str) -> bool:
    """True for a valid engine URL: http or https, a host, a valid port, optionally a path."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:
        return False
    plain = url.isprintable() and not set(url) & set(" @?#")
    return plain and parts.scheme in ("http", "https") and bool(host) and port != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """A snapshot of one engine's state, for people and metrics."""

    entry: EngineEntry
    state: EngineState
    reason: str
    """The cause of this state."""
    health: EngineHealth | None
    """Its last report; ``None`` before the first."""
    inflight: int
    """Calls of this gateway in progress."""


@dataclass(slots=True, kw_only=True, eq=False)
class EngineRecord:
    """The router's mutable record of one engine."""

    entry: EngineEntry
    last_contact_at: float
    """Time of its last sign of life; initially, time of registration."""
    poll_at: float
    """Time of its next poll."""
    state: EngineState = EngineState.SUSPECT
    reason: str = "not yet seen"
    health: EngineHealth | None = None
    same_weights_since: float = 0.0
    """Time at which it first reported its current weights."""
    contacts: int = 0
    """Signs of life so far: answers, rejections and reports."""
    polling: bool = False
    """True while a poll is in progress."""
    losses: int = 0
    """Times that it lost calls since its last answer; a crash that loses many calls counts once."""
    not_healthy_before: float = field(default=float("-inf"))
    """Until this time good reports do not make it healthy: it sent good reports while it lost calls, too."""
    other_inflight: int = 0
    """Calls of other gateways, as of its last report."""

    def move(self, state: EngineState, reason: str) -> None:
        """Move to another state, or update the reason; only moves in ``MOVES`` are allowed."""
        assert state is self.state or state in MOVES[self.state], f"an engine went from {self.state} to {state}"
        self.state, self.reason = state, reason

    def record_contact(self, now: float) -> None:
        """Record a sign of life."""
        self.last_contact_at, self.contacts = now, self.contacts + 1

    def note(self, health: EngineHealth, now: float, inflight: int) -> None:
        """Record a report that arrived while ``inflight`` calls of this gateway were in progress."""
        last = self.health
        if last is None or (last.version, last.digest) != (health.version, health.digest):
            self.same_weights_since = now
        self.health = health
        self.other_inflight = max(
            0, health.running + health.waiting - inflight
        )  # a call may end while its report travels

    def judge(self, fault: str, now: float) -> None:
        """Set the state after a new report; ``fault`` describes the error in its weights."""
        if fault:
            self.move(EngineState.STALE, fault)
        elif self.state is EngineState.DEAD:
            self.move(EngineState.SUSPECT, "it answers again")
        elif now >= self.not_healthy_before:
            self.move(EngineState.HEALTHY, "alive, with the right weights")
        elif self.state is EngineState.STALE:
            self.move(EngineState.SUSPECT, "its weights are right again, but it lost calls before")

    def lose(self, now: float) -> None:
        """Record that it lost a call while it was trusted."""
        self.losses += 1
        self.not_healthy_before = now + LOSS_BACKOFF.delay_s(self.losses) - LOSS_BACKOFF.first_s


class Announcements:
    """The digest of each weight version, as announced by the weight log."""

    def __init__(self, limits: HealthLimits) -> None:
        self._limits = limits
        self._digests: dict[int, str] = {}
        self._newest = -1
        self._first_seen: dict[int, float] = {}  # versions that an engine had before their announcement

    def announce(self, version: int, digest: str) -> None:
        """Record an announcement. Raises ``ValueError`` if it contradicts an earlier one: a log never changes."""
        earlier = self._digests.setdefault(version, digest)
        if earlier != digest:
            raise ValueError(f"weight version {version} was announced as {_shown(earlier)} and now as {_shown(digest)}")
        if len(self._digests) > ANNOUNCEMENTS:
            del self._digests[min(self._digests)]
        self._newest = max(version, self._newest)
        self._first_seen = {seen: at for seen, at in self._first_seen.items() if seen > self._newest}

    def fault(self, health: EngineHealth, now: float) -> str:
        """The fault in the weights that an engine reports; empty for none.

        Without any announcement there is no fault. A version older than the first announcement has no digest to
        compare.
        """
        if not self._digests:
            return ""
        newest, announced, lag = self._newest, self._digests.get(health.version), self._limits.max_lag
        if lag is not None and health.version < newest - lag:
            return f"version {health.version} is more than {lag} behind {newest}, the newest announced"
        if announced is not None and announced != health.digest:
            return f"version {health.version} is {_shown(announced)}, the engine holds {_shown(health.digest)}"
        if health.version > newest and now - self._seen(health.version, now) > self._limits.grace_s:
            return f"version {health.version} was not announced within {self._limits.grace_s:g} s; newest is {newest}"
        return ""

    def digest(self, version: int) -> str | None:
        """The announced digest of ``version``."""
        return self._digests.get(version)

    def knows(self, version: int) -> bool:
        """True if the digest of ``version`` was announced."""
        return version in self._digests

    def _seen(self, version: int, now: float) -> float:
        if len(self._first_seen) >= ANNOUNCEMENTS and version not in self._first_seen:
            del self._first_seen[min(self._first_seen, key=self._first_seen.__getitem__)]
        return self._first_seen.setdefault(version, now)


def digest_disagreement(record: EngineRecord, records: Iterable[EngineRecord]) -> str:
    """Describe how an engine's digest differs from the others' of its version; empty if it does not.

    For versions that were not announced. The majority is right; in a tie, the engines that had their weights first: an
    engine that joins with other weights can never displace existing ones. Dead engines do not count.
    """
    assert record.health is not None, "an engine without a report has no digest"
    version, since = record.health.version, dict[str, list[float]]()
    for other in records:
        health = other.health
        if other.state is not EngineState.DEAD and health is not None and health.version == version:
            since.setdefault(health.digest, []).append(other.same_weights_since)
    right = max(since, key=lambda digest: (len(since[digest]), -min(since[digest])), default=record.health.digest)
    if right == record.health.digest:
        return ""
    return f"{len(since[right])} engines hold {_shown(right)} as version {version}, it {_shown(record.health.digest)}"


def _shown(digest: str) -> str:
    return digest[:SHOWN_DIGITS]


STICKY_FACTOR, STICKY_CALLS = 2.0, 8
"""A session stays on its engine while that engine has at most this factor times the least busy engine's calls, plus
this many. Reading a long prompt again costs as much as waiting for several calls.
"""
FRESH_FACTOR, FRESH_CALLS = 1.25, 2
"""Limits of "least busy" for a new session: tighter, as it has no cached prefix to lose."""
DEFAULT_HEALTH = HealthLimits()
DEFAULT_SESSIONS = 65_536
"""Sessions whose engine is remembered until they end; beyond that number the least recently used is forgotten first,
and hashed again.
"""


class Reason(StrEnum):
    """The reason for a routing decision."""

    AFFINITY = "affinity"
    """Its session used this engine before."""
    FRESH = "fresh"
    """One of the least busy engines."""
    LAST_RESORT = "last_resort"
    """No healthy engine can take it."""
    VERSION = "version"
    """No engine serves the requested version yet."""
    UNAVAILABLE = "unavailable"
    """No engine is available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The result of :meth:`Router.choose`."""

    name: str | None
    """``None``: no engine, for ``reason``."""
    reason: Reason
    newest: int | None = None
    """With ``VERSION``: the newest version served by any engine that may get calls."""


class Router:
    """Chooses engines for calls: tracks the engines of a pool and the sessions that use them."""

    def __init__(self, limits: HealthLimits = DEFAULT_HEALTH, max_sessions: int = DEFAULT_SESSIONS) -> None:
        self._limits = limits
        self._max_sessions = max_sessions
        self._records: dict[str, EngineRecord] = {}
        self._index = EngineIndex()
        self._ring = HashRing()
        self._announced = Announcements(limits)
        self._reported: OrderedDict[int, str] = OrderedDict()  # version → digest last reported for it
        self._inflight: Counter[str] = Counter()  # includes removed engines until their calls end
        self._affinity: OrderedDict[str, str] = OrderedDict()  # session → engine, least recently used first

    def add(self, entry: EngineEntry, now: float) -> None:
        """Register an engine; it is suspect until its first report. Raises ``ValueError`` if the name is taken."""
        if entry.name in self._records:
            raise ValueError(f"an engine {entry.name!r} is registered already: remove it first, or use another name")
        record = self._records[entry.name] = EngineRecord(entry=entry, last_contact_at=now, poll_at=now)
        self._ring.add(entry.name)
        self._place(record)

    def remove(self, name: str) -> None:
        """Send no more calls to an engine. Raises ``ValueError`` for an unknown name."""
        if name not in self._records:
            raise ValueError(f"no engine {name!r} is registered, only {sorted(self._records)}")
        del self._records[name]
        self._index.discard(name)
        self._ring.remove(name)

    def engines(self) -> tuple[EngineView, ...]:
        """The state of each engine, in the order of registration."""
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
        """Engines to poll now; each is returned once until :meth:`report` or :meth:`failed` gives the result."""
        due = [name for name, record in self._records.items() if not record.polling and record.poll_at <= now]
        for name in due:
            self._records[name].polling = True
        return due

    def report(self, name: str, health: EngineHealth, now: float) -> None:
        """Record the answer to a poll."""
        record = self._records.get(name)
        if record is None:
            return
        record.record_contact(now)
        record.note(health, now, self._inflight[name])
        record.judge(self._fault(record, now), now)
        record.polling, record.poll_at = False, now + self._limits.poll_s(record.state)
        if _serves(record):
            self._reported[health.version] = health.digest
            if len(self._reported) > ANNOUNCEMENTS:
                self._reported.popitem(last=False)
        self._place(record)

    def digest(self, version: int) -> str | None:
        """The digest of a weight version as announced by the log, else as reported by a sound engine."""
        return self._announced.digest(version) or self._reported.get(version)

    def failed(self, name: str, reason: str, now: float, *, in_call: bool) -> EngineState | None:
        """Record that a call or a poll was not answered; return the engine's state after that."""
        record = self._records.get(name)
        if record is None:
            return None
        silent_s = now - record.last_contact_at
        if record.state is EngineState.HEALTHY:
            if in_call:
                record.lose(now)
            record.move(EngineState.SUSPECT, reason)
        elif record.state is not EngineState.DEAD and silent_s > self._limits.dead_s:
            record.move(EngineState.DEAD, f"no contact for {silent_s:.0f} s, at last: {reason}")
        elif record.state is EngineState.SUSPECT:
            record.move(EngineState.SUSPECT, reason)
        if in_call:
            record.poll_at = min(record.poll_at, now)
        else:
            record.polling, record.poll_at = False, now + self._limits.poll_s(record.state)
        self._place(record)
        return record.state

    def answered(self, name: str, now: float, version: int | None = None) -> None:
        """Record the answer to a call, possibly a rejection; ``version`` sampled its last token.

        An engine whose weights are newer than its last report is polled at once.
        """
        record = self._records.get(name)
        if record is None:
            return
        record.record_contact(now)
        if version is None:
            return
        record.losses, record.not_healthy_before = 0, now
        last = record.health
        if record.state is not EngineState.HEALTHY or last is None or version > last.version:
            record.poll_at = min(record.poll_at, now)

    def announce(self, version: int, digest: str, now: float) -> None:
        """Record the digest that the weight log announces. Raises ``ValueError`` if it contradicts an earlier
        announcement.

        Engines whose last report differs get no more calls; like all stale engines they are polled again at once.
        """
        self._announced.announce(version, digest)
        for record in self._records.values():
            if _serves(record) and record.health and (fault := self._fault(record, now)):
                record.move(EngineState.STALE, fault)
                self._place(record)
            if record.state is EngineState.STALE:
                record.poll_at = min(record.poll_at, now)

    def contacts(self, name: str) -> int:
        """Signs of life that an engine gave so far; 0 for one that is not registered."""
        record = self._records.get(name)
        return 0 if record is None else record.contacts

    def waiting(self) -> int:
        """Calls that wait in the engines' own queues, according to their last reports."""
        return self._index.waiting

    def choose(
        self,
        session: str,
        *,
        min_version: int | None = None,
        region: str | None = None,
        avoid: Collection[str] = (),
        digests: Sequence[str] | None = None,
    ) -> Choice:
        """The engine for the next call of ``session``; an empty session is not remembered.

        ``avoid`` names engines that this call must not use. With ``digests`` only engines that report one of them are
        considered, in the order of the digests.
        """
        serving = list(self._index.kinds)
        if digests is not None:
            serving = self._holding(serving, digests, avoid)
        able = serving
        if min_version is not None:
            able = [kind for kind in serving if kind.version is not None and kind.version >= min_version]
            newest = max((kind.version for kind in serving if kind.version is not None), default=None)
            if not able and newest is not None:
                return Choice(name=None, reason=Reason.VERSION, newest=newest)
        tiers: dict[tuple[bool, bool], list[EngineKind]] = {}
        for kind in able:
            rank = not kind.is_healthy, region is not None and kind.region != region
            tiers.setdefault(rank, []).append(kind)
        for rank in sorted(tiers):  # lower is better
            tier = self._index.tier(tiers[rank], avoid)
            least = tier.least_load()
            if least is not None:
                return self._choose(session, tier, least, is_healthy=not rank[0])
        return Choice(name=None, reason=Reason.UNAVAILABLE)

    def forget(self, session: str) -> None:
        """Forget the engine of a session that has ended."""
        self._affinity.pop(session, None)

    def began(self, name: str) -> None:
        """Count a call that was sent to an engine."""
        self._calls_changed(name, 1)

    def ended(self, name: str) -> None:
        """Count the end of a call, whatever its result."""
        self._calls_changed(name, -1)

    def _choose(self, session: str, tier: Tier, least: int, *, is_healthy: bool) -> Choice:
        """One of several engines that differ only in load; the least busy one has ``least`` calls."""
        last = self._affinity.get(session)
        if last is not None and last in tier.within(STICKY_FACTOR * least + STICKY_CALLS):
            self._affinity.move_to_end(session)
            return Choice(name=last, reason=Reason.AFFINITY if is_healthy else Reason.LAST_RESORT)
        name = self._ring.nearest(session, tier.within(FRESH_FACTOR * least + FRESH_CALLS))
        if not is_healthy:
            return Choice(name=name, reason=Reason.LAST_RESORT)
        if session:
            self._affinity[session] = name
            self._affinity.move_to_end(session)
            if len(self._affinity) > self._max_sessions:
                self._affinity.popitem(last=False)
        return Choice(name=name, reason=Reason.FRESH)

    def _holding(self, kinds: Sequence[EngineKind], digests: Sequence[str], avoid: Collection[str]) -> list[EngineKind]:
        """The kinds with the first of ``digests`` that an allowed engine has; empty if there is none."""
        for digest in digests:
            holders = [kind for kind in kinds if kind.digest == digest]
            if self._index.tier(holders, avoid).least_load() is not None:
                return holders
        return []

    def _place(self, record: EngineRecord) -> None:
        """Update an engine's place in the index."""
        name, health = record.entry.name, record.health
        if not _serves(record):
            self._index.discard(name)
            return
        version, digest, waiting = (health.version, health.digest, health.waiting) if health else (None, None, 0)
        kind = EngineKind(record.state is EngineState.HEALTHY, record.entry.region, version, digest)
        self._index.put(name, kind, record.other_inflight + self._inflight[name], waiting)

    def _calls_changed(self, name: str, count: int) -> None:
        self._inflight[name] += count
        if not self._inflight[name]:
            del self._inflight[name]
        self._index.add_load(name, count)

    def _fault(self, record: EngineRecord, now: float) -> str:
        """The fault of the weights that an engine last reported; empty for none."""
        health = record.health
        assert health is not None, "it has not reported any"
        fault = self._announced.fault(health, now)
        return (
            fault
            if fault or self._announced.knows(health.version)
            else digest_disagreement(record, self._records.values())
        )


def _serves(record: EngineRecord) -> bool:
    return record.state is EngineState.HEALTHY or record.state is EngineState.SUSPECT
