"""The gateway's HTTP door: routes, keys and the translation of errors.

Owns no decision about conversations (:mod:`etude.gateway.sessions`) and no request shape
(:mod:`etude.gateway.openai`). What people wrote never reaches a log.

    POST   /sessions              admin key    → session_id, api_key
    DELETE /sessions/{id}         admin key    → every turn, token for token; the key dies
    POST   /v1/chat/completions   session key  → one reply of the model
    GET    /v1/models             session key  → the model's name
    GET    /healthz               no key       → which weights the engine serves, calls in flight, open sessions

Consumes chat requests; produces turns. Waits for the engine, which gives up by itself when it is down for too long;
woken by its answer. On shutdown the sessions are gone: their rollouts fail as infrastructure and are tried again.

Serve it with ``handler_cancellation=True``: then a caller that hangs up before the turn is recorded frees its place
here and in the engine, and leaves no turn. After that the turn stays, whether or not the reply is received. A
caller that sends a random ``X-Request-Id``, the same with each retry of a call, is given the recorded reply again;
without one, a retry is another sample, and the reply that nobody received stays a turn of the session.
"""

import hmac
import logging
import secrets
import traceback
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

import orjson
from aiohttp import web

from etude.clock import date_utc
from etude.config import GatewayConfig
from etude.errors import CaptureError, EngineUnavailable, SessionLost
from etude.gateway.openai import ChatRequest, Refusal, chat_body, models_body, parse_chat
from etude.gateway.recorder import Recorder
from etude.gateway.sessions import Message, Session, Sessions
from etude.protocols import Clock, SamplingParams
from etude.types import Ids, Turn

MAX_BODY_BYTES = 4 * 2**20
"""A longer request is refused unread; many times what fits a context of text."""
KEY_BYTES = 32
"""Randomness of a session key: not to be guessed."""
SESSION_ID_BYTES = 12
"""Randomness of a session id: unique, not secret."""
REQUEST_ID = "X-Request-Id"
"""Header by which a retry is known, within one session."""
RETRY_AFTER_S = 1
"""When a caller may try again after 429 or 503: about one model call later."""

HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
"""HTTP status of the web server's own refusals → error code."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)


class Gateway:
    """Lets harnesses talk to an engine in chat messages while it keeps the tokens.

    ``max_length`` is the engine's bound on prompt and completion together, in tokens.
    """

    def __init__(
        self,
        recorder: Recorder,
        sessions: Sessions,
        clock: Clock,
        config: GatewayConfig,
        *,
        admin_key: str,
        max_length: int,
    ) -> None:
        if not admin_key or not admin_key.isascii():
            raise ValueError("the admin key must be ASCII and not empty: it travels in a header and guards every turn")
        self._recorder = recorder
        self._sessions = sessions
        self._clock = clock
        self._max_inflight = config.max_inflight
        self._admin_key = admin_key.encode()
        self._max_length = max_length
        self._inflight = 0

    def app(self) -> web.Application:
        """The web application that serves this gateway."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer_errors])
        app.router.add_post("/sessions", self._open_session)
        app.router.add_delete("/sessions/{session_id}", self._close_session)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/healthz", self._health)
        return app

    async def _open_session(self, request: web.Request) -> web.Response:
        self._check_admin(request)
        session_id, api_key = secrets.token_hex(SESSION_ID_BYTES), secrets.token_urlsafe(KEY_BYTES)
        if self._sessions.open(session_id, api_key, self._clock.now()) is None:
            raise Refusal(429, "too_many_sessions", f"{len(self._sessions)} sessions are open: close some first")
        return _json(orjson.dumps({"session_id": session_id, "api_key": api_key}))

    async def _close_session(self, request: web.Request) -> web.Response:
        self._check_admin(request)
        session = self._sessions.close(request.match_info["session_id"], self._clock.now())
        turns = [_turn_fields(turn) for turn in session.turns]
        return _json(orjson.dumps({"turns": turns}, option=orjson.OPT_SERIALIZE_NUMPY))

    async def _chat(self, request: web.Request) -> web.Response:
        session = self._authenticate(request)
        chat = parse_chat(await request.read())
        request_id = request.headers.get(REQUEST_ID, "")
        index = session.answered(request_id, chat.messages)
        if index is None:
            index = await self._sample(session, chat, request_id)
        turn = session.turns[index]
        reply_id = f"chatcmpl-{session.session_id}-{index + 1}"
        created = int(datetime.fromisoformat(date_utc()).timestamp())
        return _json(chat_body(reply_id, created, turn, self._text(turn.completion_ids)))

    async def _models(self, request: web.Request) -> web.Response:
        self._authenticate(request)
        return _json(models_body())

    async def _health(self, request: web.Request) -> web.Response:
        """503 without an engine: the gateway lives, but nothing should be routed to it."""
        try:
            health = await self._recorder.engine.health()
        except EngineUnavailable:
            status, engine = 503, None
        else:
            status, engine = 200, {"version": health.version, "digest": health.digest}
        facts = {"engine": engine, "inflight": self._inflight, "sessions": len(self._sessions)}
        return _json(orjson.dumps(facts), status)

    def _check_admin(self, request: web.Request) -> None:
        if not hmac.compare_digest(_bearer(request).encode(), self._admin_key):
            raise Refusal(401, "invalid_api_key", "this route needs the admin key")

    def _authenticate(self, request: web.Request) -> Session:
        session = self._sessions.authenticate(_bearer(request), self._clock.now())
        if session is None:
            raise Refusal(401, "invalid_api_key", "the key belongs to no open session")
        return session

    def _sampling(self, chat: ChatRequest, prompt_tokens: int) -> SamplingParams:
        room = self._max_length - prompt_tokens
        wanted = max(room, 1) if chat.max_tokens is None else chat.max_tokens
        if wanted > room:
            raise Refusal(
                400,
                "context_length_exceeded",
                f"{prompt_tokens} prompt tokens and {wanted} to sample exceed the context of {self._max_length}",
                param="messages",
            )
        return SamplingParams(
            max_tokens=wanted,
            temperature=chat.temperature,
            top_p=chat.top_p,
            top_k=chat.top_k,
            stop_ids=(self._sessions.template.end_id,),
            seed=chat.seed,
            priority=chat.priority,
        )

    async def _sample(self, session: Session, chat: ChatRequest, request_id: str) -> int:
        """Have the engine answer; says which turn of the session that became."""
        prompt_ids = _prompt(session, chat.messages)
        turn = await self._generate(session, prompt_ids, self._sampling(chat, len(prompt_ids)))
        return session.record(chat.messages, turn, self._text(turn.completion_ids), request_id)

    def _text(self, token_ids: Ids) -> str:
        return self._sessions.template.decode(token_ids.tolist())

    async def _generate(self, session: Session, prompt_ids: Sequence[int], params: SamplingParams) -> Turn:
        if self._inflight >= self._max_inflight:
            raise Refusal(429, "rate_limit_exceeded", f"{self._inflight} model calls are in progress: try again")
        self._inflight += 1
        try:
            return await self._recorder.sample(prompt_ids, params, session.session_id)
        except ValueError as error:
            raise Refusal(400, "invalid_request", f"the engine refused: {error}") from error
        finally:
            self._inflight -= 1


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into an answer in OpenAI's error shape."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return _refuse(refusal)
    except SessionLost as error:
        return _refuse(Refusal(404, "session_not_found", str(error)))
    except EngineUnavailable as error:
        return _refuse(Refusal(503, "engine_unavailable", str(error)))
    except CaptureError as error:
        # Not 503: asking again would be answered the same, and the rollout's record shall name the reason.
        logger.error("%s %s: %s", request.method, request.rel_url.raw_path, error)
        return _refuse(Refusal(500, "capture_failed", str(error)))
    except web.HTTPException as error:
        return _refuse(Refusal(error.status, HTTP_CODES.get(error.status, "invalid_request"), error.text or ""))
    except Exception as error:  # noqa: BLE001 - the last resort of a server: the caller gets an answer, we get a trace
        # The error's own message could quote a prompt, so only its type and place are logged.
        place = "".join(traceback.format_tb(error.__traceback__))
        logger.error("%s %s failed: %s\n%s", request.method, request.rel_url.raw_path, type(error).__name__, place)
        return _refuse(Refusal(500, "internal_error", f"the gateway failed: {type(error).__name__}"))


def _prompt(session: Session, messages: Sequence[Message]) -> list[int]:
    try:
        return session.prompt_for(messages)
    except ValueError as error:
        raise Refusal(400, "invalid_request", str(error), param="messages") from error


def _turn_fields(turn: Turn) -> dict[str, object]:
    return {
        "prompt_ids": turn.prompt_ids,
        "completion_ids": turn.completion_ids,
        "logprobs": turn.logprobs,
        "versions": turn.versions,
        "finish": turn.finish.value,
        "temperature": turn.temperature,
        "payload": turn.payload,
    }


def _bearer(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" and key.isascii() else ""  # no key of ours has other characters


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _refuse(refusal: Refusal) -> web.Response:
    response = _json(refusal.body(), refusal.status)
    if refusal.status in (429, 503):
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
