"""The gateway's HTTP handler, from a request's first byte to its log line, in five steps.

    http      app.py: route ─▶ auth.py: key, budget, session                         request → Principal
    api       api/chat.py, messages.py, …: parse                                     bytes → ParsedRequest(Call)
    capture   service.py ─▶ capture/conversations.py: the reply that it continues    Call → Prompt of token ids
    routing   routing/admission.py: a permit ─▶ pool.py, router.py: an engine        Prompt → Completion
    record    service.py: completion ─▶ Turn of the conversation ─▶ request_log.py   Turn → Answer → response, metrics

    POST   /v1/chat/completions  /v1/completions  /v1/responses        OpenAI's
    POST   /v1/messages  /v1/messages/count_tokens                     Anthropic's
    GET    /v1/models  /v1/models/{name}                               both
    GET    /v1/queue_time                                              ours: waits of a session's calls for engines
    …      /s/{session}/v1/…                                           each of them, in a session
    /sessions /keys /engines /healthz /metrics /openapi.json           :mod:`etude.gateway.http.admin_api`'s

Owns the order of these steps, the web server, path patterns, headers, deadlines and counters. Consumes requests;
produces answers and turns; waits for permits and engines, at most until the call's deadline; woken by them. When it
drains it accepts no new calls; on shutdown calls are cancelled and leave no turn, and the sessions are lost: their
rollouts fail as infrastructure and are retried. No conversation text reaches a log.

A caller that disconnects before the turn is recorded frees its slot here and in the engine. Afterwards the turn stays,
whether or not the answer is received. A caller that sends a random ``X-Request-Id`` or ``Idempotency-Key``, the same
with each retry of a call, gets the recorded answer again; so does an SDK that sends its retry count.

A path names a session by its id, or by its key for tools that accept only a base URL; :mod:`etude.gateway.http.auth`
tells the two apart. The server is aiohttp's low-level one: neither its router nor a raw ASGI server is measurably
faster, and it cancels the handler of a disconnected caller at no cost, which ASGI does not.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias, final
from urllib.parse import unquote

import orjson
from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError

from etude.config.inference import GatewayConfig
from etude.errors import EngineUnavailable
from etude.gateway.api import chat, completions, messages, openai, responses
from etude.gateway.api.calls import (
    CLIENT_CLOSED,
    MODEL,
    RETRY_AFTER_S,
    RETRYABLE,
    ApiError,
    ApiProtocol,
    Call,
    ParsedRequest,
    api_error_of,
    new_id,
    turn_kind_of,
)
from etude.gateway.capture.live import USER, LiveRecorder
from etude.gateway.http.auth import Authenticator, Principal, retry_after
from etude.gateway.request_log import CallLoad, Metrics, RequestRecord
from etude.gateway.routing.admission import AdmissionQueue, InflightCalls, TrafficClass
from etude.gateway.routing.arms import ReleasedArms
from etude.gateway.routing.pool import EnginePool
from etude.gateway.service import Caller, CallService
from etude.protocols import Clock

MAX_BODY_BYTES = 16 * 2**20
"""Longer requests are rejected unread; a context of a million tokens fits."""
PROTOCOLS: Mapping[str, ApiProtocol] = MappingProxyType(
    {api.path: api for api in (chat.PROTOCOL, completions.PROTOCOL, responses.PROTOCOL, messages.PROTOCOL)}
)
"""Path → API protocol."""
ANTHROPIC_VERSION = "anthropic-version"
"""Header that Anthropic's clients always send; it identifies them on paths that both APIs share."""
REQUEST_IDS = ("X-Request-Id", "Idempotency-Key")
"""Headers that identify a retry within one session."""
RETRY_COUNT = "x-stainless-retry-count"
"""Header in which both SDKs send the number of earlier attempts at this call."""
MIN_VERSION = "X-Etude-Min-Version"
"""Header with the oldest weight version that may answer."""
DEADLINE = "X-Etude-Deadline-S"
"""Header with a shorter deadline than the gateway's."""
VERSION = "X-Etude-Version"
"""Response header with the weight versions that answered; for a stream, those of its first tokens."""
PROBES = frozenset({"GET /healthz", "GET /metrics"})
"""Routes without a line in the access log: machines request them many times a second."""
LIVE_SESSION = "X-Etude-Session-Id"
"""Response header with the id of the live session that the call is recorded in."""
DEADLINE_S = 600.0
"""Longest time of one call, waiting included, as in OpenAI's clients; a caller may request less."""
LAST_EVENT_S = 1.0
"""Longest time to send the last event of a stream that failed."""
BODY_S = 60.0
"""Longest time for a body to arrive after its headers: enough for a large one over a slow connection."""
JSON, EVENTS = "application/json", "text/event-stream"
SERVER = ("Server", "etude")
"""No version number: it would only help attackers."""
EVENT_STREAM = (("Content-Type", EVENTS), ("Cache-Control", "no-store"), SERVER)
"""Headers of a stream of server-sent events."""
SESSION_PREFIX = "/s/"
PARAMETER = "{}"
"""Placeholder for the last segment of a path."""
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
WHOLE = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayState:
    """The objects that request handlers read and change."""

    auth: Authenticator
    """Keys and sessions."""
    pool: EnginePool
    admission: AdmissionQueue
    inflight: InflightCalls
    clock: Clock
    arms: ReleasedArms | None = None
    """The weights that users may get; ``None``: any weights."""
    live: LiveRecorder | None = None
    """Records the sessions of users who consent; ``None``: none are recorded."""


