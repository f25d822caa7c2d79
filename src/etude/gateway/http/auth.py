"""Authentication: the principal of a request, its permissions, its budget, and its session.

    /s/<session id>/v1/…  and a key that may enter it         for harnesses that take a base URL and a key
    /s/<session key>/v1/… and nothing else                    for tools that take a base URL only
    a key that is bound to a session                          a rollout's: nothing more is needed
    a key, and X-Etude-Session: <name>                        a product's: a session of that name opens at its first use
    a key                                                     one call, of which nothing is kept

Owns the parsing of authentication headers and paths, the lookup of keys, the permissions of scopes, and two token
buckets for each key. Pure except for random ids: ``now`` is an argument, on one clock for all calls. Keys on disk are
in :mod:`etude.gateway.http.keyfile`.

Secrets are not stored, only their SHA-256. A slow hash or a salt protects secrets that can be guessed; these have 256
random bits, so no secret can be found from its digest, and a stolen file of digests opens nothing. For the same reason
a plain lookup by digest is safe: its timing may show how much of a guess's digest matches a stored one, but that does
not help to find a secret.
"""

import hashlib
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import final

from etude.gateway.api.calls import OVER_BUDGET, ApiError, new_id
from etude.gateway.capture.conversations import Conversation
from etude.gateway.capture.sessions import TOO_MANY_SESSIONS, SessionStore, named_id
from etude.gateway.routing.admission import TrafficClass
from etude.types import SHA256_HEX

SECRET_BYTES = 32
"""Random bytes of a secret: 43 characters in base 64."""
KEY_ID_BYTES = 6
"""Random bytes of a key's id: unique among thousands, not secret."""
SECRET_PREFIX = "etude-"
"""Prefix of every secret, and of no session id."""
SESSION_HEADER = "X-Etude-Session"
MINUTE_S = 60.0
"""Period for budgets; at most this much budget can accumulate."""
MAX_KEYS = 65_536
"""Keys in a ring; the limit on sessions is far below this."""
MAX_TEXT = 256
"""Longest name, label or URL, in characters."""
MAX_BUDGET = 2**40
"""Largest budget, in requests or tokens per minute."""
MAX_AGE_S = 10 * 365 * 86_400
"""Longest life of a key that expires."""


class Scope(StrEnum):
    """The purpose of a key, which determines its permissions."""

    PRODUCTION = "production"
    """Production traffic; it has its own sessions."""
    ROLLOUT = "rollout"
    """One rollout: it enters only its own session, and expires with it or with the key that opened the session."""
    FEEDBACK = "feedback"
    """Only reports signals about the sessions of one production key, so a browser or an editor may hold it. It expires
    with that key, and has its own budgets.
    """
    ADMIN = "admin"
    """People and processes that run the gateway. It cannot sample: samples need an owner."""


class Permission(StrEnum):
    """An action that a key may be allowed to perform."""

    SAMPLE = "sample"
    """Call the model, in the key's own session."""
    SESSIONS = "sessions"
    """Open sessions, and close the key's own; an admin closes any."""
    KEYS = "keys"
    """List, make and revoke keys."""
    ENGINES = "engines"
    """List, add and remove engines."""
    METRICS = "metrics"
    """Read the metrics."""
    REPORT = "report"
    """Report signals about the product's sessions."""
    STATUS = "status"
    """List the reported signals."""


