"""The record of each request, the access log and the metrics computed from it.

    RequestRecord, filled in while a request is served ──▶ Metrics (Prometheus' text format)
                                                      └──▶ AccessLog: {"time":1785312000.123,"route":"POST /v1/…", …}

Owns which facts of a request stay, the names of metrics, their labels and buckets, and how lines reach a file without
the event loop waiting for a disk: they gather in memory and a thread writes them once a second. No text of a
conversation gets here, and neither does a key or a path that holds one: a route is the pattern that matched. The buffer
is bounded; what does not fit is counted, and the count is written as soon as there is room again. Labels come from
closed sets: no caller can make a series of its own.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import final

import orjson
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from etude.gateway.api.calls import OVER_BUDGET
from etude.gauges import GaugeCollector, Gauges

FLUSH_S = 1.0
"""Pause between two writes."""
MAX_LINES = 100_000
"""Lines held while the disk does not take them: about 30 MB, and ten seconds of the fastest traffic."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request, filled in while it is served. Times are of the gateway's clock, in seconds."""

    began: float
    request_id: str = ""
    """The gateway's own id, as in the response's headers."""
    route: str = ""
    """Method and pattern, e.g. ``POST /s/{session}/v1/messages``."""
    api: str = ""
    """The API protocol of a model call, by its path; empty for any other request."""
    status: int = 0
    """HTTP status; with a stream, what it would have been had its end been known at its start."""
    code: str = ""
    """The error's code, if it is one."""
    traffic: str = ""
    """The traffic class of a request that may sample; empty for any other."""
    key_id: str = ""
    session_id: str = ""
    live_session: str = ""
    """Id of the live session that the call is recorded in; empty for none."""
    prompt_tokens: int = 0
    """Tokens of the prompt that engines read, or that was answered before."""
    completion_tokens: int = 0
    """Sampled so far; in the end those of the recorded answer."""
    reused_tokens: int = 0
    """Prompt tokens that continue an earlier turn of the session."""
    versions: tuple[int, ...] = ()
    """Weight versions that sampled the answer, ascending."""
    own_deadline: bool = False
    """True if the caller set a deadline."""
    dispatched: float | None = None
    """Time at which the engine that works on it, or did, was given the call; of several replies the last one's."""
    engine: str = ""
    """Name of that engine."""
    first_token: float | None = None
    """Time of the first sampled token."""
    ended: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0

    def note_dispatched(self, at: float | None, engine: str) -> None:
        """Note that an engine was given the call, or with ``None`` that it failed under it."""
        self.dispatched, self.engine = at, "" if at is None else engine

    @property
    def seconds(self) -> float:
        """From the first byte read to the last written."""
        return self.ended - self.began

    @property
    def waited_s(self) -> float:
        """Seconds during which no engine worked on a call that is over, engines that failed under it not counted."""
        return (self.ended if self.dispatched is None else self.dispatched) - self.began

    @property
    def first_token_s(self) -> float | None:
        """From the first byte read to the first token."""
        return None if self.first_token is None else self.first_token - self.began


