"""How an engine stands: the states as a table, and the digests that engines are held against.

              ┌────── a call or a poll failed ─────┐
    HEALTHY ──┤                                    ├──▶ SUSPECT ── nothing heard for dead_s ──▶ DEAD
       ▲      └──────────── wrong weights ──▶ STALE ───────────── nothing heard for dead_s ──────▲ │
       └────────────── a good report ───────────┴──────┘     SUSPECT ◀── it answers again ─────────┘

Owns what is known of one engine and whether the weights it reports are those that were announced. Which engine gets a
call is the :class:`~etude.gateway.routing.router.Router`'s decision. Pure: facts and ``now`` in, all times in seconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from urllib.parse import urlsplit

from etude.protocols import EngineHealth

DISTRUST_S = 1.0
"""Unit of the pause after which an engine that lost calls again and again gets new ones: 0, 1, 3, 7 … of these."""
DISTRUST_MAX_S = 30.0
"""The longest such pause: an engine that was repaired is of use within this time."""
ANNOUNCEMENTS = 256
"""Versions whose digests are remembered; far more than engines may be behind."""
SHOWN_DIGITS = 12
"""Of a digest, in messages."""


class EngineState(StrEnum):
    """What may be sent to an engine."""

    HEALTHY = "healthy"
    """Alive, and it holds what was announced: everything."""
    SUSPECT = "suspect"
    """Not yet seen, or a call or a poll failed: calls that nothing healthy can take, and no new sessions."""
    STALE = "stale"
    """Alive with weights that are wrong or too old: nothing."""
    DEAD = "dead"
    """Silent: nothing, and it is asked less often."""


MOVES: Mapping[EngineState, frozenset[EngineState]] = MappingProxyType(
    {
        EngineState.HEALTHY: frozenset({EngineState.SUSPECT, EngineState.STALE}),
        EngineState.SUSPECT: frozenset({EngineState.HEALTHY, EngineState.STALE, EngineState.DEAD}),
        EngineState.STALE: frozenset({EngineState.HEALTHY, EngineState.SUSPECT, EngineState.DEAD}),
        EngineState.DEAD: frozenset({EngineState.SUSPECT, EngineState.STALE}),
    }
)
"""State of an engine → where it may go. No healthy engine is dead at once: one failure may be the asker's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """When an engine is no longer trusted, and how often it is asked."""

    dead_s: float = 15.0
    """Silence, with failures, after which an engine counts as dead."""
    max_lag: int = 8
    """Versions that an engine may be behind the newest announced one."""
    grace_s: float = 30.0
    """How long a version may be served before it is announced: the log may be read later here than by the engine."""
    healthy_poll_s: float = 0.5
    """Between two polls. It bounds how long a new version, or a wrong one, stays unnoticed."""
    suspect_poll_s: float = 0.25
    """It also bounds how long calls wait for an engine that restarts."""
    stale_poll_s: float = 1.0
    dead_poll_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_lag < ANNOUNCEMENTS:
            raise ValueError(
                f"max_lag={self.max_lag}: expected 0 … {ANNOUNCEMENTS - 1}, as many digests are remembered"
            )

    def poll_s(self, state: EngineState) -> float:
        """Seconds from one poll to the next."""
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
    """An engine as it is registered."""

    name: str
    """Unique in its pool."""
    url: str
    region: str = ""
    """Where it is; callers may ask for engines near them."""


def is_engine_url(url: str) -> bool:
    """True if a client can be made for a URL: http or https, a host, a port that is one, perhaps a path."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:
        return False
    plain = url.isprintable() and not set(url) & set(" @?#")
    return plain and parts.scheme in ("http", "https") and bool(host) and port != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What a pool knows of one engine, for people and for metrics."""

    entry: EngineEntry
    state: EngineState
    reason: str
    """Why it is in this state."""
    health: EngineHealth | None
    """What it last said of itself; ``None`` before it said anything."""
    inflight: int
    """Calls of this gateway."""


