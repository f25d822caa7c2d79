"""A server between harnesses and an external API: it forwards calls and counts their cost.

    harness ──/s/SESSION/v1/…──▶ session's key? ──▶ Upstream, tried again while it is busy ──▶ answer, as it is
                                                          └─▶ CallRecord: status, seconds, tokens

- consumes: calls of OpenAI's and Anthropic's APIs; chat completions for Anthropic's API are translated
- produces: answers; a record of each call in its session, and the text of each answered call; ``fault`` if no further
  call can succeed
- waits for: the API, at most ``CALL_S`` per call, and pauses between attempts, at most ``RETRY_S`` in total
- woken by: its answers
- on shutdown: calls are cancelled

Separate from the capture for training (:mod:`etude.gateway.capture`): the API counts the tokens, and their ids are
unknown. Implements the sessions that rollouts need, :class:`~etude.rollouts.worker.SessionOpener`: a session has a turn
without tokens for each answered call.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import aiohttp
import numpy as np
import orjson
from aiohttp import web

from etude.aio import never
from etude.backoff import Backoff
from etude.errors import ConfigError, SessionLost, UserError
from etude.gateway.upstream.apis import COMPLETIONS, PATHS
from etude.gateway.upstream.calls import TokenUsage, Upstream, beyond_the_model, read_usage
from etude.gateway.upstream.translation import (
    CONTEXT_CODE,
    Untranslatable,
    completion_of,
    error_of,
    request_of,
)
from etude.gateway.upstream.words import CallTranscript
from etude.key_comparison import same_key
from etude.protocols import Clock, Session
from etude.types import Finish, Turn

BUSY = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
"""Statuses that call for a retry."""
OK, UNAVAILABLE, BAD_GATEWAY, CLIENT_CLOSED = 200, 503, 502, 499
REFUSED = frozenset({401, 403, 404})
"""Statuses that every other call would get too: the key or the model name is wrong."""
PAUSES = Backoff(first_s=0.5, longest_s=30.0, jitter=0.5)
"""Pauses between attempts of one call."""
RETRY_S = 300.0
"""Time after which a call to a busy API fails; its rollout is retried."""
UNREACHED_S = 30.0
"""The same for an API that was never reached: its URL is most likely wrong."""
CALL_S = 600.0
"""Longest time of one attempt."""
CONNECT_S = 15.0
MAX_BODY_BYTES = 64 << 20
SESSION_BYTES, KEY_BYTES = 8, 16
QUOTED_CHARACTERS = 300
"""Longest quotation from an API's answer."""
JSON_TYPE, EVENTS_TYPE = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One finished call."""

    status: int
    """HTTP status that the harness got; ``CLIENT_CLOSED``: it disconnected."""
    seconds: float
    """From the request to the last byte, minus :attr:`waited_s`."""
    waited_s: float
    """Failed attempts, and the pauses after them."""
    usage: TokenUsage = field(default_factory=TokenUsage)

    @property
    def is_answered(self) -> bool:
        """True if the model answered."""
        return self.status == OK


@dataclass(slots=True, kw_only=True)
class UpstreamSession:
    """The calls of one rollout."""

    key: str
    calls: list[CallRecord] = field(default_factory=list)
    transcript: CallTranscript = field(default_factory=CallTranscript)
    under_way: int = 0

    def queue_time(self) -> dict[str, float | bool]:
        """The answer to ``GET /v1/queue_time``: whether the model's service delayed a harness."""
        last = self.calls[-1] if self.calls else None
        return {
            "calls": self.under_way,
            "waited_s": round(sum(call.waited_s for call in self.calls), 3),
            "unserved": last is not None and last.status in BUSY,
        }

    def measures(self) -> dict[str, float]:
        """Sums over the calls, by name."""
        answered = [call for call in self.calls if call.is_answered]
        usage = sum((call.usage for call in answered), TokenUsage())
        return {
            "calls": len(answered),
            "refused_calls": len(self.calls) - len(answered),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "sampled_tokens": usage.sampled_tokens,
            "model_s": sum(call.seconds for call in answered),
            "waited_s": sum(call.waited_s for call in self.calls),
        }


@dataclass(frozen=True, slots=True)
class _ApiAnswer:
    """The API's answer to one attempt."""

    status: int
    body: bytes
    content_type: str
    retry_after: str | None = None
    is_lost: bool = False
    """True if there was no answer: the connection failed."""