ALLOWED: Mapping[Scope, frozenset[Permission]] = MappingProxyType(
    {
        Scope.PRODUCTION: frozenset({Permission.SAMPLE, Permission.SESSIONS, Permission.REPORT, Permission.STATUS}),
        Scope.FEEDBACK: frozenset({Permission.REPORT}),
        Scope.ROLLOUT: frozenset({Permission.SAMPLE}),
        Scope.ADMIN: frozenset({Permission.SESSIONS, Permission.KEYS, Permission.ENGINES, Permission.METRICS}),
    }
)
"""Scope → permitted actions; all others are denied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """The limits of a key; ``None`` for no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and completions together."""

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute"):
            bound = getattr(self, name)
            if bound is not None and bound < 1:
                raise ValueError(f"{name}={bound}: expected at least 1, or none for no bound")


NO_LIMITS = KeyLimits()
"""A budget without limits: only admission control limits its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key's record, without its secret."""

    key_id: str
    """Identifies it in logs and lists; not secret."""
    digest: str
    """SHA-256 of the secret, in hex."""
    scope: Scope
    session_id: str | None = None
    """The one session of a rollout's key."""
    opener: str | None = None
    """Id of the key that opened that session: it pays for the calls and must still be valid. For a feedback key: the
    production key that it was made for.
    """
    consent: bool = False
    """True if the product's users consent to training unless a call says otherwise."""
    limits: KeyLimits = NO_LIMITS
    expires_at: float | None = None
    """Expiry time on the ring's clock; ``None``: never."""
    created: str = ""
    """UTC, ISO 8601, for display."""
    label: str = ""
    """Its purpose, for display."""

    def __post_init__(self) -> None:
        if len(self.digest) != SHA256_HEX or not set(self.digest) <= set("0123456789abcdef"):
            raise ValueError(f"digest {self.digest!r} of key {self.key_id!r} is not a SHA-256 in hex")
        if (self.scope is Scope.ROLLOUT) != (self.session_id is not None):
            raise ValueError(f"key {self.key_id!r} has scope {self.scope} and session {self.session_id!r}")
        if self.scope is Scope.FEEDBACK and self.opener is None:
            raise ValueError(f"key {self.key_id!r} reports signals, and has no product whose sessions they are about")
        if self.opener is not None and self.session_id is None and self.scope is not Scope.FEEDBACK:
            raise ValueError(f"key {self.key_id!r} has an opener, {self.opener!r}, and no session that it opened")

    @property
    def account(self) -> str:
        """Id of the key whose budget pays for calls."""
        return self.key_id if self.opener is None or self.scope is Scope.FEEDBACK else self.opener

    @property
    def product(self) -> str:
        """Id of the production key whose sessions it may name."""
        return self.key_id if self.opener is None else self.opener


def new_secret(scope: Scope) -> str:
    """A random API key: ``etude-<scope>-`` and 43 characters, a form that scanners for leaked keys recognise."""
    return f"etude-{scope}-{secrets.token_urlsafe(SECRET_BYTES)}"


def new_key_id() -> str:
    """A random id for a key."""
    return secrets.token_hex(KEY_ID_BYTES)


def digest_of(secret: str) -> str:
    """SHA-256 of a secret, in hex."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def may(key: Key, action: Permission) -> bool:
    """True if the scope of ``key`` allows ``action``."""
    return action in ALLOWED[key.scope]


def may_enter(key: Key, session_id: str, owner: str) -> bool:
    """True if ``key`` may sample in an open session: it is the session's own key, or that of the owner."""
    if not may(key, Permission.SAMPLE):
        return False
    return session_id == key.session_id if key.scope is Scope.ROLLOUT else owner == key.key_id


def may_close(key: Key, owner: str) -> bool:
    """True if ``key`` may close a session of ``owner``."""
    return may(key, Permission.SESSIONS) and (key.scope is Scope.ADMIN or owner == key.key_id)


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """A token bucket: gains ``per_minute`` tokens a minute, up to ``per_minute``; may be overdrawn."""

    per_minute: int
    level: float
    at: float

    def filled(self, now: float) -> float:
        """Its current level."""
        self.level = min(self.per_minute, self.level + max(0.0, now - self.at) * self.per_minute / MINUTE_S)
        self.at = max(self.at, now)
        return self.level

    def wait_s(self, needed: float, now: float) -> float:
        """Seconds until it holds ``needed`` tokens; 0 if it does already."""
        return max(0.0, needed - self.filled(now)) * MINUTE_S / self.per_minute


@dataclass(slots=True, kw_only=True)
class _KeyBudget:
    """A key and its remaining budget; ``None`` for no limit."""

    key: Key
    requests: _Bucket | None
    tokens: _Bucket | None


