"""A client with which a product reports its users' reactions to the model's output (docs/live.md).

    feedback = etude.FeedbackClient("https://gateway.example", api_key)
    feedback.report("edited", 0.25, completion=answer.id)          returns at once
    feedback.report("thumbs", -1, session="chat-17", turn=2)
    feedback.close()                                               sends queued events

Events are queued in memory and sent in batches by a thread. If the gateway is unavailable, they are sent again with the
same event ids, so that none counts twice; if the queue is full, the oldest events are dropped and counted. The first
failure of an outage, the first dropped and the first refused event are logged as warnings. Needs only the standard
library.
"""

import json
import logging
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from types import TracebackType
from typing import Final, Self, final

from etude.backoff import Backoff
from etude.errors import ConfigError, InfrastructureError

MAX_BATCH: Final = 500
"""Most events in one request; the gateway accepts 1000."""
BACKOFF: Final = Backoff(first_s=0.25, longest_s=30.0, jitter=0.5)
"""Pauses between tries to reach the gateway."""
RETRYABLE: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses with which the same request may succeed later."""
DIVISIBLE: Final = frozenset({400, 413})
"""Statuses that may be due to one event of a batch, or to its size: its halves are sent separately."""
REQUEST_S: Final = 40.0
"""Longest time of one request; the gateway answers or gives up within 30 s."""
REMEMBERED: Final = 100
"""Number of refused events whose reasons are stored."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedReport:
    """An event that the gateway permanently refused."""

    event_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queued:
    """An event to be sent."""

    event_id: str
    text: str
    """The event as JSON."""


@dataclass(frozen=True, slots=True)
class _ReportResult:
    """One result of the gateway's answer."""

    event_id: str
    result: str
    why: str


@dataclass(frozen=True, slots=True)
class _Unavailable:
    """A try that the gateway did not answer."""

    reason: str
    retry_after_s: float = 0.0


