"""The gateway, from a request's first byte to its line in the log: five steps, of which each knows only the next.

    http      server.py ─▶ app.py: route ─▶ auth.py: key, budget, session            HttpRequest → Principal
    api       api/chat.py, messages.py, …: parse                                     bytes → ParsedRequest(Call)
    capture   service.py ─▶ capture/conversations.py: the reply that it continues    Call → Prompt of token ids
    routing   routing/admission.py: a permit ─▶ pool.py, router.py: an engine        Prompt → Completion
    record    service.py: completion ─▶ Turn of the conversation ─▶ request_log.py   Turn → Answer → response, metrics

    POST   /v1/chat/completions  /v1/completions  /v1/responses        OpenAI's
    POST   /v1/messages  /v1/messages/count_tokens                     Anthropic's
    GET    /v1/models  /v1/models/{name}                               both
    GET    /v1/queue_time                                              ours: waits of a session's calls for engines
    …      /s/{session}/v1/…                                           each of them, in a session
    and those of :mod:`etude.gateway.http.admin_api`

Owns the order of these steps, headers, deadlines and what is counted. Consumes requests; produces answers and turns;
waits for permits and engines, at most until the call's deadline; woken by them. When it drains it takes no new calls;
on shutdown calls are cancelled and leave no turn, and the sessions are gone: their rollouts fail as infrastructure and
are tried again. No text of a conversation reaches a log.

A caller that hangs up before the turn is recorded frees its place here and in the engine. After that the turn stays,
whether or not the answer is received. A caller that sends a random ``X-Request-Id`` or ``Idempotency-Key``, the same
with each retry of a call, is given the recorded answer again; so is an SDK that says how often it has tried.
"""

import asyncio
import re
from collections.abc import Mapping
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import final

