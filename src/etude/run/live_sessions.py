"""Live sessions of a run: their storage by gateways, and the feedback API.

    gateway ── answers ──▶ StoreJournal ─┐
    HTTP ── events ──▶ FeedbackApi ──────┴─▶ StoreWriter ── group commit ──▶ feedback store

Wiring only: :mod:`etude.gateway.capture.live` decides what is recorded, :mod:`etude.feedback.store` what is stored,
:mod:`etude.gateway.http.auth` who may report.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast, final

from aiohttp import web

from etude.clock import unix_s
from etude.config.feedback import REDACTORS, FeedbackConfig
from etude.errors import InfrastructureError
from etude.feedback.api import FeedbackApi
from etude.feedback.privacy import forget_sessions
from etude.feedback.redaction import Redaction, Redactor
from etude.feedback.signals import NoReport
from etude.feedback.store import FeedbackStore, Filter, Work, end_all_of, end_sessions, unchanged, withdraw_named
from etude.feedback.writer import StoreBusy, StoreWriter
from etude.gateway.api import chat
from etude.gateway.api.calls import RETRY_AFTER_S, RETRYABLE, ApiError
from etude.gateway.capture.live import LiveRecorder
from etude.gateway.http.app import GatewayState, Handler, Headers, Route, RouteTable, read_body, respond
from etude.gateway.http.auth import Permission, retry_after
from etude.gateway.request_log import RequestRecord
from etude.run.folder import RunFolder, feedback_place
from etude.run.keys import KeyRole, pseudonym
from etude.run.process_name import ProcessName
from etude.tokens.chat import read_tokenizer
from etude.tokens.vocabulary import Spelling
from etude.types import LiveAnswer

MAX_REPORT_BYTES = 2 * 2**20
"""Maximum size of a report: a thousand events of 2 KiB."""
FILLER = "x"
"""Text whose first token replaces a redacted one."""
T = TypeVar("T")
STOP_S = 5.0
"""Longest time for pending writes when a gateway ends."""
ANY_ORIGIN: Headers = (("Access-Control-Allow-Origin", "*"),)
"""Web pages may report from anywhere: the API needs a key and accepts no cookies."""
PREFLIGHT: Headers = (
    *ANY_ORIGIN,
    ("Access-Control-Allow-Methods", "POST"),
    ("Access-Control-Allow-Headers", "authorization, content-type"),
    ("Access-Control-Max-Age", "86400"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSessions:
    """The components of a gateway for live sessions."""

    recorder: LiveRecorder
    api: FeedbackApi

    def routes(self, state: GatewayState) -> RouteTable:
        """The requests of the feedback API."""
        return FeedbackRoutes(state, self.api).table()


@asynccontextmanager
async def open_live_sessions(
    folder: RunFolder, config: FeedbackConfig, name: ProcessName
) -> AsyncIterator[LiveSessions]:
    """Record the live sessions of the gateway ``name``; sessions left open by its predecessor are ended."""
    users = partial(pseudonym, folder.key(KeyRole.USERS))
    redaction = _redaction(folder, config)
    writer = StoreWriter(
        partial(FeedbackStore.open, feedback_place(folder), window_s=config.window_s, keep_filter=redaction)
    )
    await asyncio.to_thread(writer.start)
    try:
        await asyncio.wrap_future(writer.submit(partial(end_all_of, str(name), unix_s())))
        yield LiveSessions(
            recorder=LiveRecorder(StoreJournal(writer, str(name)), users, regions=config.regions),
            api=FeedbackApi(writer, users),
        )
    finally:
        await asyncio.to_thread(writer.stop, STOP_S)


def _redaction(folder: RunFolder, config: FeedbackConfig) -> Filter:
    """The redaction of the recipe, for the tokens of the run's model."""
    if not config.redactors:
        return unchanged
    redactors = [cast("Redactor", REDACTORS.find(name)) for name in config.redactors]
    tokenizer = read_tokenizer(folder.model)
    filler = tokenizer.encode(FILLER, add_special_tokens=False).ids[0]
    return Redaction(redactors, Spelling(tokenizer), filler)


