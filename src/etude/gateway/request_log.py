"""The record of each request, the access log and the metrics computed from it.

    RequestRecord, filled in while a request is served ──▶ Metrics (Prometheus' text format)
                                                      └──▶ AccessLog: {"time":1785312000.123,"route":"POST /v1/…", …}

Owns which facts of a request are stored, the names, labels and buckets of metrics, and log writing that never blocks
the event loop: lines collect in memory and a thread writes them once a second. No conversation text, no key and no path
with a key gets here: a route is the pattern that matched. The buffer is bounded; dropped lines are counted, and the
count is written when there is room again. Labels come from closed sets: no caller can create a time series.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import final

import orjson
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from etude.gateway.api.calls import OVER_BUDGET
from etude.gauges import GaugeCollector, Gauges

FLUSH_S = 1.0
"""Seconds between two writes."""
MAX_LINES = 100_000
"""Lines held while the disk is unavailable: about 30 MB, and ten seconds of the fastest traffic."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request, filled in while it is served. Times are in seconds, on the gateway's clock."""

    began: float
    request_id: str = ""
    """The gateway's own id, as in the response's headers."""
    route: str = ""
    """Method and pattern, e.g. ``POST /s/{session}/v1/messages``."""
    api: str = ""
    """The API protocol of a model call, from its path; empty for any other request."""
    status: int = 0
    """HTTP status; for a stream, the status it would have had if its end had been known at the start."""
    code: str = ""
    """The error's code, if it is one."""
    traffic: str = ""
    """The traffic class of a request that may sample; empty for any other."""
    key_id: str = ""
    session_id: str = ""
    live_session: str = ""
    """Id of the live session that the call is recorded in; empty for none."""
    prompt_tokens: int = 0
    """Prompt tokens that engines read, or that were answered from the record."""
    completion_tokens: int = 0
    """Tokens sampled so far; at the end, those of the recorded answer."""
    reused_tokens: int = 0
    """Prompt tokens that continue an earlier turn of the session."""
    versions: tuple[int, ...] = ()
    """Weight versions that sampled the answer, ascending."""
    own_deadline: bool = False
    """True if the caller set a deadline."""
    arrived: float | None = None
    """Time at which all of a model call had been read; ``None`` if its caller never sent all of it."""
    dispatched: float | None = None
    """Time at which the current or last engine got the call; with several replies, that of the last one."""
    engine: str = ""
    """Name of that engine."""
    first_token: float | None = None
    """Time of the first sampled token."""
    ended: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0

    def note_dispatched(self, at: float | None, engine: str) -> None:
        """Record that an engine got the call, or with ``None`` that it failed during the call."""
        self.dispatched, self.engine = at, "" if at is None else engine

    @property
    def seconds(self) -> float:
        """Seconds from the first byte read to the last byte written."""
        return self.ended - self.began

    @property
    def reading_s(self) -> float:
        """Seconds until all of a finished call had arrived: time that its caller took."""
        return (self.ended if self.arrived is None else self.arrived) - self.began

    @property
    def waited_s(self) -> float:
        """Seconds without an engine working on a finished call; time at engines that failed is not counted."""
        return (self.ended if self.dispatched is None else self.dispatched) - self.began

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the first byte read to the first token."""
        return None if self.first_token is None else self.first_token - self.began


@final
class AccessLog:
    """Appends records to ``file`` while :meth:`run` is running; :meth:`flush` writes the rest.

    ``wall_s`` returns the time of day as Unix time.
    """

    def __init__(self, file: Path, wall_s: Callable[[], float]) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._wall_s = wall_s
        self._handover = Lock()
        """Held briefly to change the next two fields: calls end in one thread, another writes the lines."""
        self._lines: list[bytes] = []
        self._lost = 0

    def add(self, record: RequestRecord) -> None:
        """Add a finished request."""
        line = _line(record, self._wall_s())
        with self._handover:
            if len(self._lines) < MAX_LINES:
                self._lines.append(line)
            else:
                self._lost += 1

    async def run(self) -> None:
        """Write the added records, for ever. Waits for the interval and the disk; on shutdown cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            if self._lines:
                await asyncio.to_thread(self.flush)

    def flush(self) -> None:
        """Write the records added so far. A full disk loses lines, not calls; lost lines are counted."""
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
        """Write the rest and close the file."""
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
"""Upper bounds of the latency histograms: from the gateway's own overhead to the longest deadline."""
LABELS: Mapping[str, str] = {"etude_engines": "state", "etude_calls_waiting": "traffic"}
"""Gauge → its label."""


@dataclass(slots=True, kw_only=True)
class CallLoad:
    """Sums over finished model calls."""

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
    """The Prometheus registry of one gateway. ``gauges`` is called for each scrape."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._registry = registry = CollectorRegistry()
        calls = Counter("etude_calls", "Model calls that are over.", ("api", "status", "traffic"), registry=registry)
        requests = Counter("etude_requests", "Other requests that are over.", ("status",), registry=registry)
        seconds = Histogram(
            "etude_call_seconds", "Whole model calls.", ("traffic",), buckets=SECONDS, registry=registry
        )
        first_token = Histogram(
            "etude_first_token_seconds", "To the first token.", ("traffic",), buckets=SECONDS, registry=registry
        )
        tokens = Counter(
            "etude_tokens",
            "Tokens of calls that got any; `reused` is the part of `prompt` that continues an earlier turn.",
            ("kind", "traffic"),
            registry=registry,
        )
        # Time series by their labels: the library's own look-up takes a lock and checks the labels' names.
        self._calls, self._requests, self._tokens = cache(calls.labels), cache(requests.labels), cache(tokens.labels)
        self._seconds, self._first_token = cache(seconds.labels), cache(first_token.labels)
        self._over_budget = Counter("etude_budget_refusals", "Calls beyond their key's budget.", registry=registry)
        registry.register(GaugeCollector(gauges, LABELS))
        self._load = CallLoad()

    def count(self, record: RequestRecord) -> None:
        """Add one finished request."""
        status, traffic = str(record.status), record.traffic
        if record.api:
            self._load.add(record)
            self._calls(record.api, status, traffic).inc()
        else:
            self._requests(status).inc()
        if record.code == OVER_BUDGET:
            self._over_budget.inc()
        if not record.api or not traffic:
            return
        self._seconds(traffic).observe(record.seconds)
        if record.first_token_s is not None:
            self._first_token(traffic).observe(record.first_token_s)
            self._tokens("prompt", traffic).inc(record.prompt_tokens)
            self._tokens("reused", traffic).inc(record.reused_tokens)
            self._tokens("sampled", traffic).inc(record.completion_tokens)

    def take_load(self) -> CallLoad:
        """The sums since the previous call of this method."""
        load, self._load = self._load, CallLoad()
        return load

    def page(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self._registry)