@final
class Gateway:
    """Answers requests: model calls itself, all others by the handlers in ``others``; counts them in ``metrics``."""

    def __init__(
        self,
        service: CallService,
        state: GatewayState,
        config: GatewayConfig,
        *,
        others: "RouteTable",
        metrics: Metrics,
        listeners: Sequence[Callable[[RequestRecord], None]] = (),
    ) -> None:
        """``listeners`` are notified of every finished request except probes."""
        self._service = service
        self._auth = state.auth
        self._inflight = state.inflight
        self._clock = state.clock
        self._arms = state.arms
        self._deadline_s = DEADLINE_S
        self._summary_mark = config.summary_mark
        self._listeners = tuple(listeners)
        self._metrics = metrics
        self._live = state.live
        self._pool = state.pool
        calls = {path: {"POST": self._call} for path in PROTOCOLS} | {
            messages.COUNT_PATH: {"POST": self._count},
            "/v1/models": {"GET": self._models},
            "/v1/models/{}": {"GET": self._model},
            "/v1/queue_time": {"GET": self._queue_time},
        }
        self._routes = Routes(others, calls)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Raises nothing except cancellation."""
        record = RequestRecord(began=self._clock.now(), request_id=f"req_{new_id()}")
        route = self._routes.match(raw_path(request))
        record.route = f"{request.method} {route.pattern}" if route else "unknown"
        try:
            if route is None:
                raise ApiError(404, "not_found", "there is nothing at this path: see /openapi.json")
            return await route.handler(request.method)(request, route, record)
        except Exception as error:  # noqa: BLE001 - the last resort of a server: the caller gets an answer, we get a trace
            return _error_response(api_error_of(error, record.route), _protocol_of(request, route), record)
        except BaseException:
            record.status = CLIENT_CLOSED
            raise
        finally:
            record.ended = self._clock.now()
            self._metrics.count(record)
            if record.api:
                self._auth.sessions.queue_time(record.session_id).add(record)
            if record.route not in PROBES:
                for tell in self._listeners:
                    tell(record)

    def take_load(self) -> CallLoad:
        """Sums over the calls that ended since the previous call of this method."""
        return self._metrics.take_load()

    async def drain(self, seconds: float) -> None:
        """Accept no more calls and wait until those in progress have ended, at most ``seconds``; cancellation ends the
        wait.
        """
        await self._inflight.drain(seconds)

    async def _call(self, request: web.BaseRequest, route: "Route", record: RequestRecord) -> web.StreamResponse:
        """One model call: the five steps above."""
        api = PROTOCOLS[route.bare_pattern]
        record.api = api.path
        principal = self._admit(request, route, record)
        body = await read_body(request, record)
        record.arrived = self._clock.now()
        parsed = api.parse(body)
        caller = self._caller(principal, request.headers, parsed.call)
        await self._admit_live(principal, request.headers, record, caller)
        record.own_deadline = DEADLINE in request.headers
        with self._inflight.call(), self._auth.sessions.queue_time(record.session_id).call():
            try:
                if parsed.call.stream:
                    return await self._stream(request, parsed, caller, record)
                async with asyncio.timeout(caller.deadline - self._clock.now()):
                    answer = await self._service.answer(parsed.call, caller, record)
            except EngineUnavailable as error:
                raise self._late(error, caller) from error
            finally:
                self._settle(principal, record)
        return respond(record, parsed.body(answer), headers=_headers(api, record))

    async def _stream(
        self, request: web.BaseRequest, parsed: ParsedRequest, caller: Caller, record: RequestRecord
    ) -> web.StreamResponse:
        """Send events as they arrive. An error before the first event has a status; a later one is itself an event."""
        encoder, response = parsed.events(), web.StreamResponse()
        try:
            async with (
                asyncio.timeout(caller.deadline - self._clock.now()),
                aclosing(self._service.stream(parsed.call, encoder, caller, record)) as events,
            ):
                async for data in events:
                    if not response.prepared:
                        record.status = 200
                        response.headers.extend((*_headers(PROTOCOLS[record.api], record), *EVENT_STREAM))
                        await response.prepare(request)
                    await response.write(data)
                    record.bytes_out += len(data)
        except ConnectionError:
            record.status = CLIENT_CLOSED
        except Exception as error:
            if not response.prepared:
                raise
            api_error = api_error_of(self._late(error, caller), record.route)
            record.status, record.code = api_error.status, api_error.code
            with suppress(ConnectionError, TimeoutError):  # a caller that does not read cannot be notified
                async with asyncio.timeout(LAST_EVENT_S):
                    await response.write(encoder.failure(api_error))
        return response

    async def _count(self, request: web.BaseRequest, route: "Route", record: RequestRecord) -> web.StreamResponse:
        """The number of tokens of a call; it counts as a request, but uses none of the key's tokens."""
        principal = self._admit(request, route, record)
        body = await read_body(request, record)
        call = messages.parse_count(body)
        return respond(record, messages.count_body(self._service.count(call, principal.conversation)))

    async def _models(self, request: web.BaseRequest, route: "Route", record: RequestRecord) -> web.StreamResponse:
        self._principal(request, route, record)
        return respond(record, openai.list_body([MODEL]))

    async def _model(self, request: web.BaseRequest, route: "Route", record: RequestRecord) -> web.StreamResponse:
        self._principal(request, route, record)
        if route.parameter != MODEL:
            raise ApiError(404, "model_not_found", f"the one model here is {MODEL!r}; calls may name it as they like")
        return respond(record, openai.one_body(MODEL))

    async def _queue_time(self, request: web.BaseRequest, route: "Route", record: RequestRecord) -> web.StreamResponse:
        """The time that the calls of a session waited for engines."""
        principal = self._principal(request, route, record)
        return respond(record, orjson.dumps(self._auth.sessions.queue_time(principal.conversation.session_id).facts()))

    def _principal(self, request: web.BaseRequest, route: "Route", record: RequestRecord) -> Principal:
        principal = self._auth.principal(request.headers, route.session, self._clock.now())
        record.key_id = principal.key.key_id
        record.session_id = principal.conversation.session_id
        record.traffic = principal.traffic.value
        return principal

    def _admit(self, request: web.BaseRequest, route: "Route", record: RequestRecord) -> Principal:
        """The principal of a call, with enough budget to make it."""
        principal = self._principal(request, route, record)
        self._inflight.check_open()
        self._auth.charge_request(principal.key, self._clock.now())
        return principal

    def _caller(self, principal: Principal, headers: Mapping[str, str], call: Call) -> Caller:
        """The conditions of a call, from its headers and its session."""
        deadline_s, own_deadline_s = self._deadline_s, headers.get(DEADLINE)
        if own_deadline_s is not None:
            if not SECONDS.fullmatch(own_deadline_s):
                raise ApiError(400, "invalid_request", f"{DEADLINE}: expected seconds, e.g. 2.5", param=DEADLINE)
            deadline_s = min(deadline_s, float(own_deadline_s))
        oldest = headers.get(MIN_VERSION)
        if oldest is not None and not WHOLE.fullmatch(oldest):
            message = f"{MIN_VERSION}: expected a weight version, e.g. 12"
            raise ApiError(400, "invalid_request", message, param=MIN_VERSION)
        arm, session = None, principal.conversation.session_id
        is_rollout = principal.traffic is TrafficClass.ROLLOUT
        if self._arms is not None and principal.traffic is TrafficClass.PRODUCTION:
            arm = self._arms.of_call(session, headers.get(USER) or session)
        versions = (self._auth.sessions.min_version(session), oldest)
        return Caller(
            conversation=principal.conversation,
            traffic=principal.traffic,
            deadline=self._clock.now() + deadline_s,
            account=session if is_rollout else principal.key.account,  # all rollouts have one key's
            request_id=headers.get(REQUEST_IDS[0]) or headers.get(REQUEST_IDS[1], ""),
            retried=headers.get(RETRY_COUNT, "0") != "0",
            min_version=max((int(version) for version in versions if version is not None), default=None),
            wait_for_version=oldest is None,
            kind=turn_kind_of(call, headers, self._summary_mark),
            arm=arm,
        )

    async def _admit_live(
        self, principal: Principal, headers: Mapping[str, str], record: RequestRecord, caller: Caller
    ) -> None:
        """Decide whether a production session is recorded, from its user's consent."""
        if self._live is None or principal.traffic is not TrafficClass.PRODUCTION:
            return
        conversation, key = principal.conversation, principal.key
        arm = "" if caller.arm is None else caller.arm.label
        await self._live.admit(conversation, self._live.call(headers), key.account, by_default=key.consent, arm=arm)
        record.live_session = "" if conversation.live is None else conversation.live.session_id

    def _late(self, error: Exception, caller: Caller) -> Exception:
        """The error of a call whose engines did not answer in time: its deadline, rather than engine unavailability."""
        late = isinstance(error, EngineUnavailable) and self._clock.now() >= caller.deadline
        return TimeoutError() if late else error

    def _settle(self, principal: Principal, record: RequestRecord) -> None:
        """Count a call's usage, and close a conversation that exists only for this call."""
        tokens = record.prompt_tokens + record.completion_tokens
        if tokens:
            self._auth.keyring.spend(principal.key, tokens, self._clock.now())
        if principal.once:
            principal.conversation.close()
            self._pool.forget(principal.conversation.session_id)


