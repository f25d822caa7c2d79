"""Sessions and what the model said in them, token for token: the pure core of the gateway.

Owns who may call (one key per session, kept only as a digest), the conversation tree of each session and every turn as
the engine sampled it. Knows neither HTTP nor engines; time comes in as ``now``, keys come in as arguments.

A node of the tree is a conversation whose token ids are known: the messages of an earlier request and the reply to it.

    system ─ user ──▶ reply A ─ tool output ──▶ reply B      a branch only ever appends token ids
                             └─ edited output ──▶ reply C    an edited history opens another one

A request continues from the deepest node that its messages begin with; only the messages after it are tokenised. Text
that the model wrote is never tokenised again, because it need not come back as the tokens that were sampled.

A request may have an id. One that comes again, same id and same messages, is the retry of a caller that never got the
answer: it is answered by the turn that is recorded, so no reply that nobody saw is kept as a turn and trained on.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from etude.errors import SessionLost
from etude.tokens.chat import ChatTemplate
from etude.types import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What bounds the memory of a gateway."""

    max_sessions: int = 4096
    """Sessions open at a time; a rollout has one, so this is far above any sensible concurrency."""
    max_turns: int = 512
    """Model calls of one session; far above what a harness allows its agent."""
    idle_s: float = 900.0
    """A session is forgotten this long after its last call began, or a killed rollouts process would leave its sessions
    here for ever. The longest gap in a rollout is one answer, for which an engine may take 10 minutes, and one command.
    """


DEFAULT_LIMITS = SessionLimits()
"""The limits of a gateway that is told nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation, as text."""

    role: str
    content: str


class Session:
    """One conversation tree and the turns that grew it."""

    def __init__(self, session_id: str, template: ChatTemplate, max_turns: int) -> None:
        self.session_id = session_id
        self.turns: list[Turn] = []
        """In the order in which they were sampled."""
        self.closed = False
        self._template = template
        self._max_turns = max_turns
        self._nodes: dict[bytes, Turn] = {}
        self._answers: dict[bytes, int] = {}  # by request; as many as there are turns at most

    def prompt_for(self, messages: Sequence[Message]) -> list[int]:
        """The token ids that a model continues to answer ``messages``.

        Raises ``ValueError`` on a role that the template does not know and when the session has no turn left.
        """
        if len(self.turns) >= self._max_turns:
            raise ValueError(f"the session has had its {self._max_turns} turns: open a new one")
        ids, unknown = self._deepest_node(messages)
        for message in unknown:
            ids += self._template.render_message(message.role, message.content)
        return ids + self._template.generation_prompt()

    def answered(self, request_id: str, messages: Sequence[Message]) -> int | None:
        """Which of ``turns`` answered this very request before; ``None`` if none did, or if the id is empty."""
        return self._answers.get(_request_digest(request_id, messages)) if request_id else None

    def record(
        self,
        messages: Sequence[Message],
        turn: Turn,
        text: str,
        request_id: str = "",
    ) -> int:
        """Keep a turn, and ``messages`` with its reply ``text`` as a node; says which of ``turns`` it became.

        A request that another attempt of its caller had answered meanwhile keeps that answer. Where a caller without
        ids was given the same reply twice, the newer tokens are continued: it asked again because it never saw the
        older reply. Raises :class:`~etude.errors.SessionLost` if the session was closed meanwhile.
        """
        if self.closed:
            raise SessionLost(f"session {self.session_id} was closed during the call; its turn was not recorded")
        known = self.answered(request_id, messages)
        if known is not None:
            return known
        self.turns.append(turn)
        *_, node = _prefix_digests([*messages, Message(role="assistant", content=text)])
        self._nodes[node] = turn
        index = len(self.turns) - 1
        if request_id:
            self._answers[_request_digest(request_id, messages)] = index
        return index

    def _deepest_node(self, messages: Sequence[Message]) -> tuple[list[int], Sequence[Message]]:
        """Token ids of the longest known beginning of ``messages``, and the messages that it leaves."""
        digests = list(_prefix_digests(messages))
        for length in range(len(messages), 0, -1):
            turn = self._nodes.get(digests[length - 1])
            if turn is not None:
                return self._ids_after(turn), messages[length:]
        return [], messages

    def _ids_after(self, turn: Turn) -> list[int]:
        ids: list[int] = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]
        if ids[-1] != self._template.end_id:  # the reply ran into its token limit, the message ends all the same
            ids.append(self._template.end_id)
        return ids


class Sessions:
    """All open sessions of a gateway, found by id or by key."""

    def __init__(self, template: ChatTemplate, limits: SessionLimits = DEFAULT_LIMITS) -> None:
        self.template = template
        """How every session's messages become tokens."""
        self._limits = limits
        self._by_id: OrderedDict[str, _Entry] = OrderedDict()  # the longest idle first
        self._by_key: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, session_id: str, api_key: str, now: float) -> Session | None:
        """Open a session that ``api_key`` gives access to; ``None`` if as many as may be are open already."""
        self.expire(now)
        if len(self) >= self._limits.max_sessions:
            return None
        session = Session(session_id, self.template, self._limits.max_turns)
        entry = _Entry(session=session, key_digest=_key_digest(api_key), used_at=now)
        self._by_id[session_id] = self._by_key[entry.key_digest] = entry
        return session

    def authenticate(self, api_key: str, now: float) -> Session | None:
        """The open session of a key, counted as used now; ``None`` for any other key."""
        self.expire(now)
        entry = self._by_key.get(_key_digest(api_key))
        if entry is None:
            return None
        entry.used_at = now
        self._by_id.move_to_end(entry.session.session_id)
        return entry.session

    def close(self, session_id: str, now: float) -> Session:
        """Forget a session and its key and hand it back.

        Raises :class:`~etude.errors.SessionLost` if no such session is open.
        """
        self.expire(now)
        if session_id not in self._by_id:
            raise SessionLost(f"no session {session_id!r} is open here: it was closed, expired or never opened")
        return self._forget(session_id)

    def expire(self, now: float) -> None:
        """Forget the sessions that have been idle for too long."""
        while self._by_id:
            session_id, entry = next(iter(self._by_id.items()))
            if now - entry.used_at < self._limits.idle_s:
                return
            self._forget(session_id)

    def _forget(self, session_id: str) -> Session:
        entry = self._by_id.pop(session_id)
        del self._by_key[entry.key_digest]
        entry.session.closed = True
        return entry.session


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A session, the digest of its key and when a call last began."""

    session: Session
    key_digest: str
    used_at: float


def _key_digest(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest()


def _request_digest(request_id: str, messages: Sequence[Message]) -> bytes:
    header = Message(role="request", content=ascii(request_id))  # it may hold bytes that are no text
    *_, digest = _prefix_digests([header, *messages])
    return digest


def _prefix_digests(messages: Sequence[Message]) -> Iterator[bytes]:
    """A digest of the first message, of the first two, … chained, so that all of them cost one pass."""
    digest = b""
    for message in messages:
        parts = [message.role.encode(), message.content.encode()]
        framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)  # lengths keep role and content apart
        digest = hashlib.sha256(digest + framed).digest()
        yield digest
