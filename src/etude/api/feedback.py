"""A client with which a product reports its users' reactions to the model's output (docs/live.md).

    feedback = etude.FeedbackClient("https://gateway.example", api_key)
    feedback.report("edited", 0.25, completion=answer.id)          returns at once
    feedback.report("thumbs", -1, session="chat-17", turn=2)
    feedback.close()                                               sends queued events

Events are queued in memory and sent in batches by a thread. If the gateway is unavailable, they are sent again with the
same event ids, so that none counts twice; if the queue is full, the oldest events are dropped and counted. Needs only
the standard library.
"""

import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter, deque
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, final

from etude.backoff import Backoff
from etude.errors import ConfigError

MAX_BATCH: Final = 500
"""Most events in one request; the gateway accepts 1000."""
BACKOFF: Final = Backoff(first_s=0.25, longest_s=30.0, jitter=0.5)
"""Pauses between tries to reach the gateway."""
RETRYABLE: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses with which the same request may succeed later."""
REQUEST_S: Final = 40.0
"""Longest time of one request; the gateway answers or gives up within 30 s."""
REMEMBERED: Final = 100
"""Number of refused events whose reasons are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedReport:
    """An event that the gateway permanently refused."""

    event_id: str
    reason: str


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
        self._waiting: deque[dict[str, object]] = deque()
        self._sending = 0
        self._closing = False
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
        """Report one event and return its id; it is sent later. Raises ``ValueError`` once the client is closed.

        It concerns a ``session``, one ``turn`` of it, or the answer with id ``completion``. ``more`` are the other
        fields of an event: ``span``, ``user``, ``sent_at``, and an ``event_id`` of your own.
        """
        about = {"session": session or None, "completion": completion or None, "turn": turn}
        event = {"event_id": uuid.uuid4().hex, "sent_at": time.time(), "kind": kind, "value": value, **about, **more}
        with self._changed:
            if self._closing:
                raise ValueError("the client is closed: make another one")
            self._waiting.append({name: field for name, field in event.items() if field is not None})
            if len(self._waiting) + self._sending > self._max_buffered:
                self._waiting.popleft()
                self.counts["dropped"] += 1
            self._changed.notify_all()
        return str(event["event_id"])

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
            for delay_s in BACKOFF.delays():
                retry_after_s = self._sent(batch)
                if retry_after_s is None:
                    break
                if self._gave_up.wait(max(delay_s, retry_after_s)):
                    return
            with self._changed:
                self._sending = 0
                self._changed.notify_all()

    def _next(self) -> list[dict[str, object]]:
        """Wait for the next events to send; empty if the client is closed and all are sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if len(self._waiting) < MAX_BATCH and not self._closing:
                self._changed.wait_for(lambda: len(self._waiting) >= MAX_BATCH or self._closing, self._interval_s)
            self._sending = min(len(self._waiting), MAX_BATCH)
            return [self._waiting.popleft() for _ in range(self._sending)]

    def _sent(self, batch: list[dict[str, object]]) -> float | None:
        """Send a batch once; ``None`` if it is finished, otherwise the seconds to wait that the gateway requests."""
        request = urllib.request.Request(self._url, json.dumps(batch).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
                results = json.load(answer)["results"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code in RETRYABLE:
                    return _seconds(error.headers.get("Retry-After"))
                reason = f"HTTP {error.code}: {error.read(2000).decode(errors='replace')}"
            results = [{"event_id": one["event_id"], "result": "refused", "why": reason} for one in batch]
        except (OSError, ValueError, KeyError):  # the gateway is unavailable, or something else answered
            return 0.0
        with self._changed:
            for one in results:
                self.counts[one["result"]] += 1
                if one["result"] == "refused":
                    self.refused.append(RefusedReport(event_id=one["event_id"], reason=one["why"]))
        return None


def _seconds(retry_after: str | None) -> float:
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0
