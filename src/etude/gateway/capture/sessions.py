"""The open sessions of a gateway by id, and the time that each one's calls waited for engines.

Owns how many there are and how long they live. Rollouts and products have sessions of their own number, so that
neither can leave the other none; and among products the one with the most gives way. The content of a session is its
:class:`~etude.gateway.capture.conversations.Conversation`'s, the right to enter it
:mod:`etude.gateway.http.auth`'s. Pure; time comes in as ``now``.
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
"""Names that a product may give its sessions: they stand in paths and logs."""
SESSION_ID_BYTES = 12
TOO_MANY_SESSIONS = "as many sessions as may be are open or in the middle of a call: close some, or try again later"
"""Message for a caller that asks for one more."""


@dataclass(slots=True, kw_only=True)
class QueueTime:
    """The time that the calls of a session waited for engines, by which a harness tells an engine's delay from its own.

    A call with a deadline of its caller's choice says nothing of engines and is not counted.
    """

    calls: int = 0
    """Calls in progress."""
    waited_s: float = 0.0
    """Seconds of all that are over: in the queue, without an engine, and under engines that failed."""
    unserved: bool = False
    """True if the last one that is over had no answer for lack of an engine."""

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call is in progress."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    def add(self, record: RequestRecord) -> None:
        """A call is over."""
        if record.own_deadline:
            return
        self.unserved = record.code in UNSERVED or (record.status == CLIENT_CLOSED and record.dispatched is None)
        self.waited_s += record.seconds if self.unserved else record.waited_s

    def facts(self) -> dict[str, Json]:
        """The JSON object of ``GET /v1/queue_time``."""
        return {"calls": self.calls, "waited_s": round(self.waited_s, 3), "unserved": self.unserved}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of the memory that a gateway's sessions use."""

    max_rollouts: int = 4096
    """Sessions open at a time for rollouts: each has one, so this is far above any sensible concurrency."""
    max_production: int = 4096
    """Sessions open at a time for products, which may never close theirs: one more ends an idle one."""
    max_turns: int = MAX_TURNS
    """Turns of one session."""
    max_tokens: int = MAX_TOKENS
    """Tokens that one session holds."""
    idle_s: float = 900.0
    """A session is forgotten this long after its last call began, or a killed rollouts process would leave its sessions
    here for ever. The longest gap in a rollout is one answer, for which an engine may take 10 minutes, and one command.
    """

    def of(self, traffic: TrafficClass) -> int:
        """Sessions that a class may have."""
        return self.max_production if traffic is TrafficClass.PRODUCTION else self.max_rollouts


DEFAULT_LIMITS = SessionLimits()
"""The limits where none are configured."""


def named_id(owner: str, name: str) -> str:
    """The session id for ``name``, a name given by the client with key id ``owner``."""
    return f"{owner}.{name}"


def name_in(session_id: str, owner: str) -> str:
    """The name that the client with key id ``owner`` gave the session; empty for one whose id was drawn."""
    prefix = named_id(owner, "")
    return session_id.removeprefix(prefix) if session_id.startswith(prefix) else ""


def new_session_id() -> str:
    """An id for a session without a name: unique, not secret."""
    return secrets.token_hex(SESSION_ID_BYTES)


class SessionStore:
    """All open sessions of a gateway."""

    def __init__(self, chat_format: ChatFormat, limits: SessionLimits = DEFAULT_LIMITS) -> None:
        self.chat_format = chat_format
        """The rule by which every session's messages become tokens."""
        self._limits = limits
        self._by_id: OrderedDict[str, _OpenSession] = OrderedDict()  # the longest idle first
        self._owners: dict[TrafficClass, Counter[str]] = {one: Counter() for one in TrafficClass}
        self._expired: list[str] = []  # not yet returned by expire()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(
        self, session_id: str, owner: str, traffic: TrafficClass, now: float, *, min_version: int | None = None
    ) -> Conversation | None:
        """Open a session; ``None`` if as many of its class as may be are open already.

        ``owner`` is the id of the key that asked for it. Raises ``ValueError`` if there is such a session.
        """
        self._expire(now)
        return self._keep(self.detached(session_id), owner, traffic, now, min_version)

    def fork(self, session_id: str, origin: str, now: float) -> Conversation | None:
        """Open a session that begins as the open one called ``origin``, of the same owner and class; ``None`` if as
        many of its class as may be are open already.

        Raises :class:`~etude.errors.SessionLost` if ``origin`` is not open, ``ValueError`` if ``session_id`` is.
        """
        conversation = self.find(origin, now)
        if conversation is None:
            raise SessionLost(f"no session {origin!r} is open here: it was closed, expired or never opened")
        entry = self._by_id[origin]
        return self._keep(conversation.fork(session_id), entry.owner, entry.traffic, now, entry.min_version)

    def detached(self, session_id: str) -> Conversation:
        """A conversation for one call, not among the open sessions."""
        turns = TurnStore(max_turns=self._limits.max_turns, max_tokens=self._limits.max_tokens)
        return Conversation(session_id, self.chat_format, turns)

    def find(self, session_id: str, now: float) -> Conversation | None:
        """An open session, counted as used now; ``None`` if there is none of this id."""
        self._expire(now)
        entry = self._by_id.get(session_id)
        if entry is None:
            return None
        entry.used_at = now
        self._by_id.move_to_end(session_id)
        return entry.conversation

    def find_or_open(self, name: str, owner: str, now: float) -> Conversation | None:
        """The session that ``owner``, a product, calls ``name``, opened if need be; ``None`` if no more can be.

        Its id has both in it, so the same name of another owner is another session. Raises ``ValueError`` for a name
        that cannot stand in a path.
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
        """The traffic class of an open session. Raises ``KeyError`` for any other."""
        return self._by_id[session_id].traffic

    def min_version(self, session_id: str) -> int | None:
        """The oldest weight version that may answer calls of a session; ``None`` for any, and if it is not open."""
        entry = self._by_id.get(session_id)
        return None if entry is None else entry.min_version

    def queue_time(self, session_id: str) -> QueueTime:
        """The queue time of a session; while a call is in progress it gives way to no other one. A new one, if the
        session is not open.
        """
        entry = self._by_id.get(session_id)
        return QueueTime() if entry is None else entry.queue_time

    def close(self, session_id: str, now: float) -> Conversation:
        """Forget a session and hand it back.

        Raises :class:`~etude.errors.SessionLost` if no such session is open.
        """
        self._expire(now)
        if session_id not in self._by_id:
            raise SessionLost(f"no session {session_id!r} is open here: it was closed, expired or never opened")
        return self._forget(session_id)

    def expire(self, now: float) -> tuple[str, ...]:
        """Forget the sessions that have been idle for too long; the ids of all that went so, or gave way, since the
        last call.

        To be called now and then by the owner of their keys, which die with them.
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
        """True if one more of a class may be open; of production, the longest idle one of the owner of most gives way.

        No rollout's does: its turns would be lost, while a product sends its history with each call.
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
    """A session, the id of its owner's key, when a call last began and how its calls fared."""

    conversation: Conversation
    owner: str
    traffic: TrafficClass
    used_at: float
    min_version: int | None
    """The oldest weight version that may answer."""
    queue_time: QueueTime = field(default_factory=QueueTime)