@final
class Passthrough:
    """Forwards the calls of sessions to one model; the caller owns ``http``."""

    def __init__(
        self, upstream: Upstream, http: aiohttp.ClientSession, clock: Clock, *, retry_s: float = RETRY_S
    ) -> None:
        self._upstream = upstream
        self._http = http
        self._clock = clock
        self._retry_s = retry_s
        self._sessions: dict[str, UpstreamSession] = {}
        self._has_answered = False
        self.url = ""
        """The URL at which its server listens."""
        self.fault: UserError | None = None
        """The reason why no call can succeed, once known."""

    def app(self) -> web.Application:
        """Its HTTP server."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/s/{session}/v1/queue_time", self._queue_time)
        app.router.add_get("/s/{session}/v1/models", self._models)
        app.router.add_post("/s/{session}/v1/{path:.+}", self._call)
        return app

    def serves_at(self, url: str) -> None:
        """Set the URL at which its server listens."""
        self.url = url

    async def open(self, *, min_version: int | None = None) -> Session:
        """Start a session; ``min_version`` is ignored, as the model has no weight versions here."""
        session_id, key = secrets.token_hex(SESSION_BYTES), secrets.token_urlsafe(KEY_BYTES)
        self._sessions[session_id] = UpstreamSession(key=key)
        return Session(session_id=session_id, base_url=f"{self.url}/s/{session_id}/v1", api_key=key)

    async def fork(self, session_id: str) -> tuple[Session, int]:
        """Unsupported: an external model's conversation cannot be replayed."""
        raise SessionLost(f"session {session_id} is behind another API, which knows no forks")

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session; return a turn without tokens for each answered call."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            raise SessionLost(f"there is no session {session_id} (any more)")
        return tuple(_empty_turn() for call in session.calls if call.is_answered)

    async def discard(self, session_id: str) -> None:
        """End a session."""
        self._sessions.pop(session_id, None)

    async def lost(self, session_id: str) -> NoReturn:
        """Raise an error; sessions are in this process, so none can be lost."""
        await never()

    def session(self, session_id: str) -> UpstreamSession:
        """An open session. Raises :class:`~etude.errors.SessionLost`."""
        if session_id not in self._sessions:
            raise SessionLost(f"there is no session {session_id} (any more)")
        return self._sessions[session_id]

    def _authenticated(self, request: web.Request) -> UpstreamSession | web.Response:
        """The session whose key a request has, or the error response."""
        session = self._sessions.get(request.match_info["session"])
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if session is None:
            return _api_error(404, "there is no such session (any more)", "session_not_found")
        if not same_key(given, session.key):
            return _api_error(401, "this is not the key of the session", "invalid_api_key")
        return session

    async def _queue_time(self, request: web.Request) -> web.Response:
        session = self._authenticated(request)
        return session if isinstance(session, web.Response) else web.json_response(session.queue_time())

    async def _models(self, request: web.Request) -> web.Response:
        session = self._authenticated(request)
        if isinstance(session, web.Response):
            return session
        model = {"id": self._upstream.model, "object": "model", "type": "model", "created": 0, "owned_by": "upstream"}
        return web.json_response({"object": "list", "data": [model]})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        """Forward one call, and record it whatever its result."""
        session, path = self._authenticated(request), request.match_info["path"]
        if isinstance(session, web.Response):
            return session
        try:
            body = orjson.loads(await request.read())
            sent_path, sent = self._translated(path, body)
            data = orjson.dumps(sent)
        except (orjson.JSONDecodeError, Untranslatable, LookupError, TypeError) as error:
            return _api_error(400, f"{type(error).__name__}: {error}", "invalid_request_error")
        session.under_way += 1
        began_s, waited_s, status, usage = self._clock.now(), 0.0, CLIENT_CLOSED, TokenUsage()
        try:
            answer, waited_s = await self._answer(sent_path, data)
            status, usage = answer.status, read_usage(answer.body)
        finally:
            session.under_way -= 1
            seconds = self._clock.now() - began_s - waited_s
            session.calls.append(CallRecord(status=status, seconds=seconds, waited_s=waited_s, usage=usage))
        if status != OK:
            self._note_fault(path, answer)
        elif path in COMPLETIONS:
            session.transcript.add(sent, answer.body)
        return self._response(answer, body, is_translated=sent_path != path)

    def _translated(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The path and body to send to the API. Raises :class:`Untranslatable`."""
        if path not in PATHS:
            raise Untranslatable(f"/v1/{path} is not passed on: expected one of {', '.join(PATHS)}")
        if not isinstance(body, dict):
            raise Untranslatable("a request is an object of JSON")
        if beyond := beyond_the_model(body):
            raise Untranslatable(f"{beyond} is not passed on: an agent gets words of a model; allow others by --extra")
        if self._upstream.api == "anthropic" and path == "chat/completions":
            return "messages", self._upstream.request("messages", request_of(body))
        if path in COMPLETIONS and (path == "messages") != (self._upstream.api == "anthropic"):
            raise Untranslatable(
                f"/v1/{path}: the model is behind {self._upstream.api}'s API (--api), which has no such"
            )
        return path, self._upstream.request(path, body)

    async def _answer(self, path: str, body: bytes) -> tuple[_ApiAnswer, float]:
        """The API's answer, and the seconds of failed attempts and pauses; a busy API is called again."""
        began_s, is_reached = self._clock.now(), self._has_answered
        for pause_s in PAUSES.delays():
            tried_s = self._clock.now()
            answer = await self._attempt(path, body)
            if answer.status not in BUSY:
                return answer, tried_s - began_s
            is_reached |= self._has_answered or not answer.is_lost
            pause_s = max(pause_s, _seconds(answer.retry_after))
            limit_s = self._retry_s if is_reached else min(self._retry_s, UNREACHED_S)
            if self._clock.now() + pause_s > began_s + limit_s:
                return answer, self._clock.now() - began_s
            await self._clock.sleep(pause_s)
        raise AssertionError("pauses never end")

    async def _attempt(self, path: str, body: bytes) -> _ApiAnswer:
        headers = {**self._upstream.headers, "Content-Type": JSON_TYPE}
        timeout = aiohttp.ClientTimeout(total=CALL_S, connect=CONNECT_S)
        url = self._upstream.place(path)
        try:
            async with self._http.post(
                url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                kind, retry_after = response.content_type, response.headers.get("Retry-After")
                return _ApiAnswer(response.status, await response.read(), kind, retry_after)
        except (aiohttp.ClientError, OSError) as error:  # a missed deadline is an OSError
            words = {"error": {"message": f"{url}: {type(error).__name__}: {error}", "code": "upstream_unavailable"}}
            return _ApiAnswer(UNAVAILABLE, orjson.dumps(words), JSON_TYPE, is_lost=True)

    def _note_fault(self, path: str, answer: _ApiAnswer) -> None:
        """Record an answer that every other call would get too, so that continuing is useless.

        No answer at all from an API that was never reached counts as well. So does a request that is rejected for its
        content, as long as no call was ever answered.
        """
        if answer.is_lost and not self._has_answered and self.fault is None:
            message = orjson.loads(answer.body)["error"]["message"]
            self.fault = UserError(f"the API has never answered: {message}; correct --url, or try again later")
        always = answer.status in REFUSED or (400 <= answer.status < 500 and not self._has_answered)
        if always and path in COMPLETIONS and answer.status not in BUSY and self.fault is None:
            error = error_of(answer.body)["error"]
            assert isinstance(error, dict)
            if error["code"] != CONTEXT_CODE:
                self.fault = ConfigError(
                    f"{self._upstream.place(path)} answers {answer.status} for the model {self._upstream.model!r}: "
                    f"{str(error['message'])[:QUOTED_CHARACTERS]}; correct --url, --model, --key-env, or --extra"
                )

    def _response(self, answer: _ApiAnswer, body: Mapping[str, Any], *, is_translated: bool) -> web.Response:
        """The harness's answer. A stream is forwarded only once it is complete: no one watches it."""
        if answer.status != OK:
            words = (
                orjson.dumps(error_of(answer.body)) if self._upstream.api == "openai" or is_translated else answer.body
            )
            return web.Response(status=answer.status, body=words, content_type=JSON_TYPE)
        self._has_answered = True
        if not is_translated:
            return web.Response(body=answer.body, content_type=answer.content_type)
        stream = bool(body.get("stream"))
        try:
            completion = completion_of(answer.body, stream=stream)
        except Untranslatable as error:
            return _api_error(BAD_GATEWAY, str(error), "upstream_unreadable")
        return web.Response(body=completion, content_type=EVENTS_TYPE if stream else JSON_TYPE)


def _empty_turn() -> Turn:
    """A turn with unknown tokens."""
    nothing = np.zeros(0, np.int32)
    return Turn(
        prompt_ids=nothing,
        completion_ids=nothing,
        logprobs=np.zeros(0, np.float32),
        versions=nothing,
        finish=Finish.STOP,
    )


def _api_error(status: int, message: str, code: str) -> web.Response:
    """An error of this server, in OpenAI's format."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


def _seconds(retry_after: str | None) -> float:
    """The header's value if it is a number of seconds, else 0."""
    try:
        return max(0.0, float(retry_after or 0.0))
    except ValueError:
        return 0.0
