"""The open sessions of a gateway by id, and the time that each one's calls waited for engines.

Owns the number and lifetime of sessions. Rollouts and production have separate limits, so that neither can use up the
other's; among production clients, the one with the most sessions loses one. The content of a session is in its
:class:`~etude.gateway.capture.conversations.Conversation`; :mod:`etude.gateway.http.auth` controls access to it. Pure;
``now`` is an argument.
"""

import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from etude.errors import SessionLost
from etude.gateway.api.calls import CLIENT_CLOSED, UNSERVED
from etude.gateway.capture.conversations import MAX_TOKENS, MAX_TURNS, Conversation, TurnStore
from etude.gateway.request_log import RequestRecord
from etude.gateway.routing.admission import TrafficClass
from etude.tokens.messages import ChatFormat
from etude.types import Json

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Session names that a client may choose: they appear in paths and logs."""
SESSION_ID_BYTES = 12
TOO_MANY_SESSIONS = "as many sessions as may be are open or in the middle of a call: close some, or try again later"
"""Message for a caller that requests one more session."""


MIN_WAIT_S = 1.0
"""Least time after which a caller that leaves may have left because no engine took its call."""


@dataclass(slots=True, kw_only=True)
class QueueTime:
    """The time that a session's calls waited for engines; it lets a harness tell an engine's delay from its own.

    An agent has the session's key, and must not be able to turn its own failure into one of the engines. So a call
    whose caller set its own deadline is not counted, nor is the time in which a caller sent its call; and a caller that
    leaves at once was not unserved.
    """

    calls: int = 0
    """Calls in progress."""
    waited_s: float = 0.0
    """Total seconds of finished calls, once read, in the queue, without an engine, and at engines that failed."""
    unserved: bool = False
    """True if the last finished call got no answer because no engine was available."""

    @contextmanager
    def call(self) -> Iterator[None]:
        """Track a call in progress."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    def add(self, record: RequestRecord) -> None:
        """Add a finished call."""
        if record.own_deadline:
            return
        left_the_queue = record.status == CLIENT_CLOSED and record.dispatched is None
        has_waited = record.seconds - record.reading_s >= MIN_WAIT_S
        self.unserved = record.code in UNSERVED or (left_the_queue and has_waited)
        self.waited_s += (record.seconds if self.unserved else record.waited_s) - record.reading_s

    def facts(self) -> dict[str, Json]:
        """The JSON object of ``GET /v1/queue_time``."""
        return {"calls": self.calls, "waited_s": round(self.waited_s, 3), "unserved": self.unserved}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits on the memory that a gateway's sessions use."""

    max_rollouts: int = 4096
    """Open sessions for rollouts: one each, so this is far above any sensible concurrency."""
    max_production: int = 4096
    """Open sessions for production clients, which may never close theirs: beyond it, a new session ends an idle one."""
    max_turns: int = MAX_TURNS
    """Turns per session."""
    max_tokens: int = MAX_TOKENS
    """Tokens per session."""
    idle_s: float = 900.0
    """A session is dropped this long after its last call began; otherwise a killed rollouts process would leave its
    sessions here for ever. A living one uses those that stay open several times as often
    (:mod:`etude.rollouts.sessions`). One answer may take an engine 10 minutes.
    """

    def of(self, traffic: TrafficClass) -> int:
        """Sessions that a traffic class may have."""
        return self.max_production if traffic is TrafficClass.PRODUCTION else self.max_rollouts


DEFAULT_LIMITS = SessionLimits()
"""The limits if none are configured."""


def named_id(owner: str, name: str) -> str:
    """The session id for ``name``, chosen by the client with key id ``owner``."""
    return f"{owner}.{name}"


def name_in(session_id: str, owner: str) -> str:
    """The name that the client with key id ``owner`` chose for the session; empty for a generated id."""
    prefix = named_id(owner, "")
    return session_id.removeprefix(prefix) if session_id.startswith(prefix) else ""


def new_session_id() -> str:
    """An id for a session without a name: unique, not secret."""
    return secrets.token_hex(SESSION_ID_BYTES)


