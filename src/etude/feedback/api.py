"""The requests of the feedback API, without HTTP: bodies in, bodies out.

    POST /feedback                one event, a JSON list, or JSON lines, at most MAX_BATCH
                                  → {"results": [{"event_id", "result", "why"}, …]} in the order of the events
    GET  /feedback/sessions/{id}  the stored state of a session of the caller's product, by its id or name

Owns the responses, which are sent only after the data are on disk. The gateway owns keys, budgets and HTTP; ``run``
connects the two (:mod:`etude.run.live_sessions`).
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import final

import orjson

from etude.clock import unix_s
from etude.feedback.join import EventResult
from etude.feedback.signals import Event, Pseudonym, RefusedEvent, read_report
from etude.feedback.store import FeedbackStore, SessionStatus, add_counts, read_status
from etude.feedback.writer import StoreWriter
from etude.ledger.database import Database
from etude.types import Json

ANSWER_S = 30.0
"""Maximum wait until a report is on disk; after a timeout its sender retries with the same event ids."""


@final
class FeedbackApi:
    """Handler of clients' requests; ``pseudonym`` maps a product's users to pseudonyms."""

    def __init__(self, writer: StoreWriter, pseudonym: Pseudonym, *, clock: Callable[[], float] = unix_s) -> None:
        self._writer = writer
        self._pseudonym = pseudonym
        self._clock = clock

    def read(self, body: bytes) -> list[Event | RefusedEvent]:
        """The events of a report. Raises :class:`~etude.feedback.signals.NoReport`."""
        return read_report(body, self._pseudonym)

    async def report(self, product: str, events: list[Event | RefusedEvent]) -> bytes:
        """Store the events of ``product``, the id of its key; return the response body once they are on disk.

        Raises ``TimeoutError`` and :class:`~etude.errors.InfrastructureError`.
        """
        sound = [event for event in events if isinstance(event, Event)]
        work = partial(_report, self._writer.store, product, sound, len(events) - len(sound), self._clock)
        async with asyncio.timeout(ANSWER_S):
            outcomes = iter(await asyncio.shield(asyncio.wrap_future(self._writer.submit(work))))
        return orjson.dumps({"results": [_result(event, outcomes) for event in events]})

    async def status(self, product: str, name: str) -> bytes | None:
        """The body that describes a session of ``product``; ``None`` if there is none with this id or name."""
        work = partial(read_status, product, name, self._writer.store.window_s)
        async with asyncio.timeout(ANSWER_S):
            status = await asyncio.wrap_future(self._writer.submit(work))
        return None if status is None else orjson.dumps(_facts(status))


def _report(
    store: FeedbackStore, product: str, events: list[Event], refused: int, clock: Callable[[], float], db: Database
) -> list[EventResult]:
    add_counts(db, {EventResult.REFUSED: refused})
    return store.reporting(product, events, clock)(db)


def _result(event: Event | RefusedEvent, outcomes: Iterator[EventResult]) -> dict[str, Json]:
    if isinstance(event, RefusedEvent):
        return {"event_id": event.event_id, "result": EventResult.REFUSED, "why": event.reason}
    return {"event_id": event.event_id, "result": next(outcomes)}


def _facts(status: SessionStatus) -> dict[str, Json]:
    session = status.session
    return {
        "session_id": session.session_id,
        "name": session.name,
        "template": session.template,
        "region": session.region,
        "turns": session.turns,
        "opened_at": session.opened_at,
        "ended_at": session.ended_at,
        "closes_at": status.closes_at,
        "result": status.result,
        "signals": dict(status.signals),
    }