@final
class AccessLog:
    """Appends records to ``file`` while :meth:`run` is running; :meth:`flush` writes the rest.

    ``wall_s`` says the time of day as Unix time.
    """

    def __init__(self, file: Path, wall_s: Callable[[], float]) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._wall_s = wall_s
        self._handover = Lock()
        """Held for a moment whenever the two below change: calls end in one thread, lines are written in another."""
        self._lines: list[bytes] = []
        self._lost = 0

    def add(self, record: RequestRecord) -> None:
        """Note a request that is over."""
        line = _line(record, self._wall_s())
        with self._handover:
            if len(self._lines) < MAX_LINES:
                self._lines.append(line)
            else:
                self._lost += 1

    async def run(self) -> None:
        """Write what was noted, for ever. Waits for the second to pass and for the disk; on shutdown cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            if self._lines:
                await asyncio.to_thread(self.flush)

    def flush(self) -> None:
        """Write what was noted so far. A disk that is full loses lines, not calls; they are counted."""
        with self._handover:
            lines, self._lines = self._lines, []
            lost, self._lost = self._lost, 0
        loss = orjson.dumps({"time": self._wall_s(), "lost_lines": lost}) + b"\n" if lost else b""
        try:
            _write_all(self._descriptor, b"".join(lines) + loss)
        except OSError:
            with self._handover:
                self._lost += len(lines) + lost

    def close(self) -> None:
        """Write the rest and let go of the file."""
        self.flush()
        with suppress(OSError):
            os.close(self._descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _line(record: RequestRecord, wall_s: float) -> bytes:
    first_token_s = record.first_token_s
    facts = {
        "time": round(wall_s, 3),
        "request": record.request_id,
        "route": record.route,
        "status": record.status,
        "code": record.code,
        "traffic": record.traffic,
        "key": record.key_id,
        "session": record.session_id,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "reused_tokens": record.reused_tokens,
        "versions": record.versions,
        "first_token_s": None if first_token_s is None else round(first_token_s, 6),
        "waited_s": round(record.waited_s, 6) if record.api else None,
        "seconds": round(record.seconds, 6),
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
    }
    return orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE)


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Upper bounds of the latency histograms: from what the gateway alone takes to the longest deadline."""
LABELS: Mapping[str, str] = {"etude_engines": "state", "etude_calls_waiting": "traffic"}
"""Gauge → its label."""


@dataclass(slots=True, kw_only=True)
class CallLoad:
    """Sums over model calls that are over."""

    calls: int = 0
    failed: int = 0
    call_s: float = 0.0
    waited_s: float = 0.0

    def add(self, record: RequestRecord) -> None:
        """Add one call."""
        self.calls += 1
        self.failed += record.status >= 400
        self.call_s += record.seconds
        self.waited_s += record.waited_s


@final
class Metrics:
    """The Prometheus registry of one gateway. ``gauges`` is called at every reading."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._registry = registry = CollectorRegistry()
        self._calls = Counter(
            "etude_calls", "Model calls that are over.", ("api", "status", "traffic"), registry=registry
        )
        self._requests = Counter("etude_requests", "Other requests that are over.", ("status",), registry=registry)
        self._seconds = Histogram(
            "etude_call_seconds", "Whole model calls.", ("traffic",), buckets=SECONDS, registry=registry
        )
        self._first_token = Histogram(
            "etude_first_token_seconds", "To the first token.", ("traffic",), buckets=SECONDS, registry=registry
        )
        self._tokens = Counter(
            "etude_tokens",
            "Tokens of calls that got any; `reused` is the part of `prompt` that continues an earlier turn.",
            ("kind", "traffic"),
            registry=registry,
        )
        self._over_budget = Counter("etude_budget_refusals", "Calls beyond their key's budget.", registry=registry)
        registry.register(GaugeCollector(gauges, LABELS))
        self._load = CallLoad()

    def count(self, record: RequestRecord) -> None:
        """Add one request that is over."""
        status, traffic = str(record.status), record.traffic
        if record.api:
            self._load.add(record)
            self._calls.labels(record.api, status, traffic).inc()
        else:
            self._requests.labels(status).inc()
        if record.code == OVER_BUDGET:
            self._over_budget.inc()
        if not record.api or not traffic:
            return
        self._seconds.labels(traffic).observe(record.seconds)
        if record.first_token_s is not None:
            self._first_token.labels(traffic).observe(record.first_token_s)
            self._tokens.labels("prompt", traffic).inc(record.prompt_tokens)
            self._tokens.labels("reused", traffic).inc(record.reused_tokens)
            self._tokens.labels("sampled", traffic).inc(record.completion_tokens)

    def take_load(self) -> CallLoad:
        """The sums since it was called the last time."""
        load, self._load = self._load, CallLoad()
        return load

    def page(self) -> bytes:
        """Everything as text."""
        return generate_latest(self._registry)