@dataclass(slots=True)
class Keyring:
    """The keys of a gateway, looked up by secret."""

    _by_digest: dict[str, _KeyBudget] = field(default_factory=dict)
    _by_id: dict[str, _KeyBudget] = field(default_factory=dict)
    _by_session: dict[str, _KeyBudget] = field(default_factory=dict)
    _filed: frozenset[str] = frozenset()  # ids of the keys added by replace()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Key]:
        return iter([entry.key for entry in self._by_id.values()])

    def add(self, key: Key, now: float) -> None:
        """Add a key, with full budgets.

        Raises ``ValueError`` if its id, secret or session is already present, or if the ring is full.
        """
        if key.key_id in self._by_id or key.digest in self._by_digest or key.session_id in self._by_session:
            raise ValueError(f"key {key.key_id!r}: there is one with this id, secret or session")
        if len(self) >= MAX_KEYS:
            raise ValueError(f"there are {len(self)} keys: revoke some first")
        entry = _KeyBudget(
            key=key,
            requests=_bucket(key.limits.requests_per_minute, now),
            tokens=_bucket(key.limits.tokens_per_minute, now),
        )
        self._by_id[key.key_id] = self._by_digest[key.digest] = entry
        if key.session_id is not None:
            self._by_session[key.session_id] = entry

    def revoke(self, key_id: str) -> Key | None:
        """Remove a key; return ``None`` for an unknown id."""
        entry = self._by_id.pop(key_id, None)
        if entry is None:
            return None
        del self._by_digest[entry.key.digest]
        if entry.key.session_id is not None:
            del self._by_session[entry.key.session_id]
        return entry.key

    def end_session(self, session_id: str) -> Key | None:
        """Revoke the key of a session that ended; ``None`` if it had none."""
        entry = self._by_session.get(session_id)
        return None if entry is None else self.revoke(entry.key.key_id)

    def replace(self, keys: Iterable[Key], now: float) -> None:
        """Replace the keys from the key file by ``keys``.

        A key that stays keeps its remaining budget. A key that was added directly and then written to the file counts
        as one of them. Raises ``ValueError``, without changing anything, if one has the id or the secret of another
        key.
        """
        filed = {key.key_id: key for key in keys}
        if len(self) - len(self._filed & self._by_id.keys()) + len(filed) > MAX_KEYS:
            raise ValueError(f"there would be more than {MAX_KEYS} keys: revoke some first")
        for key in filed.values():
            for entry in (self._by_id.get(key.key_id), self._by_digest.get(key.digest)):
                if entry is not None and entry.key.key_id not in self._filed and not _same(entry.key, key):
                    raise ValueError(f"key {key.key_id!r} has the id or the secret of {entry.key.key_id!r}")
        for key_id in (self._filed | filed.keys()) & self._by_id.keys():
            if self._by_id[key_id].key != filed.get(key_id):
                self.revoke(key_id)
        for key_id in filed.keys() - self._by_id.keys():
            self.add(filed[key_id], now)
        self._filed = frozenset(filed)

    def authenticate(self, secret: str, now: float) -> Key | None:
        """The key with this secret, if it and the key that opened its session are valid; else ``None``."""
        entry = self._by_digest.get(digest_of(secret))
        if entry is None:
            return None
        # A rollout's key has no expiry of its own and depends on its account's key; a feedback key also depends on its
        # product's key.
        for key_id in (entry.key.account, entry.key.product):
            account = self._by_id.get(key_id)
            if account is None or (account.key.expires_at is not None and now >= account.key.expires_at):
                return None
        return entry.key

    def charge_request(self, key: Key, now: float, requests: int = 1) -> float:
        """Count a call as one or more requests and return 0; if the budget is used up, count nothing and return the
        seconds to wait.

        A call is admitted while the key has any tokens left, because its usage is not known in advance. An overdraft is
        deducted from the later budget.
        """
        entry = self._account(key)
        if entry is None:
            return 0.0  # it was revoked while the call was being read
        delays_s = [0.0 if bucket is None else bucket.wait_s(1.0, now) for bucket in (entry.requests, entry.tokens)]
        if not any(delays_s) and entry.requests is not None:
            entry.requests.level -= requests
        return max(delays_s)

    def spend(self, key: Key, tokens: int, now: float) -> None:
        """Deduct the tokens that a call of ``key`` used."""
        entry = self._account(key)
        if entry is not None and entry.tokens is not None:
            entry.tokens.filled(now)
            entry.tokens.level -= tokens

    def _account(self, key: Key) -> _KeyBudget | None:
        """The key that pays for a key's calls, with its budget; ``None`` if it no longer exists."""
        return self._by_id.get(key.account)


def retry_after(seconds: float) -> int:
    """Whole seconds for a ``Retry-After`` header: not less than ``seconds``, and at least 1."""
    return max(1, math.ceil(seconds))


def _bucket(per_minute: int | None, now: float) -> _Bucket | None:
    return None if per_minute is None else _Bucket(per_minute=per_minute, level=per_minute, at=now)


