"""The gateway's admin API over HTTP: sessions, keys, engines and state; all requests but model calls.

    POST   /sessions          {} → session_id, api_key, base_url, turns   admin, production
                              fork_of: the session that it begins as; its calls are to be made again, and are answered
                              from the record (:mod:`etude.gateway.capture.conversations`)
    DELETE /sessions/{id}     every turn, token for token; the key dies   admin, or the key that opened the session
    GET    /healthz           weights served, engines, calls, sessions    everyone
    GET    /openapi.json      the requests that this gateway understands  everyone
    GET    /metrics           Prometheus' text format                     admin, as all below
    GET    /keys              all but the secrets
    POST   /keys              scope, label, budgets, expires_s, consent → key_id, api_key, which is shown once
                              of scope feedback: product, the id of the production key whose sessions it may name
    DELETE /keys/{id}         the key is dead
    GET    /engines           the health of each
    POST   /engines           name, url, region, is_lent: it may be taken back at any moment
    DELETE /engines/{name}    it gets no new calls; those of a lent one continue in others at once

Owns these requests and responses. The rights of a key are in :mod:`etude.gateway.http.auth`, the encoding of turns in
:mod:`etude.ledger.turns`. Keys are stored in the key file, if there is one; engines are not stored.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import final

import orjson
from aiohttp import web

from etude.clock import date_utc
from etude.errors import ConfigError
from etude.gateway.api.calls import ApiError
from etude.gateway.api.fields import JsonObject, read_object
from etude.gateway.capture.sessions import TOO_MANY_SESSIONS, new_session_id
from etude.gateway.http.app import GatewayState, Route, RouteTable, read_body, respond
from etude.gateway.http.auth import (
    MAX_AGE_S,
    MAX_BUDGET,
    MAX_TEXT,
    Key,
    KeyLimits,
    Permission,
    Scope,
    digest_of,
    new_key_id,
    new_secret,
)
from etude.gateway.http.keyfile import KeyFile
from etude.gateway.http.openapi import document
from etude.gateway.request_log import Metrics, RequestRecord
from etude.gateway.routing.admission import TrafficClass
from etude.gateway.routing.router import EngineEntry, EngineState, EngineView, is_engine_url
from etude.gauges import CONTENT_TYPE
from etude.ledger.turns import encode_turns
from etude.types import Json

BINARY = "application/octet-stream"
FORK_OF, SESSION_MIN_VERSION = "fork_of", "min_version"
MAX_VERSION = 10**9 - 1
"""Highest weight version that a request or a header may name."""


@final
class AdminApi:
    """Handlers of the admin API; new keys are saved in ``key_file``, if there is one."""

    def __init__(self, state: GatewayState, key_file: KeyFile | None = None) -> None:
        self.metrics = Metrics(self._gauges)
        """The counters of the gateway."""
        self._auth = state.auth
        self._sessions = state.auth.sessions
        self._keyring = state.auth.keyring
        self._pool = state.pool
        self._admission = state.admission
        self._inflight = state.inflight
        self._clock = state.clock
        self._key_file = key_file
        self._live = state.live
        self._openapi = orjson.dumps(document(takes_feedback=state.live is not None))

    def routes(self) -> RouteTable:
        """Path → method → handler."""
        return {
            "/sessions": {"POST": self._open_session},
            "/sessions/{}": {"DELETE": self._close_session},
            "/healthz": {"GET": self._health},
            "/metrics": {"GET": self._show_metrics},
            "/openapi.json": {"GET": self._describe},
            "/keys": {"GET": self._list_keys, "POST": self._add_key},
            "/keys/{}": {"DELETE": self._revoke_key},
            "/engines": {"GET": self._list_engines, "POST": self._add_engine},
            "/engines/{}": {"DELETE": self._remove_engine},
        }

    async def _open_session(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        key = self._key(request, record, Permission.SESSIONS)
        fields = await _read_fields(request, record)
        fields.refuse_unknown({FORK_OF, SESSION_MIN_VERSION})
        min_version = fields.integer(SESSION_MIN_VERSION, low=0, high=MAX_VERSION)
        self._inflight.check_open()
        for expired in self._auth.expire(self._clock.now()):
            self._pool.forget(expired)
        self._auth.charge_request(key, self._clock.now())
        session_id, secret, now = new_session_id(), new_secret(Scope.ROLLOUT), self._clock.now()
        origin = fields.text(FORK_OF, "")
        if origin and min_version is not None:
            raise fields.invalid(SESSION_MIN_VERSION, "nothing: a fork has that of the session it forks off")
        if origin:
            conversation = self._sessions.fork(session_id, self._session_of(key, origin), now)
        else:
            traffic = TrafficClass.PRODUCTION if key.scope is Scope.PRODUCTION else TrafficClass.ROLLOUT
            conversation = self._sessions.open(session_id, key.key_id, traffic, now, min_version=min_version)
        if conversation is None:
            raise ApiError(429, "too_many_sessions", TOO_MANY_SESSIONS)
        rollout = Key(
            key_id=new_key_id(),
            digest=digest_of(secret),
            scope=Scope.ROLLOUT,
            session_id=session_id,
            opener=key.key_id,
            consent=key.consent,
            created=date_utc(),
        )
        self._keyring.add(rollout, now)
        record.session_id = session_id
        opened: dict[str, Json] = {"session_id": session_id, "api_key": secret, "base_url": f"/s/{session_id}/v1"}
        return _json(record, {**opened, "turns": len(conversation.turns)})

    async def _close_session(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        key = self._key(request, record, Permission.SESSIONS)
        session_id = self._session_of(key, route.parameter)
        conversation = self._sessions.close(session_id, self._clock.now())
        self._pool.forget(session_id)
        self._keyring.end_session(session_id)
        record.session_id = session_id
        return respond(record, encode_turns(conversation.turns), BINARY)

    def _session_of(self, key: Key, name: str) -> str:
        session_id = self._auth.session_of(key, name)
        if session_id is None:
            raise ApiError(404, "session_not_found", "no such session is open here, or it is another key's")
        return session_id

    async def _health(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        """503 without an engine, or while draining: the gateway is alive, but should get no traffic."""
        views = self._pool.list()
        served = [view.health for view in views if view.state is EngineState.HEALTHY and view.health is not None]
        oldest = min(served, key=lambda health: health.version, default=None)
        facts: dict[str, Json] = {
            "engine": None if oldest is None else {"version": oldest.version, "digest": oldest.digest},
            "engines": dict(Counter(view.state.value for view in views)),
            "draining": self._inflight.draining,
            "inflight": self._inflight.count,
            "sessions": len(self._sessions),
        }
        return _json(record, facts, 503 if oldest is None or self._inflight.draining else 200)

    async def _show_metrics(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        self._key(request, record, Permission.METRICS)
        return respond(record, self.metrics.page(), CONTENT_TYPE)

    async def _describe(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        return respond(record, self._openapi)

    async def _list_keys(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        self._key(request, record, Permission.KEYS)
        return _json(record, {"keys": [self._key_facts(key) for key in self._keyring]})

    async def _add_key(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        self._key(request, record, Permission.KEYS)
        fields = await _read_fields(request, record)
        key, secret = _read_key(fields, self._clock.now())
        if key.opener is not None and not self._is_product(key.opener):
            raise fields.invalid("product", "the id of a production key of this gateway")
        try:
            if self._key_file is None:
                self._keyring.add(key, self._clock.now())
            else:  # the file first: while another process changes it, no key is created
                await asyncio.to_thread(self._key_file.add, key)
                self._key_file.refresh(self._keyring, self._clock.now())
        except (ValueError, ConfigError) as error:
            raise ApiError(409, "conflict", str(error)) from error
        return _json(record, {**self._key_facts(key), "api_key": secret})

    def _is_product(self, key_id: str) -> bool:
        return any(key.key_id == key_id and key.scope is Scope.PRODUCTION for key in self._keyring)

    async def _revoke_key(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        self._key(request, record, Permission.KEYS)
        key = next((key for key in self._keyring if key.key_id == route.parameter), None)
        if key is None:
            raise ApiError(404, "key_not_found", "there is no key of this id")
        if self._key_file is not None and key.session_id is None:
            with suppress(ValueError):  # it was removed from the file meanwhile
                await asyncio.to_thread(self._key_file.revoke, key.key_id)  # first, or it would be loaded again
        self._keyring.revoke(key.key_id)
        return _json(record, self._key_facts(key))

    async def _list_engines(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        self._key(request, record, Permission.ENGINES)
        return _json(record, {"engines": [_engine_facts(view) for view in self._pool.list()]})

    async def _add_engine(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        self._key(request, record, Permission.ENGINES)
        fields = await _read_fields(request, record)
        fields.refuse_unknown(frozenset({"name", "url", "region", "is_lent"}))
        entry = EngineEntry(
            name=_name(fields, "name"),
            url=_url(fields),
            region=_optional_text(fields, "region"),
            is_lent=fields.flag("is_lent"),
        )
        try:
            self._pool.add(entry)
        except ValueError as error:
            raise ApiError(409, "conflict", str(error), param="name") from error
        return _json(record, next(_engine_facts(view) for view in self._pool.list() if view.entry.name == entry.name))

    async def _remove_engine(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        self._key(request, record, Permission.ENGINES)
        try:
            self._pool.remove(route.parameter)
        except ValueError as error:
            raise ApiError(404, "engine_not_found", str(error)) from error
        return _json(record, {"engines": [_engine_facts(view) for view in self._pool.list()]})

    def _key(self, request: web.BaseRequest, record: RequestRecord, action: Permission) -> Key:
        key = self._auth.key(request.headers, action, self._clock.now())
        record.key_id = key.key_id
        return key

    def _key_facts(self, key: Key) -> dict[str, Json]:
        left_s = None if key.expires_at is None else round(key.expires_at - self._clock.now(), 3)
        return {
            "key_id": key.key_id,
            "scope": key.scope.value,
            "label": key.label,
            "created": key.created,
            "expires_s": left_s,
            "session_id": key.session_id,
            "requests_per_minute": key.limits.requests_per_minute,
            "tokens_per_minute": key.limits.tokens_per_minute,
            "product": key.opener if key.scope is Scope.FEEDBACK else None,
            "consent": "train" if key.consent else "none",
        }

    def _gauges(self) -> Mapping[str, Mapping[str, float]]:
        states = Counter(view.state.value for view in self._pool.list())
        controller = self._admission.controller
        return {
            "etude_engines": {state.value: states[state.value] for state in EngineState},
            "etude_calls_inflight": {"": self._inflight.count},
            "etude_calls_waiting": {traffic.value: controller.waiting(traffic) for traffic in TrafficClass},
            "etude_admission_limit": {"": controller.limit},
            "etude_sessions": {"": len(self._sessions)},
            "etude_engine_losses": {"": self._pool.counters.losses},
            **({} if self._live is None else {"etude_live_sessions_unkept": {"": self._live.unkept}}),
        }


async def _read_fields(request: web.BaseRequest, record: RequestRecord) -> JsonObject:
    """The fields of a body, which may be empty. Raises :class:`~etude.gateway.api.calls.ApiError`."""
    return read_object(await read_body(request, record) or b"{}")


def _json(record: RequestRecord, facts: Mapping[str, Json], status: int = 200) -> web.Response:
    return respond(record, orjson.dumps(facts), status=status)


def _read_key(fields: JsonObject, now: float) -> tuple[Key, str]:
    """A new key and its secret."""
    fields.refuse_unknown(_KEY_FIELDS)
    scope = fields.choice("scope", [Scope.PRODUCTION.value, Scope.FEEDBACK.value, Scope.ADMIN.value])
    if scope is None:
        raise fields.invalid("scope", "production, feedback or admin")
    product = _optional_text(fields, "product")
    if bool(product) != (scope == Scope.FEEDBACK):
        raise fields.invalid("product", "the id of a production key, of a feedback key and of no other")
    consent = fields.choice("consent", ["train", "none"])
    if consent is not None and scope != Scope.PRODUCTION:
        raise fields.invalid("consent", "nothing: only a production key has consent to give")
    lasts_s = fields.number("expires_s", low=0, high=MAX_AGE_S, above=True)
    secret = new_secret(Scope(scope))
    key = Key(
        key_id=new_key_id(),
        digest=digest_of(secret),
        scope=Scope(scope),
        limits=KeyLimits(
            requests_per_minute=fields.integer("requests_per_minute", low=1, high=MAX_BUDGET),
            tokens_per_minute=fields.integer("tokens_per_minute", low=1, high=MAX_BUDGET),
        ),
        expires_at=None if lasts_s is None else now + lasts_s,
        created=date_utc(),
        label=_optional_text(fields, "label"),
        opener=product or None,
        consent=consent == "train",
    )
    return key, secret


_KEY_FIELDS = frozenset(
    {"scope", "label", "expires_s", "requests_per_minute", "tokens_per_minute", "product", "consent"}
)


def _name(fields: JsonObject, name: str) -> str:
    text = fields.text(name)
    if not 0 < len(text) <= MAX_TEXT or "/" in text or not text.isprintable():
        raise fields.invalid(name, f"1 to {MAX_TEXT} printable characters without a slash")
    return text


def _optional_text(fields: JsonObject, name: str) -> str:
    text = fields.text(name, "")
    if len(text) > MAX_TEXT:
        raise fields.invalid(name, f"at most {MAX_TEXT} characters")
    return text


def _url(fields: JsonObject) -> str:
    url = fields.text("url")
    if len(url) > MAX_TEXT or not is_engine_url(url):
        raise fields.invalid("url", f"http://HOST:PORT or https://HOST:PORT, at most {MAX_TEXT} characters")
    return url


def _engine_facts(view: EngineView) -> dict[str, Json]:
    health = view.health
    return {
        "name": view.entry.name,
        "url": view.entry.url,
        "region": view.entry.region,
        "is_lent": view.entry.is_lent,
        "state": view.state.value,
        "reason": view.reason,
        "inflight": view.inflight,
        "version": None if health is None else health.version,
        "digest": None if health is None else health.digest,
        "running": None if health is None else health.running,
        "waiting": None if health is None else health.waiting,
    }