class SessionStore:
    """All open sessions of a gateway."""

    def __init__(self, chat_format: ChatFormat, limits: SessionLimits = DEFAULT_LIMITS) -> None:
        self.chat_format = chat_format
        """The rule that turns every session's messages into tokens."""
        self._limits = limits
        self._by_id: OrderedDict[str, _OpenSession] = OrderedDict()  # the longest idle first
        self._owners: dict[TrafficClass, Counter[str]] = {one: Counter() for one in TrafficClass}
        self._expired: list[str] = []  # not yet returned by expire()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(
        self, session_id: str, owner: str, traffic: TrafficClass, now: float, *, min_version: int | None = None
    ) -> Conversation | None:
        """Open a session; ``None`` if its class has reached its limit.

        ``owner`` is the id of the caller's key. Raises ``ValueError`` if the session exists.
        """
        self._expire(now)
        return self._keep(self.detached(session_id), owner, traffic, now, min_version)

    def fork(self, session_id: str, origin: str, now: float) -> Conversation | None:
        """Open a session as a copy of the open session ``origin``, with the same owner and class; ``None`` if its class
        has reached its limit.

        Raises :class:`~etude.errors.SessionLost` if ``origin`` is not open, ``ValueError`` if ``session_id`` is open
        already.
        """
        conversation = self.find(origin, now)
        if conversation is None:
            raise SessionLost(f"no session {origin!r} is open here: it was closed, expired or never opened")
        entry = self._by_id[origin]
        return self._keep(conversation.fork(session_id), entry.owner, entry.traffic, now, entry.min_version)

    def detached(self, session_id: str) -> Conversation:
        """A conversation for a single call, not registered as an open session."""
        turns = TurnStore(max_turns=self._limits.max_turns, max_tokens=self._limits.max_tokens)
        return Conversation(session_id, self.chat_format, turns)

    def find(self, session_id: str, now: float) -> Conversation | None:
        """The open session with this id, marked as used now; ``None`` if there is none."""
        self._expire(now)
        entry = self._by_id.get(session_id)
        if entry is None:
            return None
        entry.used_at = now
        self._by_id.move_to_end(session_id)
        return entry.conversation

    def find_or_open(self, name: str, owner: str, now: float) -> Conversation | None:
        """The session named ``name`` of ``owner``, a production client, opened if necessary; ``None`` if the limit is
        reached.

        Its id contains both, so the same name of another owner is another session. Raises ``ValueError`` for a name
        that is not allowed in a path.
        """
        if not NAME.fullmatch(name):
            raise ValueError("a session's name has 1 to 128 letters, digits, dots, hyphens and underscores")
        session_id = named_id(owner, name)
        return self.find(session_id, now) or self.open(session_id, owner, TrafficClass.PRODUCTION, now)

    def owner(self, session_id: str) -> str | None:
        """The id of the key that opened a session; ``None`` if no such session is open."""
        entry = self._by_id.get(session_id)
        return None if entry is None else entry.owner

    def traffic(self, session_id: str) -> TrafficClass:
        """The traffic class of an open session. Raises ``KeyError`` for any other session."""
        return self._by_id[session_id].traffic

    def min_version(self, session_id: str) -> int | None:
        """The oldest weight version that may answer calls of a session; ``None`` for any version or if it is
        not open.
        """
        entry = self._by_id.get(session_id)
        return None if entry is None else entry.min_version

    def queue_time(self, session_id: str) -> QueueTime:
        """The queue time of a session; while a call is in progress, the session is never dropped for a new one. A fresh
        object if the session is not open.
        """
        entry = self._by_id.get(session_id)
        return QueueTime() if entry is None else entry.queue_time

    def close(self, session_id: str, now: float) -> Conversation:
        """Close a session and return it.

        Raises :class:`~etude.errors.SessionLost` if no such session is open.
        """
        self._expire(now)
        if session_id not in self._by_id:
            raise SessionLost(f"no session {session_id!r} is open here: it was closed, expired or never opened")
        return self._forget(session_id)

    def expire(self, now: float) -> tuple[str, ...]:
        """Drop the sessions that have been idle for too long; return the ids of all sessions that expired or were
        dropped since the last call.

        To be called regularly by the owner of the sessions' keys, which expire with the sessions.
        """
        self._expire(now)
        expired, self._expired = tuple(self._expired), []
        return expired

    def _keep(
        self, conversation: Conversation, owner: str, traffic: TrafficClass, now: float, min_version: int | None
    ) -> Conversation | None:
        session_id = conversation.session_id
        if session_id in self._by_id:
            raise ValueError(f"session {session_id!r} is open already")
        if not self._has_room(traffic):
            return None
        self._by_id[session_id] = _OpenSession(
            conversation=conversation, owner=owner, traffic=traffic, used_at=now, min_version=min_version
        )
        self._owners[traffic][owner] += 1
        return conversation

    def _has_room(self, traffic: TrafficClass) -> bool:
        """True if one more session of a class may be open; for production, the client with the most sessions loses its
        longest idle one.

        Rollouts never lose one: the turns would be lost, while a production client sends its history with each call.
        """
        owners = self._owners[traffic]
        if owners.total() < self._limits.of(traffic):
            return True
        if traffic is TrafficClass.ROLLOUT:
            return False
        ((owner, _),) = owners.most_common(1)
        idle = (name for name, entry in self._by_id.items() if entry.owner == owner and not entry.queue_time.calls)
        session_id = next(idle, None)
        if session_id is None:
            return False
        self._forget(session_id)
        self._expired.append(session_id)
        return True

    def _expire(self, now: float) -> None:
        while self._by_id:
            session_id, entry = next(iter(self._by_id.items()))
            if now - entry.used_at < self._limits.idle_s:
                return
            self._forget(session_id)
            self._expired.append(session_id)

    def _forget(self, session_id: str) -> Conversation:
        entry = self._by_id.pop(session_id)
        owners = self._owners[entry.traffic]
        owners[entry.owner] -= 1
        if not owners[entry.owner]:
            del owners[entry.owner]
        entry.conversation.close()
        return entry.conversation


@dataclass(slots=True, kw_only=True)
class _OpenSession:
    """A session with the id of its owner's key, the start of its last call and the statistics of its calls."""

    conversation: Conversation
    owner: str
    traffic: TrafficClass
    used_at: float
    min_version: int | None
    """The oldest weight version that may answer."""
    queue_time: QueueTime = field(default_factory=QueueTime)