@final
class StoreJournal:
    """Stores the live sessions of one gateway in the feedback store."""

    def __init__(self, writer: StoreWriter, gateway: str) -> None:
        self._writer = writer
        self._gateway = gateway

    async def keep(self, answer: LiveAnswer) -> None:
        """Store an answer; returns once it is on disk. It is stored even if the caller disconnects."""
        work = self._writer.store.keeping(answer, self._gateway, unix_s())
        await asyncio.shield(asyncio.wrap_future(self._writer.submit(work)))

    def end(self, session_id: str) -> None:
        """End a session: no further turns follow. If the store does not take that, the session ends when it was idle
        for long (:meth:`~etude.feedback.store.FeedbackStore.end_idle`).
        """
        with suppress(StoreBusy):
            self._writer.submit(partial(end_sessions, [session_id], unix_s()))

    async def withdraw(self, session_id: str) -> None:
        """Delete everything stored of a session; tried until it is done, even if the caller stops waiting."""
        await self._certainly(partial(forget_sessions, [session_id]))

    async def withdraw_named(self, owner: str, name: str, user: str) -> None:
        """The same for the newest session with a name, if there is one, even if it was handed on."""
        await self._certainly(partial(withdraw_named, owner, name, user, unix_s()))

    async def _certainly(self, work: Work) -> None:
        await asyncio.shield(asyncio.wrap_future(self._writer.submit(work, must_run=True)))


@final
class FeedbackRoutes:
    """Handlers of the feedback API."""

    def __init__(self, state: GatewayState, api: FeedbackApi) -> None:
        self._auth = state.auth
        self._clock = state.clock
        self._api = api

    def table(self) -> RouteTable:
        """Path → method → handler."""
        return {
            "/feedback": {"POST": _readable_anywhere(self._report), "OPTIONS": self._preflight},
            "/feedback/sessions/{}": {"GET": self._status},
        }

    async def _report(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        key = self._auth.key(request.headers, Permission.REPORT, self._clock.now())
        record.key_id = key.key_id
        body = await read_body(request, record)
        if len(body) > MAX_REPORT_BYTES:
            raise ApiError(413, "request_too_large", f"the body is larger than {MAX_REPORT_BYTES} bytes: send less")
        try:
            events = self._api.read(body)
        except NoReport as error:
            raise ApiError(400, "invalid_request", str(error)) from error
        # Each event counts as one request, even in a batch.
        self._auth.charge_request(key, self._clock.now(), max(1, len(events)))
        return respond(record, await _in_reach(self._api.report(key.product, events)), status=202, headers=ANY_ORIGIN)

    async def _preflight(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        return respond(record, b"", status=204, headers=PREFLIGHT)

    async def _status(self, request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        key = self._auth.key(request.headers, Permission.STATUS, self._clock.now())
        record.key_id = key.key_id
        self._auth.charge_request(key, self._clock.now())
        body = await _in_reach(self._api.status(key.product, route.parameter))
        if body is None:
            raise ApiError(
                404, "session_not_found", "no session with this id or name is stored, or it belongs to another product"
            )
        return respond(record, body)


async def _in_reach(answer: Coroutine[None, None, T]) -> T:
    """The answer of the store. Raises :class:`~etude.gateway.api.calls.ApiError` if it is unavailable."""
    try:
        return await answer
    except (TimeoutError, InfrastructureError) as error:
        message = "the feedback store is unavailable: send the same events again"
        raise ApiError(503, "feedback_unavailable", message) from error


def _readable_anywhere(handle: Handler) -> Handler:
    """Wrap a handler so that the calling web page can also read its errors."""

    async def handled(request: web.BaseRequest, route: Route, record: RequestRecord) -> web.StreamResponse:
        try:
            return await handle(request, route, record)
        except ApiError as error:
            record.code, headers = error.code, ANY_ORIGIN
            if error.status in RETRYABLE:
                headers = (*headers, ("Retry-After", str(retry_after(error.retry_after_s or RETRY_AFTER_S))))
            return respond(record, chat.PROTOCOL.error_body(error), status=error.status, headers=headers)

    return handled
