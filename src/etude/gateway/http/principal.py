"""Who calls, and in which session: three ways to say it.

    /s/<session id>/v1/…  and a key that may enter it         for harnesses that take a base URL and a key
    /s/<session key>/v1/… and nothing else                    for tools that take a base URL only
    a key that is bound to a session                          a rollout's: nothing more is needed
    a key, and X-Etude-Session: <name>                        a product's: a session of that name opens at its first use
    a key                                                     one call, of which nothing is kept

Owns the reading of headers and paths; what a key may do is :mod:`etude.gateway.http.keys`'.
Pure but for the ids it makes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from etude.gateway.api.calls import Refusal
from etude.gateway.capture.conversations import Conversation
from etude.gateway.capture.sessions import TOO_MANY_SESSIONS, Sessions, named_id
from etude.gateway.http.keys import OVER_BUDGET, Action, Key, Keyring, may, may_close, may_enter
from etude.gateway.http.request_ids import Serials
from etude.gateway.routing.admission import TrafficClass

SESSION_HEADER = "X-Etude-Session"
SECRET_PREFIX = "etude-"
"""Every secret begins so, and no session's id does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A caller that may sample, and where."""

    key: Key
    conversation: Conversation
    traffic: TrafficClass = TrafficClass.PRODUCTION
    """How urgent its calls are."""
    once: bool = False
    """Whether the conversation is for this call alone: nobody else will let go of it."""


@final
class Identity:
    """Finds callers' keys and sessions."""

    def __init__(self, keyring: Keyring, sessions: Sessions) -> None:
        self.keyring = keyring
        self.sessions = sessions
        self._serials = Serials()

    def key(self, headers: Mapping[str, str], action: Action, now: float) -> Key:
        """The key of a request, which may do ``action``. Raises :class:`Refusal`: 401 for none, 403 if it may not."""
        key = self.keyring.authenticate(secret_of(headers), now)
        if key is None:
            raise Refusal(401, "invalid_api_key", "no such key: send one as `Authorization: Bearer` or `x-api-key`")
        if not may(key, action):
            raise Refusal(403, "forbidden", f"a key of scope {key.scope.value!r} may not do this")
        return key

    def afford(self, key: Key, now: float) -> None:
        """Count a request on the account of ``key``. Raises :class:`Refusal`: 429 where its budget is used up."""
        wait_s = self.keyring.refused_for_s(key, now)
        if wait_s > 0:
            raise Refusal(429, OVER_BUDGET, "the budget of this key is used up for now", retry_after_s=wait_s)

    def guest(self, headers: Mapping[str, str], place: str | None, now: float) -> Guest:
        """Who samples where; ``place`` is what the path says. Raises :class:`Refusal`: 401, 403, 404."""
        if place is not None and place.startswith(SECRET_PREFIX):
            key = self.keyring.authenticate(place, now)
            if key is None or key.session_id is None:
                raise Refusal(401, "invalid_api_key", "the key in the path is not that of an open session")
            return self._in_own_session(key, now)
        key = self.key(headers, Action.SAMPLE, now)
        wanted = place if place is not None else headers.get(SESSION_HEADER)
        if key.session_id is not None:
            if wanted is not None and wanted != key.session_id:
                raise Refusal(403, "forbidden", "this key opens one session, and the request names another")
            return self._in_own_session(key, now)
        if wanted is None:
            alone = self.sessions.detached(f"once-{self._serials.draw()}")
            return Guest(key=key, conversation=alone, once=True)
        return Guest(key=key, conversation=self._of_owner(key, wanted, now))

    def session_of(self, key: Key, name: str) -> str | None:
        """The id of an open session that ``key`` may close, by its id or by what its owner calls it; else ``None``."""
        for session_id in (name, named_id(key.key_id, name)):
            owner = self.sessions.owner(session_id)
            if owner is not None and may_close(key, owner):
                return session_id
        return None

    def _in_own_session(self, key: Key, now: float) -> Guest:
        conversation = self.sessions.find(key.session_id or "", now)
        if conversation is None:
            raise Refusal(401, "invalid_api_key", "the session of this key is over, and so is the key")
        return Guest(key=key, conversation=conversation, traffic=self.sessions.traffic(conversation.session_id))

    def _of_owner(self, key: Key, name: str, now: float) -> Conversation:
        """A session that ``key`` opened, by its id, or the one that it calls ``name``: nobody else's can be meant."""
        owner = self.sessions.owner(name)
        if owner is not None and may_enter(key, name, owner):
            found = self.sessions.find(name, now)
        elif name.startswith(SECRET_PREFIX):
            raise Refusal(400, "invalid_request", f"a session's name does not begin with {SECRET_PREFIX!r}: keys do")
        else:
            try:
                found = self.sessions.find_or_open(name, key.key_id, now)
            except ValueError as error:
                raise Refusal(400, "invalid_request", str(error), param=SESSION_HEADER) from error
        if found is None:
            raise Refusal(429, "too_many_sessions", TOO_MANY_SESSIONS)
        return found


def secret_of(headers: Mapping[str, str]) -> str:
    """The key that a request carries, in OpenAI's way or in Anthropic's; empty for none."""
    authorization = headers.get("Authorization")
    if authorization is None:
        return headers.get("x-api-key", "")
    scheme, _, secret = authorization.partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""
