"""Sessions, and how a gateway is doing, over HTTP.

    POST   /sessions         {} → session_id, api_key, base_url, turns    admin, production
                             fork_of: the session that it begins as; its calls are to be made again, and are answered
                             as they were (:mod:`etude.gateway.capture.conversations`)
    DELETE /sessions/{id}    every turn, token for token; the key dies    admin, or whose session it is
    GET    /healthz          weights served, engines, calls, sessions     anybody
    GET    /metrics          Prometheus' text format                      admin
    GET    /openapi.json     what this gateway understands                anybody

Owns these requests and answers. Who may ask is :mod:`etude.gateway.http.keys`' to say, how turns are spelt
:mod:`etude.ledger.turns`'.
"""

import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import orjson

from etude.clock import date_utc
from etude.gateway.api.calls import Refusal
from etude.gateway.capture.sessions import TOO_MANY_SESSIONS
from etude.gateway.http.keys import Action, Key, Scope, digest_of, new_key_id, new_secret
from etude.gateway.http.metrics import CONTENT_TYPE, Metrics
from etude.gateway.http.openapi import document
from etude.gateway.http.principal import Identity
from etude.gateway.http.request_log import Visit
from etude.gateway.http.routes import Handler, Matched, read_fields, reply_bytes, reply_json
from etude.gateway.http.server import Reply, Visitor
from etude.gateway.routing.admission import TrafficClass
from etude.gateway.routing.admission_queue import Line
from etude.gateway.routing.engine_health import EngineState
from etude.gateway.routing.load import Load
from etude.gateway.routing.pool import EnginePool
from etude.ledger.turns import encode_turns
from etude.protocols import Clock
from etude.types import Json

SESSION_ID_BYTES = 12
"""Randomness of a session id: unique, not secret."""
BINARY = "application/octet-stream"
FORK_OF = "fork_of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facilities:
    """What requests are about."""

    identity: Identity
    """Keys and sessions."""
    pool: EnginePool
    line: Line
    load: Load
    clock: Clock


@final
class Control:
    """Answers the requests above."""

    def __init__(self, facilities: Facilities) -> None:
        self.metrics = Metrics(self._gauges)
        """What is counted."""
        self._load = facilities.load
        self._identity = facilities.identity
        self._sessions = facilities.identity.sessions
        self._keyring = facilities.identity.keyring
        self._pool = facilities.pool
        self._line = facilities.line
        self._clock = facilities.clock
        self._openapi = orjson.dumps(document())

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """Pattern → method → handler."""
        return {
            "/sessions": {"POST": self._open_session},
            "/sessions/{}": {"DELETE": self._close_session},
            "/healthz": {"GET": self._health},
            "/metrics": {"GET": self._show_metrics},
            "/openapi.json": {"GET": self._describe},
        }

    def expire(self) -> None:
        """Let idle sessions go, and their keys with them; to be called now and then."""
        for session_id in self._sessions.expire(self._clock.now()):
            self._keyring.end_session(session_id)

    async def _open_session(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        key = self._key(visitor, visit, Action.SESSIONS)
        fields = await read_fields(visitor, visit)
        fields.only({FORK_OF})
        if self._load.draining:
            raise Refusal(503, "draining", "this gateway is stopping: ask another one, or this one again in a while")
        self.expire()
        self._identity.afford(key, self._clock.now())
        session_id, secret, now = secrets.token_hex(SESSION_ID_BYTES), new_secret(Scope.ROLLOUT), self._clock.now()
        origin = fields.text(FORK_OF, "")
        if origin:
            conversation = self._sessions.fork(session_id, self._session_of(key, origin), now)
        else:
            traffic = TrafficClass.PRODUCTION if key.scope is Scope.PRODUCTION else TrafficClass.ROLLOUT
            conversation = self._sessions.open(session_id, key.key_id, traffic, now)
        if conversation is None:
            raise Refusal(429, "too_many_sessions", TOO_MANY_SESSIONS)
        rollout = Key(
            key_id=new_key_id(),
            digest=digest_of(secret),
            scope=Scope.ROLLOUT,
            session_id=session_id,
            opener=key.key_id,
            created=date_utc(),
        )
        self._keyring.add(rollout, now)
        visit.session_id = session_id
        opened: dict[str, Json] = {"session_id": session_id, "api_key": secret, "base_url": f"/s/{session_id}/v1"}
        return reply_json(visit, {**opened, "turns": len(conversation.turns)})

    async def _close_session(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        key = self._key(visitor, visit, Action.SESSIONS)
        session_id = self._session_of(key, matched.parameter)
        conversation = self._sessions.close(session_id, self._clock.now())
        self._keyring.end_session(session_id)
        visit.session_id = session_id
        return reply_bytes(visit, encode_turns(conversation.turns), BINARY)

    def _session_of(self, key: Key, name: str) -> str:
        session_id = self._identity.session_of(key, name)
        if session_id is None:
            raise Refusal(404, "session_not_found", "no such session is open here, or it is another key's")
        return session_id

    async def _health(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        """503 without an engine, or while draining: the gateway lives, but nothing should be routed to it."""
        views = self._pool.list()
        served = [view.health for view in views if view.state is EngineState.HEALTHY and view.health is not None]
        oldest = min(served, key=lambda health: health.version, default=None)
        facts: dict[str, Json] = {
            "engine": None if oldest is None else {"version": oldest.version, "digest": oldest.digest},
            "engines": dict(Counter(view.state.value for view in views)),
            "draining": self._load.draining,
            "inflight": self._load.inflight,
            "sessions": len(self._sessions),
        }
        return reply_json(visit, facts, 503 if oldest is None or self._load.draining else 200)

    async def _show_metrics(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        self._key(visitor, visit, Action.METRICS)
        return reply_bytes(visit, self.metrics.page(), CONTENT_TYPE)

    async def _describe(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        return reply_bytes(visit, self._openapi)

    def _key(self, visitor: Visitor, visit: Visit, action: Action) -> Key:
        key = self._identity.key(visitor.headers, action, self._clock.now())
        visit.key_id = key.key_id
        return key

    def _gauges(self) -> Mapping[str, Mapping[str, float]]:
        states = Counter(view.state.value for view in self._pool.list())
        admission = self._line.admission
        return {
            "etude_engines": {state.value: states[state.value] for state in EngineState},
            "etude_calls_inflight": {"": self._load.inflight},
            "etude_calls_waiting": {traffic.value: admission.waiting(traffic) for traffic in TrafficClass},
            "etude_places": {"": admission.limit},
            "etude_sessions": {"": len(self._sessions)},
            "etude_engine_losses": {"": self._pool.counters.losses},
        }