@final
class FeedbackClient:
    """Reports signals to the gateway at ``url`` with a production or a feedback key; safe to share between threads.

    At most ``max_buffered`` events are queued, and they are sent every ``interval_s`` seconds.
    """

    def __init__(self, url: str, api_key: str, *, max_buffered: int = 10_000, interval_s: float = 0.5) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url {url!r}: expected http://HOST:PORT or https://HOST:PORT of a gateway")
        self.counts: Counter[str] = Counter()
        """Result → number of events: the gateway's results (docs/live.md), and ``dropped`` for a full queue."""
        self.refused: deque[RefusedReport] = deque(maxlen=REMEMBERED)
        """The newest refused events."""
        self._url = f"{url.rstrip('/')}/feedback"
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._interval_s = interval_s
        self._max_buffered = max_buffered
        self._waiting: deque[_Queued] = deque()
        self._sending = 0
        self._closing = False
        self._warned: set[str] = set()
        """Troubles that were logged and have not ended since: ``unavailable``, ``dropped``, ``refused``."""
        self._gave_up = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="feedback client", daemon=True)
        self._thread.start()

    def report(
        self,
        kind: str,
        value: float | None = None,
        *,
        session: str = "",
        completion: str = "",
        turn: int | None = None,
        **more: object,
    ) -> str:
        """Report one event and return its id; it is sent later.

        Raises ``ValueError`` for a field that JSON cannot express, and once the client is closed;
        :class:`~etude.errors.InfrastructureError` if the thread that sends has ended, as it has in a forked process.
        It concerns a ``session``, one ``turn`` of it, or the answer with id ``completion``. ``more`` are the other
        fields of an event: ``span``, ``user``, ``sent_at``, and an ``event_id`` of your own.
        """
        about = {"session": session or None, "completion": completion or None, "turn": turn}
        event = {"event_id": uuid.uuid4().hex, "sent_at": time.time(), "kind": kind, "value": value, **about, **more}
        queued = _Queued(event_id=str(event["event_id"]), text=_json(event))
        with self._changed:
            if self._closing:
                raise ValueError("the client is closed: make another one")
            if not self._thread.is_alive():
                raise InfrastructureError("the client's thread has ended: make another client, after any os.fork()")
            self._waiting.append(queued)
            if len(self._waiting) + self._sending > self._max_buffered:
                self._waiting.popleft()
                self.counts["dropped"] += 1
                self._warn("dropped", f"the oldest are dropped: more than {self._max_buffered} events wait")
            self._changed.notify_all()
        return queued.event_id

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the queue is empty, at most ``timeout_s``; returns true if it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._sending, timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Send queued events, for at most ``timeout_s``, and end; returns true if all were sent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._gave_up.set()
        return not self._waiting and not self._sending

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while batch := self._next():
            parts, delays = [batch], BACKOFF.delays()
            while parts:
                rest = self._send(parts[-1])
                if not isinstance(rest, float):
                    parts[-1:], delays = rest, BACKOFF.delays()
                elif self._gave_up.wait(max(next(delays), rest)):
                    return
            with self._changed:
                self._sending = 0
                self._changed.notify_all()

    def _next(self) -> list[_Queued]:
        """Wait for the next events to send; empty if the client is closed and all are sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if len(self._waiting) < MAX_BATCH and not self._closing:
                self._changed.wait_for(lambda: len(self._waiting) >= MAX_BATCH or self._closing, self._interval_s)
            self._sending = min(len(self._waiting), MAX_BATCH)
            return [self._waiting.popleft() for _ in range(self._sending)]

    def _send(self, batch: list[_Queued]) -> float | list[list[_Queued]]:
        """Send a batch once. Returns the seconds that the gateway requests to wait before the next try, or the parts to
        send instead: none if the batch is finished.
        """
        try:
            answer = self._post(batch)
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            answer = _Unavailable(f"{type(error).__name__}: {error}")  # or something else answered in its place
        if isinstance(answer, _Unavailable):
            self._warn("unavailable", f"{self._url} is tried until it answers: {answer.reason}")
            return answer.retry_after_s
        if answer is None:
            middle = len(batch) // 2
            return [batch[middle:], batch[:middle]]  # the last one is sent first
        self._record(answer)
        return []

    def _post(self, batch: list[_Queued]) -> list[_ReportResult] | _Unavailable | None:
        """The results of a batch; ``None`` if the gateway refused it as a whole and may accept its parts."""
        body = f"[{','.join(one.text for one in batch)}]".encode()
        request = urllib.request.Request(self._url, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
                results = json.load(response)["results"]
            return [_ReportResult(str(one["event_id"]), str(one["result"]), str(one.get("why", ""))) for one in results]
        except urllib.error.HTTPError as error:
            with error:
                if error.code in RETRYABLE:
                    return _Unavailable(f"HTTP {error.code}", _seconds(error.headers.get("Retry-After")))
                if error.code in DIVISIBLE and len(batch) > 1:
                    return None
                reason = f"HTTP {error.code}: {error.read(2000).decode(errors='replace')}"
        return [_ReportResult(one.event_id, "refused", reason) for one in batch]

    def _record(self, results: Sequence[_ReportResult]) -> None:
        refused = [RefusedReport(event_id=one.event_id, reason=one.why) for one in results if one.result == "refused"]
        with self._changed:
            self.counts.update(one.result for one in results)
            self.refused.extend(refused)
            self._warned -= {"unavailable", "dropped"} if refused else {"unavailable", "dropped", "refused"}
            if refused:
                self._warn("refused", f"{self._url} refused event {refused[0].event_id!r}: {refused[0].reason}")

    def _warn(self, trouble: str, message: str) -> None:
        """Log a trouble, once until it has ended."""
        if trouble not in self._warned:
            self._warned.add(trouble)
            logger.warning("feedback: %s", message)


def _json(event: dict[str, object]) -> str:
    """An event as JSON, without the fields that are ``None``. Raises ``ValueError`` with the field's name."""
    fields: list[str] = []
    for name, field in event.items():
        try:
            text = json.dumps(field, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name} = {field!r} of type {type(field).__name__} cannot be sent as JSON ({error}): use a finite "
                f"number or a text, such as float({name}) or str({name})"
            ) from error
        if field is not None:
            fields.append(f"{json.dumps(name)}: {text}")
    return f"{{{', '.join(fields)}}}"


def _seconds(retry_after: str | None) -> float:
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0