@dataclass(slots=True, kw_only=True, eq=False)
class EngineRecord:
    """What is known of one engine."""

    entry: EngineEntry
    heard_at: float
    """When it last gave a sign of life; at first, when it was registered."""
    poll_at: float
    """When it is to be asked next."""
    state: EngineState = EngineState.SUSPECT
    reason: str = "not yet seen"
    health: EngineHealth | None = None
    held_since: float = 0.0
    """When it first reported the weights that it holds now."""
    heard: int = 0
    """Signs of life so far: answers, refusals and reports."""
    asked: bool = False
    """Whether a poll is under way."""
    losses: int = 0
    """Times that it lost calls since it last answered one; a crash that takes many calls counts once."""
    distrusted_until: float = field(default=float("-inf"))
    """Until then good reports do not make it healthy: it had those while it lost calls, too."""
    foreign: int = 0
    """Calls of other gateways, as of its last report."""

    def move(self, state: EngineState, reason: str) -> None:
        """Go to another state, or stay for another reason; only moves in ``MOVES`` exist."""
        assert state is self.state or state in MOVES[self.state], f"an engine went from {self.state} to {state}"
        self.state, self.reason = state, reason

    def hear(self, now: float) -> None:
        """Note a sign of life."""
        self.heard_at, self.heard = now, self.heard + 1

    def note(self, health: EngineHealth, now: float, inflight: int) -> None:
        """Take down a report that came while ``inflight`` calls were ours."""
        known = self.health
        if known is None or (known.version, known.digest) != (health.version, health.digest):
            self.held_since = now
        self.health = health
        self.foreign = max(0, health.running + health.waiting - inflight)  # a call may end while its report travels

    def judge(self, fault: str, now: float) -> None:
        """Decide on a report that has just come; ``fault`` is what is wrong with the weights in it."""
        if fault:
            self.move(EngineState.STALE, fault)
        elif self.state is EngineState.DEAD:
            self.move(EngineState.SUSPECT, "it answers again")
        elif now >= self.distrusted_until:
            self.move(EngineState.HEALTHY, "alive, with the right weights")
        elif self.state is EngineState.STALE:
            self.move(EngineState.SUSPECT, "its weights are right again, but it lost calls before")

    def lose(self, now: float) -> None:
        """Note that it lost a call while it was trusted."""
        self.losses += 1
        pause_s = DISTRUST_S * (2.0 ** min(self.losses - 1, 10) - 1)
        self.distrusted_until = now + min(pause_s, DISTRUST_MAX_S)


class Announcements:
    """Which digest each weight version has, as the weight log says."""

    def __init__(self, limits: HealthLimits) -> None:
        self._limits = limits
        self._digests: dict[int, str] = {}
        self._newest = -1
        self._first_seen: dict[int, float] = {}  # versions that an engine had before they were announced

    def announce(self, version: int, digest: str) -> None:
        """Note what the log says. Raises ``ValueError`` when it said something else before: a log never changes."""
        known = self._digests.setdefault(version, digest)
        if known != digest:
            raise ValueError(f"weight version {version} was announced as {_shown(known)} and now as {_shown(digest)}")
        if len(self._digests) > ANNOUNCEMENTS:
            del self._digests[min(self._digests)]
        self._newest = max(version, self._newest)
        self._first_seen = {seen: at for seen, at in self._first_seen.items() if seen > self._newest}

    def fault(self, health: EngineHealth, now: float) -> str:
        """What is wrong with weights that an engine reports; empty for nothing.

        Without any announcement nothing is. A version from before the first announcement has no digest to compare.
        """
        if not self._digests:
            return ""
        newest, announced = self._newest, self._digests.get(health.version)
        if health.version < newest - self._limits.max_lag:
            return f"version {health.version} is more than {self._limits.max_lag} behind {newest}, the newest announced"
        if announced is not None and announced != health.digest:
            return f"version {health.version} is {_shown(announced)}, the engine holds {_shown(health.digest)}"
        if health.version > newest and now - self._seen(health.version, now) > self._limits.grace_s:
            return f"version {health.version} was not announced within {self._limits.grace_s:g} s; newest is {newest}"
        return ""

    def knows(self, version: int) -> bool:
        """Whether the digest of ``version`` was announced."""
        return version in self._digests

    def _seen(self, version: int, now: float) -> float:
        if len(self._first_seen) >= ANNOUNCEMENTS and version not in self._first_seen:
            del self._first_seen[min(self._first_seen, key=self._first_seen.__getitem__)]
        return self._first_seen.setdefault(version, now)


def dissent(record: EngineRecord, records: Iterable[EngineRecord]) -> str:
    """How an engine's digest differs from that of the others with its version; empty if it does not.

    For versions that nobody announced. Most engines are right, of as many on both sides those that held theirs first:
    an engine that joins with other weights can never push out those that are there. The dead have no vote.
    """
    assert record.health is not None, "an engine without a report has no digest"
    version, held = record.health.version, dict[str, list[float]]()
    for other in records:
        health = other.health
        if other.state is not EngineState.DEAD and health is not None and health.version == version:
            held.setdefault(health.digest, []).append(other.held_since)
    right = max(held, key=lambda digest: (len(held[digest]), -min(held[digest])), default=record.health.digest)
    if right == record.health.digest:
        return ""
    return f"{len(held[right])} engines hold {_shown(right)} as version {version}, it {_shown(record.health.digest)}"


def _shown(digest: str) -> str:
    return digest[:SHOWN_DIGITS]
