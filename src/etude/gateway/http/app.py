"""The gateway's door: what happens to a request from its first byte to its line in the log.

    request ─▶ route ─▶ key, session ─▶ budget ─▶ body ─▶ dialect.parse ─▶ service ─▶ answer or events
                                                                    every trouble ─▶ dialect.refuse

    POST   /v1/chat/completions  /v1/completions  /v1/responses        OpenAI's
    POST   /v1/messages  /v1/messages/count_tokens                     Anthropic's
    GET    /v1/models  /v1/models/{name}                               both
    GET    /v1/waits                                                   ours: how a session's calls fared with engines
    …      /s/{session}/v1/…                                           each of them, in a session
    and those of :mod:`etude.gateway.http.admin_api`

Owns the order of these steps, headers, deadlines and what is counted. Consumes requests; produces answers and turns;
waits for places and engines, at most until the call's deadline; woken by them. When it drains it takes no new calls;
on shutdown calls are cancelled and leave no turn, and the sessions are gone: their rollouts fail as infrastructure and
are tried again. What people wrote never reaches a log.

A caller that hangs up before the turn is recorded frees its place here and in the engine. After that the turn stays,
whether or not the reply is received. A caller that sends a random ``X-Request-Id`` or ``Idempotency-Key``, the same
with each retry of a call, is given the recorded reply again; so is an SDK that says how often it has tried.
"""

import asyncio
import re
from collections.abc import Mapping
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import final

from etude.config.inference import GatewayConfig
from etude.errors import EngineUnavailable
from etude.gateway.api import chat, completions, messages, models, responses
from etude.gateway.api.calls import MODEL, Answer, Asked, Call, Dialect, Refusal
from etude.gateway.api.errors import GONE, RETRY_AFTER_S, RETRYABLE, refusal_of
from etude.gateway.api.turn_kind import kind_of
from etude.gateway.capture.generation_request import Caller
from etude.gateway.http.admin_api import Control, Facilities
from etude.gateway.http.key_api import Administration
from etude.gateway.http.keyfile import KeyFile
from etude.gateway.http.keys import retry_after
from etude.gateway.http.principal import Guest
from etude.gateway.http.request_ids import Serials
from etude.gateway.http.request_log import AccessLog, Visit
from etude.gateway.http.routes import Matched, Routes, chosen, reply_bytes, reply_json
from etude.gateway.http.server import Headers, Reply, Visitor
from etude.gateway.service import Service

DIALECTS: tuple[Dialect, ...] = (chat.DIALECT, completions.DIALECT, responses.DIALECT, messages.DIALECT)
"""All there are."""
BY_PATH: Mapping[str, Dialect] = MappingProxyType({dialect.path: dialect for dialect in DIALECTS})
ANTHROPIC_VERSION = "anthropic-version"
"""Header that Anthropic's clients always send, by which they are known on paths that both APIs have."""
REQUEST_IDS = ("X-Request-Id", "Idempotency-Key")
"""Headers by which a retry is known, within one session."""
RETRY_COUNT = "x-stainless-retry-count"
"""Header by which both SDKs say how often they have tried this call before."""
MIN_VERSION = "X-Etude-Min-Version"
"""Header with the oldest weight version that may answer."""
DEADLINE = "X-Etude-Deadline-S"
"""Header with a shorter deadline than the gateway's."""
VERSION = "X-Etude-Version"
"""Response header with the weight versions that answered; of a stream, those of its first tokens."""
PROBES = frozenset({"GET /healthz", "GET /metrics"})
"""Routes that leave no line in the access log: they are asked many times a second, and by machines."""
FAREWELL_S = 1.0
"""How long the last event of a stream that failed may take to leave."""
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
WHOLE = re.compile(r"[0-9]{1,9}")