from etude.config.inference import GatewayConfig
from etude.errors import EngineUnavailable
from etude.gateway.api import chat, completions, messages, openai, responses
from etude.gateway.api.calls import (
    GONE,
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
from etude.gateway.http.admin_api import AdminApi, GatewayState
from etude.gateway.http.auth import Principal, retry_after
from etude.gateway.http.keyfile import KeyFile
from etude.gateway.http.server import (
    Headers,
    HttpRequest,
    HttpResponse,
    Route,
    Routes,
    bytes_response,
    json_response,
)
from etude.gateway.request_log import AccessLog, RequestRecord
from etude.gateway.service import Caller, CallService

PROTOCOLS: Mapping[str, ApiProtocol] = MappingProxyType(
    {api.path: api for api in (chat.PROTOCOL, completions.PROTOCOL, responses.PROTOCOL, messages.PROTOCOL)}
)
"""Path → API protocol."""
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
DEADLINE_S = 600.0
"""Longest time of one call, waiting included; a caller may ask for less. As long as OpenAI's clients wait."""
LAST_EVENT_S = 1.0
"""Longest time for the last event of a stream that failed to leave."""
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
WHOLE = re.compile(r"[0-9]{1,9}")


@final
class Gateway:
    """Answers requests; :func:`etude.gateway.http.server.http_server` carries them here.

    ``key_file`` is where keys that are made over HTTP are kept; ``None`` keeps them in memory.
    """

    def __init__(
        self,
        service: CallService,
        state: GatewayState,
        config: GatewayConfig,
        *,
        key_file: KeyFile | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        self._service = service
        self._auth = state.auth
        self._inflight = state.inflight
        self._clock = state.clock
        self._deadline_s = DEADLINE_S
        self._summary_mark = config.summary_mark
        self._access_log = access_log
        admin = AdminApi(state, key_file)
        self._metrics = admin.metrics
        self.expire = admin.expire
        """Lets idle sessions go; to be called now and then."""
        calls = {path: {"POST": self._call} for path in PROTOCOLS} | {
            messages.COUNT_PATH: {"POST": self._count},
            "/v1/models": {"GET": self._models},
            "/v1/models/{}": {"GET": self._model},
            "/v1/queue_time": {"GET": self._queue_time},
        }
        self._routes = Routes(admin.table(), calls)

    async def handle(self, request: HttpRequest) -> HttpResponse | None:
        """Answer one request; ``None`` says that it was streamed. Raises nothing but being cancelled."""
        record = RequestRecord(began=self._clock.now(), request_id=f"req_{new_id()}")
        route = self._routes.match(request.path)
        record.route = f"{request.method} {route.pattern}" if route else "unknown"
        try:
            if route is None:
                raise ApiError(404, "not_found", "there is nothing at this path: see /openapi.json")
            return await route.handler(request.method)(request, route, record)
        except Exception as error:  # noqa: BLE001 - the last resort of a server: the caller gets an answer, we get a trace
            return _error_response(api_error_of(error, record.route), _protocol_of(request, route), record)
        except BaseException:
            record.status = GONE
            raise
        finally:
            record.ended = self._clock.now()
            self._metrics.count(record)
            if record.api:
                self._auth.sessions.queue_time(record.session_id).add(record)
            if self._access_log is not None and record.route not in PROBES:
                self._access_log.add(record)

    async def drain(self, seconds: float) -> None:
        """Take no more calls and wait until those in flight are over, at most ``seconds``; being cancelled ends it."""
        await self._inflight.drain(seconds)

    async def _call(self, request: HttpRequest, route: Route, record: RequestRecord) -> HttpResponse | None:
        """One model call: the five steps above."""
        api = PROTOCOLS[route.bare_pattern]
        record.api = api.path
        principal = self._admit(request, route, record)
        body = await request.read()
        record.bytes_in = len(body)
        parsed = api.parse(body)
        caller = self._caller(principal, request.headers, parsed.call)
        record.own_deadline = DEADLINE in request.headers
        with self._inflight.call(), self._auth.sessions.queue_time(record.session_id).call():
            try:
                if parsed.call.stream:
                    await self._stream(request, parsed, caller, record)
                    return None
                async with asyncio.timeout(caller.deadline - self._clock.now()):
                    answer = await self._service.answer(parsed.call, caller, record)
            except EngineUnavailable as error:
                raise self._late(error, caller) from error
            finally:
                self._settle(principal, record)
        response = HttpResponse(body=parsed.body(answer), headers=_headers(api, record))
        record.status, record.bytes_out = 200, len(response.body)
        return response

    async def _stream(self, request: HttpRequest, parsed: ParsedRequest, caller: Caller, record: RequestRecord) -> None:
        """Send events as they come. An error before the first has a status; later it is an event itself."""
        encoder, opened = parsed.events(), False
        try:
            async with (
                asyncio.timeout(caller.deadline - self._clock.now()),
                aclosing(self._service.stream(parsed.call, encoder, caller, record)) as events,
            ):
                async for data in events:
                    if not opened:
                        opened, record.status = True, 200
                        await request.open(_headers(PROTOCOLS[record.api], record))
                    await request.write(data)
                    record.bytes_out += len(data)
        except ConnectionError:
            record.status = GONE
        except Exception as error:
            if not opened:
                raise
            api_error = api_error_of(self._late(error, caller), record.route)
            record.status, record.code = api_error.status, api_error.code
            with suppress(ConnectionError, TimeoutError):  # a caller that does not read will not learn of it
                async with asyncio.timeout(LAST_EVENT_S):
                    await request.write(encoder.failure(api_error))

    async def _count(self, request: HttpRequest, route: Route, record: RequestRecord) -> HttpResponse:
        """The number of tokens that a call would have; it counts as a request, and takes none of the key's tokens."""
        principal = self._admit(request, route, record)
        body = await request.read()
        record.bytes_in = len(body)
        call = messages.parse_count(body)
        return bytes_response(record, messages.count_body(self._service.count(call, principal.conversation)))

    async def _models(self, request: HttpRequest, route: Route, record: RequestRecord) -> HttpResponse:
        self._principal(request, route, record)
        return bytes_response(record, openai.list_body([MODEL]))

    async def _model(self, request: HttpRequest, route: Route, record: RequestRecord) -> HttpResponse:
        self._principal(request, route, record)
        if route.parameter != MODEL:
            raise ApiError(404, "model_not_found", f"the one model here is {MODEL!r}; calls may name it as they like")
        return bytes_response(record, openai.one_body(MODEL))

    async def _queue_time(self, request: HttpRequest, route: Route, record: RequestRecord) -> HttpResponse:
        """The time that the calls of a session waited for engines."""
        principal = self._principal(request, route, record)
        return json_response(record, self._auth.sessions.queue_time(principal.conversation.session_id).facts())

    def _principal(self, request: HttpRequest, route: Route, record: RequestRecord) -> Principal:
        principal = self._auth.principal(request.headers, route.session, self._clock.now())
        record.key_id = principal.key.key_id
        record.session_id = principal.conversation.session_id
        record.traffic = principal.traffic.value
        return principal

    def _admit(self, request: HttpRequest, route: Route, record: RequestRecord) -> Principal:
        """The principal of a call, with budget left to make it."""
        principal = self._principal(request, route, record)
        self._inflight.check_open()
        self._auth.charge_request(principal.key, self._clock.now())
        return principal

    def _caller(self, principal: Principal, headers: Mapping[str, str], call: Call) -> Caller:
        """The conditions of a call, as its headers have them."""
        deadline_s, own_deadline_s = self._deadline_s, headers.get(DEADLINE)
        if own_deadline_s is not None:
            if not SECONDS.fullmatch(own_deadline_s):
                raise ApiError(400, "invalid_request", f"{DEADLINE}: expected seconds, e.g. 2.5", param=DEADLINE)
            deadline_s = min(deadline_s, float(own_deadline_s))
        oldest = headers.get(MIN_VERSION)
        if oldest is not None and not WHOLE.fullmatch(oldest):
            message = f"{MIN_VERSION}: expected a weight version, e.g. 12"
            raise ApiError(400, "invalid_request", message, param=MIN_VERSION)
        return Caller(
            conversation=principal.conversation,
            traffic=principal.traffic,
            deadline=self._clock.now() + deadline_s,
            account=principal.key.account,
            request_id=headers.get(REQUEST_IDS[0]) or headers.get(REQUEST_IDS[1], ""),
            retried=headers.get(RETRY_COUNT, "0") != "0",
            min_version=None if oldest is None else int(oldest),
            kind=turn_kind_of(call, headers, self._summary_mark),
        )

    def _late(self, error: Exception, caller: Caller) -> Exception:
        """The error of a call whose engines did not answer in time: its deadline, rather than their absence."""
        late = isinstance(error, EngineUnavailable) and self._clock.now() >= caller.deadline
        return TimeoutError() if late else error

    def _settle(self, principal: Principal, record: RequestRecord) -> None:
        """Count what a call took, and close a conversation that was for this call alone."""
        tokens = record.prompt_tokens + record.completion_tokens
        if tokens:
            self._auth.keyring.spend(principal.key, tokens, self._clock.now())
        if principal.once:
            principal.conversation.close()


def _protocol_of(request: HttpRequest, route: Route | None) -> ApiProtocol:
    """The API protocol in which a caller is told of an error: by the path, else by the client."""
    path = request.path if route is None else route.bare_pattern
    anthropic = messages.PATH in path or ANTHROPIC_VERSION in request.headers
    return PROTOCOLS.get(path) or (messages.PROTOCOL if anthropic else chat.PROTOCOL)


def _headers(api: ApiProtocol, record: RequestRecord) -> Headers:
    request_id = (api.request_id_header, record.request_id)
    return (request_id, (VERSION, "-".join(map(str, record.versions)))) if record.versions else (request_id,)


def _error_response(api_error: ApiError, api: ApiProtocol, record: RequestRecord) -> HttpResponse:
    body = api.error_body(api_error)
    status = api.statuses.get(api_error.status, api_error.status)
    record.status, record.code, record.bytes_out = status, api_error.code, len(body)
    headers: Headers = ((api.request_id_header, record.request_id),)
    if api_error.status in RETRYABLE:
        headers = (*headers, ("Retry-After", str(retry_after(api_error.retry_after_s or RETRY_AFTER_S))))
    if api_error.status == 405:
        headers = (*headers, ("Allow", api_error.param or ""))
    return HttpResponse(body=body, status=status, headers=headers)