def _protocol_of(request: web.BaseRequest, route: "Route | None") -> ApiProtocol:
    """The API protocol in which a caller gets errors: by the path, else by the client."""
    path = raw_path(request) if route is None else route.bare_pattern
    anthropic = messages.PATH in path or ANTHROPIC_VERSION in request.headers
    return PROTOCOLS.get(path) or (messages.PROTOCOL if anthropic else chat.PROTOCOL)


def _headers(api: ApiProtocol, record: RequestRecord) -> "Headers":
    headers = [(api.request_id_header, record.request_id)]
    if record.versions:
        headers.append((VERSION, "-".join(map(str, record.versions))))
    if record.live_session:
        headers.append((LIVE_SESSION, record.live_session))
    return tuple(headers)


def _error_response(api_error: ApiError, api: ApiProtocol, record: RequestRecord) -> web.Response:
    record.code = api_error.code
    headers: Headers = ((api.request_id_header, record.request_id),)
    if api_error.status in RETRYABLE:
        headers = (*headers, ("Retry-After", str(retry_after(api_error.retry_after_s or RETRY_AFTER_S))))
    if api_error.status == 405:
        headers = (*headers, ("Allow", api_error.param or ""))
    status = api.statuses.get(api_error.status, api_error.status)
    return respond(record, api.error_body(api_error), status=status, headers=headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A request path, parsed."""

    pattern: str
    """The pattern that matched, for logs: it contains nothing chosen by a caller."""
    handlers: Mapping[str, "Handler"]
    """Method → handler."""
    session: str | None = None
    """The segment after ``/s/``."""
    parameter: str = ""
    """The segment that ``{}`` stands for."""

    @property
    def bare_pattern(self) -> str:
        """The pattern without its session."""
        return self.pattern if self.session is None else self.pattern.removeprefix(SESSION_PREFIX + "{session}")

    def handler(self, method: str) -> "Handler":
        """The handler of a method. Raises :class:`~etude.gateway.api.calls.ApiError` with 405."""
        handler = self.handlers.get(method)
        if handler is None:
            allowed = ", ".join(sorted(self.handlers))
            raise ApiError(405, "method_not_allowed", f"{self.pattern} takes {allowed} only", param=allowed)
        return handler


Handler = Callable[[web.BaseRequest, Route, RequestRecord], Awaitable[web.StreamResponse]]
"""Answers one request and fills in its record. Cancelled when the caller disconnects."""
RouteTable: TypeAlias = Mapping[str, Mapping[str, Handler]]
"""Pattern → method → handler."""


class Routes:
    """URL patterns and their handlers. ``below_session`` are those that also exist below ``/s/{session}``."""

    def __init__(self, table: RouteTable, below_session: RouteTable) -> None:
        everywhere = {**table, **below_session}
        self._all = {pattern: Route(pattern=pattern, handlers=handlers) for pattern, handlers in everywhere.items()}
        self._below_session = below_session

    def match(self, path: str) -> Route | None:
        """The route of a path; ``None`` if there is none."""
        fixed = self._all.get(path)
        if fixed is not None and PARAMETER not in path:
            return fixed
        if path.startswith(SESSION_PREFIX):
            session, _, rest = path[len(SESSION_PREFIX) :].partition("/")
            inner = self.match("/" + rest) if session and not rest.startswith("s/") else None
            if inner is None or inner.pattern not in self._below_session:
                return None
            return replace(inner, pattern=SESSION_PREFIX + "{session}" + inner.pattern, session=unquote(session))
        stem, _, leaf = path.rpartition("/")
        open_ended = self._all.get(f"{stem}/{PARAMETER}") if leaf else None
        return None if open_ended is None else replace(open_ended, parameter=unquote(leaf))


def http_server(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], *, max_body_bytes: int = MAX_BODY_BYTES
) -> web.Server:
    """Make an aiohttp server around ``handle``; call this in the event loop that runs the server."""
    loop = asyncio.get_running_loop()

    def request_of(message: RawRequestMessage, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=max_body_bytes)

    return web.Server(handle, request_factory=request_of, handler_cancellation=True)


def raw_path(request: web.BaseRequest) -> str:
    """The request path as sent, still percent-encoded, without the query."""
    return request.raw_path.partition("?")[0]


async def read_body(request: web.BaseRequest, record: RequestRecord, longest_s: float = BODY_S) -> bytes:
    """Read a request body, which must arrive within ``longest_s``.

    Raises :class:`~etude.gateway.api.calls.ApiError`: 413 if it is too large, 408 if it does not arrive.
    """
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    try:
        if request.content.is_eof():  # all of it arrived with its headers
            body = await request.read()
        else:
            await _invite(request)
            async with asyncio.timeout(longest_s):
                body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limit) from error
    except TimeoutError as error:
        raise ApiError(408, "body_timeout", f"the body did not arrive within {longest_s:g} s") from error
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise ApiError(400, "invalid_request", f"the body is not encoded as its headers say: {error}") from error
    record.bytes_in = len(body)
    return body


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the body is larger than {limit} bytes: send less at a time")


async def _invite(request: web.BaseRequest) -> None:
    """Send "100 Continue" to a caller that waits for it; curl does with large bodies."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        writer = request.writer
        await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.output_size = 0  # no part of the response was sent yet


Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values."""


def respond(
    record: RequestRecord, body: bytes, content_type: str = JSON, *, status: int = 200, headers: Headers = ()
) -> web.Response:
    """Send a whole response, and record it in ``record``."""
    record.status, record.bytes_out = status, len(body)
    response = web.Response(body=body, status=status)
    response.headers.extend((*headers, ("Content-Type", content_type), SERVER))
    return response