def _same(one: Key, other: Key) -> bool:
    """True if they are the same key, even if a file stores some fields less precisely."""
    return (one.key_id, one.digest, one.session_id) == (other.key_id, other.digest, other.session_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller that may sample, and its conversation."""

    key: Key
    conversation: Conversation
    traffic: TrafficClass = TrafficClass.PRODUCTION
    """The priority class of its calls."""
    once: bool = False
    """True if the conversation exists only for this call and is closed with it."""


@final
class Authenticator:
    """Finds the key and the session of a request."""

    def __init__(self, keyring: Keyring, sessions: SessionStore) -> None:
        self.keyring = keyring
        self.sessions = sessions

    def key(self, headers: Mapping[str, str], action: Permission, now: float) -> Key:
        """The key of a request, which may do ``action``. Raises :class:`ApiError`: 401 without a key, 403 without
        permission.
        """
        key = self.keyring.authenticate(api_key_of(headers), now)
        if key is None:
            raise ApiError(401, "invalid_api_key", "no such key: send one as `Authorization: Bearer` or `x-api-key`")
        if not may(key, action):
            raise ApiError(403, "forbidden", f"a key of scope {key.scope.value!r} may not do this")
        return key

    def charge_request(self, key: Key, now: float, requests: int = 1) -> None:
        """Charge requests to the account of ``key``. Raises :class:`ApiError`: 429 if its budget is used up."""
        wait_s = self.keyring.charge_request(key, now, requests)
        if wait_s > 0:
            raise ApiError(429, OVER_BUDGET, "the budget of this key is used up for now", retry_after_s=wait_s)

    def principal(self, headers: Mapping[str, str], path_session: str | None, now: float) -> Principal:
        """The principal of a request that samples; ``path_session`` is the segment after ``/s/`` in its path.

        Raises :class:`ApiError`: 401, 403, 404, 429.
        """
        if path_session is not None and path_session.startswith(SECRET_PREFIX):
            key = self.keyring.authenticate(path_session, now)
            if key is None or key.session_id is None:
                raise ApiError(401, "invalid_api_key", "the key in the path is not that of an open session")
            return self._in_own_session(key, now)
        key = self.key(headers, Permission.SAMPLE, now)
        name = path_session if path_session is not None else headers.get(SESSION_HEADER)
        if key.session_id is not None:
            if name is not None and name != key.session_id:
                raise ApiError(403, "forbidden", "this key opens one session, and the request names another")
            return self._in_own_session(key, now)
        if name is None:
            alone = self.sessions.detached(f"once-{new_id()}")
            return Principal(key=key, conversation=alone, once=True)
        return Principal(key=key, conversation=self._of_owner(key, name, now))

    def expire(self, now: float) -> tuple[str, ...]:
        """Drop idle sessions and their keys; return their ids. To be called regularly."""
        expired = self.sessions.expire(now)
        for session_id in expired:
            self.keyring.end_session(session_id)
        return expired

    def session_of(self, key: Key, name: str) -> str | None:
        """The id of an open session that ``key`` may close, by its id or its owner's name for it; else ``None``."""
        for session_id in (name, named_id(key.key_id, name)):
            owner = self.sessions.owner(session_id)
            if owner is not None and may_close(key, owner):
                return session_id
        return None

    def _in_own_session(self, key: Key, now: float) -> Principal:
        conversation = self.sessions.find(key.session_id or "", now)
        if conversation is None:
            raise ApiError(401, "invalid_api_key", "the session of this key is over, and so is the key")
        return Principal(key=key, conversation=conversation, traffic=self.sessions.traffic(conversation.session_id))

    def _of_owner(self, key: Key, name: str, now: float) -> Conversation:
        """A session that ``key`` opened, by id or by the name that ``key`` gave it; never another key's."""
        owner = self.sessions.owner(name)
        if owner is not None and may_enter(key, name, owner):
            conversation = self.sessions.find(name, now)
        elif name.startswith(SECRET_PREFIX):
            raise ApiError(400, "invalid_request", f"a session's name does not begin with {SECRET_PREFIX!r}: keys do")
        else:
            try:
                conversation = self.sessions.find_or_open(name, key.key_id, now)
            except ValueError as error:
                raise ApiError(400, "invalid_request", str(error), param=SESSION_HEADER) from error
        if conversation is None:
            raise ApiError(429, "too_many_sessions", TOO_MANY_SESSIONS)
        return conversation


def api_key_of(headers: Mapping[str, str]) -> str:
    """The API key in a request's headers, OpenAI's or Anthropic's; empty for none."""
    authorization = headers.get("Authorization")
    if authorization is None:
        return headers.get("x-api-key", "")
    scheme, _, secret = authorization.partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""