@final
class Gateway:
    """Answers requests; :func:`etude.gateway.http.server.door` carries them here.

    ``key_file`` is where keys that are made over HTTP are kept; ``None`` keeps them in memory.
    """

    def __init__(
        self,
        service: Service,
        facilities: Facilities,
        config: GatewayConfig,
        *,
        key_file: KeyFile | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        self._service = service
        self._identity = facilities.identity
        self._load = facilities.load
        self._clock = facilities.clock
        self._deadline_s = config.deadline_s
        self._summary_mark = config.summary_mark
        self._access_log = access_log
        self._serials = Serials()
        control = Control(facilities)
        administration = Administration(facilities.identity, facilities.pool, facilities.clock, key_file)
        self._metrics = control.metrics
        self.expire = control.expire
        """Lets idle sessions go; to be called now and then."""
        models = {"/v1/models": {"GET": self._models}, "/v1/models/{}": {"GET": self._model}}
        waits = {"/v1/waits": {"GET": self._waits}}
        calls = {path: {"POST": self._call} for path in BY_PATH} | {messages.COUNT_PATH: {"POST": self._count}}
        self._routes = Routes({**control.table(), **administration.table()}, {**calls, **models, **waits})

    async def handle(self, visitor: Visitor) -> Reply | None:
        """Answer one request; ``None`` says that it was streamed. Raises nothing but being cancelled."""
        visit = Visit(began=self._clock.now(), request_id=f"req_{self._serials.draw()}")
        found = self._routes.match(visitor.path)
        visit.route = f"{visitor.method} {found.pattern}" if found else "unknown"
        dialect = _dialect_of(visitor, found)
        try:
            matched, handler = chosen(found, visitor.method)
            reply = await handler(visitor, matched, visit)
        except Exception as error:  # noqa: BLE001 - the last resort of a server: the caller gets an answer, we get a trace
            reply = _refused(refusal_of(error, visit.route), dialect, visit)
        except BaseException:
            visit.status = GONE
            raise
        finally:
            visit.ended = self._clock.now()
            self._metrics.count(visit)
            if visit.dialect:
                self._identity.sessions.waits(visit.session_id).add(visit)
            if self._access_log is not None and visit.route not in PROBES:
                self._access_log.add(visit)
        return reply

    async def drain(self, seconds: float) -> None:
        """Take no more calls and wait until those in flight are over, at most ``seconds``; being cancelled ends it."""
        await self._load.drain(seconds)

    async def _call(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply | None:
        """One model call in the dialect of its path."""
        dialect = BY_PATH[_bare(matched)]
        visit.dialect = dialect.path
        guest = self._admit(visitor, matched, visit)
        body = await visitor.read()
        visit.bytes_in = len(body)
        asked = dialect.parse(body)
        caller = self._caller(guest, visitor.headers, asked.call)
        visit.hurried = DEADLINE in visitor.headers
        with self._load.call(), self._identity.sessions.waits(visit.session_id).call():
            try:
                if asked.call.stream:
                    await self._stream(visitor, asked, caller, visit)
                    return None
                async with asyncio.timeout(caller.deadline - self._clock.now()):
                    answer = await self._service.answer(asked.call, caller, visit)
            except EngineUnavailable as error:
                raise self._late(error, caller) from error
            finally:
                self._settle(guest, visit)
        return self._answered(asked, answer, dialect, visit)

    async def _stream(self, visitor: Visitor, asked: Asked, caller: Caller, visit: Visit) -> None:
        """Send events as they come. Trouble before the first has a status; later it is an event itself."""
        events, opened = asked.events(), False
        try:
            async with (
                asyncio.timeout(caller.deadline - self._clock.now()),
                aclosing(self._service.stream(asked.call, events, caller, visit)) as chunks,
            ):
                async for chunk in chunks:
                    if not opened:
                        opened, visit.status = True, 200
                        await visitor.open(_headers(BY_PATH[visit.dialect], visit))
                    await visitor.write(chunk)
                    visit.bytes_out += len(chunk)
        except ConnectionError:
            visit.status = GONE
        except Exception as error:
            if not opened:
                raise
            refusal = refusal_of(self._late(error, caller), visit.route)
            visit.status, visit.code = refusal.status, refusal.code
            with suppress(ConnectionError, TimeoutError):  # who does not read will not learn of it
                async with asyncio.timeout(FAREWELL_S):
                    await visitor.write(events.failure(refusal))

    async def _count(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        """How many tokens a call would have; it counts as a request, and takes none of the key's tokens."""
        guest = self._admit(visitor, matched, visit)
        body = await visitor.read()
        visit.bytes_in = len(body)
        call = messages.parse_count(body)
        return reply_bytes(visit, messages.count_body(self._service.count(call, guest.conversation)))

    async def _models(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        self._guest(visitor, matched, visit)
        return reply_bytes(visit, models.list_body([MODEL]))

    async def _model(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        self._guest(visitor, matched, visit)
        if matched.parameter != MODEL:
            raise Refusal(404, "model_not_found", f"the one model here is {MODEL!r}; calls may name it as they like")
        return reply_bytes(visit, models.one_body(MODEL))

    async def _waits(self, visitor: Visitor, matched: Matched, visit: Visit) -> Reply:
        """How the calls of a session fared with the engines."""
        guest = self._guest(visitor, matched, visit)
        return reply_json(visit, self._identity.sessions.waits(guest.conversation.session_id).facts())

    def _guest(self, visitor: Visitor, matched: Matched, visit: Visit) -> Guest:
        guest = self._identity.guest(visitor.headers, matched.session, self._clock.now())
        visit.key_id = guest.key.key_id
        visit.session_id = guest.conversation.session_id
        visit.traffic = guest.traffic.value
        return guest

    def _admit(self, visitor: Visitor, matched: Matched, visit: Visit) -> Guest:
        """Who calls, with budget left to do so."""
        guest = self._guest(visitor, matched, visit)
        if self._load.draining:
            raise Refusal(503, "draining", "this gateway is stopping: ask another one, or this one again in a while")
        self._identity.afford(guest.key, self._clock.now())
        return guest

    def _caller(self, guest: Guest, headers: Mapping[str, str], call: Call) -> Caller:
        """What the headers say about a call."""
        deadline_s = self._deadline_s
        asked_s = headers.get(DEADLINE)
        if asked_s is not None:
            if not SECONDS.fullmatch(asked_s):
                raise Refusal(400, "invalid_request", f"{DEADLINE}: expected seconds, e.g. 2.5", param=DEADLINE)
            deadline_s = min(deadline_s, float(asked_s))
        oldest = headers.get(MIN_VERSION)
        if oldest is not None and not WHOLE.fullmatch(oldest):
            raise Refusal(
                400, "invalid_request", f"{MIN_VERSION}: expected a weight version, e.g. 12", param=MIN_VERSION
            )
        return Caller(
            conversation=guest.conversation,
            traffic=guest.traffic,
            deadline=self._clock.now() + deadline_s,
            account=guest.key.account,
            request_id=headers.get(REQUEST_IDS[0]) or headers.get(REQUEST_IDS[1], ""),
            retried=headers.get(RETRY_COUNT, "0") != "0",
            min_version=None if oldest is None else int(oldest),
            kind=kind_of(call, headers, self._summary_mark),
        )

    def _late(self, error: Exception, caller: Caller) -> Exception:
        """What a call met whose engines did not answer in time: its deadline, rather than their absence."""
        late = isinstance(error, EngineUnavailable) and self._clock.now() >= caller.deadline
        return TimeoutError() if late else error

    def _settle(self, guest: Guest, visit: Visit) -> None:
        """Count what a call took, and let go of what nobody will ask for again."""
        tokens = visit.prompt_tokens + visit.completion_tokens
        if tokens:
            self._identity.keyring.spend(guest.key, tokens, self._clock.now())
        if guest.once:
            guest.conversation.close()

    def _answered(self, asked: Asked, answer: Answer, dialect: Dialect, visit: Visit) -> Reply:
        reply = Reply(body=asked.body(answer), headers=_headers(dialect, visit))
        visit.status, visit.bytes_out = 200, len(reply.body)
        return reply


def _bare(matched: Matched) -> str:
    """The pattern without its session."""
    return matched.pattern if matched.session is None else matched.pattern.removeprefix("/s/{session}")


def _dialect_of(visitor: Visitor, matched: Matched | None) -> Dialect:
    """In whose shape trouble is told: by the path, else by the client."""
    path = visitor.path if matched is None else _bare(matched)
    anthropic = messages.DIALECT.path in path or ANTHROPIC_VERSION in visitor.headers
    return BY_PATH.get(path) or (messages.DIALECT if anthropic else chat.DIALECT)


def _headers(dialect: Dialect, visit: Visit) -> Headers:
    request_id = (dialect.request_id_header, visit.request_id)
    return (request_id, (VERSION, "-".join(map(str, visit.versions)))) if visit.versions else (request_id,)


def _refused(refusal: Refusal, dialect: Dialect, visit: Visit) -> Reply:
    body = dialect.refuse(refusal)
    status = dialect.statuses.get(refusal.status, refusal.status)
    visit.status, visit.code, visit.bytes_out = status, refusal.code, len(body)
    headers: Headers = ((dialect.request_id_header, visit.request_id),)
    if refusal.status in RETRYABLE:
        headers = (*headers, ("Retry-After", str(retry_after(refusal.retry_after_s or RETRY_AFTER_S))))
    if refusal.status == 405:
        headers = (*headers, ("Allow", refusal.param or ""))
    return Reply(body=body, status=status, headers=headers)
