"""Keys and engines over HTTP: what an admin's key is for.

    GET    /keys              all but the secrets
    POST   /keys              scope, label, budgets, expires_s → key_id, api_key, which is shown once
    DELETE /keys/{id}         the key is dead
    GET    /engines           how each stands
    POST   /engines           name, url, region
    DELETE /engines/{name}    it gets no new calls

Owns these requests and answers. Keys are kept in the key file, where there is one; engines are not kept.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import final

from etude.clock import date_utc
from etude.errors import ConfigError
from etude.gateway.api.calls import Refusal
from etude.gateway.api.fields import Fields
from etude.gateway.http.keyfile import KeyFile
from etude.gateway.http.keys import Action, Key, Limits, Scope, digest_of, new_key_id, new_secret
from etude.gateway.http.principal import Identity
from etude.gateway.http.request_log import Visit
from etude.gateway.http.routes import Handler, Matched, read_fields, reply_json
from etude.gateway.http.server import Reply, Visitor
from etude.gateway.routing.engine_health import EngineEntry, EngineView, is_engine_url
from etude.gateway.routing.pool import EnginePool
from etude.protocols import Clock
from etude.types import Json

MAX_TEXT = 256
"""Characters of names, labels and URLs."""
MAX_BUDGET = 2**40
"""Of anything, per minute."""
MAX_AGE_S = 10 * 365 * 86_400
"""Longest life of a key that has an end."""


@final
class Administration:
    """Answers the requests above; keys that are made here are kept in ``key_file``, if there is one."""

    def __init__(self, identity: Identity, pool: EnginePool, clock: Clock, key_file: KeyFile | None = None) -> None:
        self._identity = identity
        self._keyring = identity.keyring
        self._pool = pool
        self._clock = clock
        self._key_file = key_file

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """Pattern → method → handler."""
        return {
            "/keys": {"GET": self._list_keys, "POST": self._add_key},
            "/keys/{}": {"DELETE": self._revoke_key},
            "/engines": {"GET": self._list_engines, "POST": self._add_engine},
            "/engines/{}": {"DELETE": self._remove_engine},
        }

    async def _list_keys(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        self._key(visitor, visit, Action.KEYS)
        return reply_json(visit, {"keys": [self._shown(key) for key in self._keyring]})

    async def _add_key(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        self._key(visitor, visit, Action.KEYS)
        fields = await read_fields(visitor, visit)
        key, secret = _read_key(fields, self._clock.now())
        try:
            if self._key_file is None:
                self._keyring.add(key, self._clock.now())
            else:  # the file first: while another process changes it, there is no new key at all
                await asyncio.to_thread(self._key_file.add, key)
                self._key_file.refresh(self._keyring, self._clock.now())
        except (ValueError, ConfigError) as error:
            raise Refusal(409, "conflict", str(error)) from error
        return reply_json(visit, {**self._shown(key), "api_key": secret})

    async def _revoke_key(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        self._key(visitor, visit, Action.KEYS)
        key = next((key for key in self._keyring if key.key_id == matched.parameter), None)
        if key is None:
            raise Refusal(404, "key_not_found", "there is no key of this id")
        if self._key_file is not None and key.session_id is None:
            with suppress(ValueError):  # it was taken out of the file meanwhile
                await asyncio.to_thread(self._key_file.revoke, key.key_id)  # first, or it would come back from there
        self._keyring.revoke(key.key_id)
        return reply_json(visit, self._shown(key))

    async def _list_engines(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        self._key(visitor, visit, Action.ENGINES)
        return reply_json(visit, {"engines": [_engine(view) for view in self._pool.list()]})

    async def _add_engine(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        self._key(visitor, visit, Action.ENGINES)
        fields = await read_fields(visitor, visit)
        fields.only(frozenset({"name", "url", "region"}))
        entry = EngineEntry(name=_name(fields, "name"), url=_url(fields), region=_optional_text(fields, "region"))
        try:
            self._pool.add(entry)
        except ValueError as error:
            raise Refusal(409, "conflict", str(error), param="name") from error
        return self._engine_named(entry.name, visit)

    async def _remove_engine(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        self._key(visitor, visit, Action.ENGINES)
        try:
            self._pool.remove(matched.parameter)
        except ValueError as error:
            raise Refusal(404, "engine_not_found", str(error)) from error
        return reply_json(visit, {"engines": [_engine(view) for view in self._pool.list()]})

    def _key(self, visitor: Visitor, visit: Visit, action: Action) -> None:
        visit.key_id = self._identity.key(visitor.headers, action, self._clock.now()).key_id

    def _engine_named(self, name: str, visit: Visit) -> Reply:
        return reply_json(visit, next(_engine(view) for view in self._pool.list() if view.entry.name == name))

    def _shown(self, key: Key) -> dict[str, Json]:
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
        }


def _read_key(fields: Fields, now: float) -> tuple[Key, str]:
    """A new key and its secret."""
    fields.only(frozenset({"scope", "label", "expires_s", "requests_per_minute", "tokens_per_minute"}))
    scope = fields.choice("scope", [Scope.PRODUCTION.value, Scope.ADMIN.value])
    if scope is None:
        raise fields.invalid("scope", "production or admin")
    lasts_s = fields.number("expires_s", low=0, high=MAX_AGE_S, above=True)
    secret = new_secret(Scope(scope))
    key = Key(
        key_id=new_key_id(),
        digest=digest_of(secret),
        scope=Scope(scope),
        limits=Limits(
            requests_per_minute=fields.integer("requests_per_minute", low=1, high=MAX_BUDGET),
            tokens_per_minute=fields.integer("tokens_per_minute", low=1, high=MAX_BUDGET),
        ),
        expires_at=None if lasts_s is None else now + lasts_s,
        created=date_utc(),
        label=_optional_text(fields, "label"),
    )
    return key, secret


def _name(fields: Fields, name: str) -> str:
    text = fields.text(name)
    if not 0 < len(text) <= MAX_TEXT or "/" in text or not text.isprintable():
        raise fields.invalid(name, f"1 to {MAX_TEXT} printable characters without a slash")
    return text


def _optional_text(fields: Fields, name: str) -> str:
    text = fields.text(name, "")
    if len(text) > MAX_TEXT:
        raise fields.invalid(name, f"at most {MAX_TEXT} characters")
    return text


def _url(fields: Fields) -> str:
    url = fields.text("url")
    if len(url) > MAX_TEXT or not is_engine_url(url):
        raise fields.invalid("url", f"http://HOST:PORT or https://HOST:PORT, at most {MAX_TEXT} characters")
    return url


def _engine(view: EngineView) -> dict[str, Json]:
    health = view.health
    return {
        "name": view.entry.name,
        "url": view.entry.url,
        "region": view.entry.region,
        "state": view.state.value,
        "reason": view.reason,
        "inflight": view.inflight,
        "version": None if health is None else health.version,
        "digest": None if health is None else health.digest,
        "running": None if health is None else health.running,
        "waiting": None if health is None else health.waiting,
    }
