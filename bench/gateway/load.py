"""The load of `bench gateway`: many callers in one process, each with one connection and one call at a time.

    bench ── one order per line ──▶ this process ── what was measured, per line ──▶ bench

Like wrk (raw connections, no HTTP library, requests prepared beforehand), but callers can hold conversations: where a
gateway has sessions, each conversation opens one, makes its calls with the session's key and closes it, which brings
all of its tokens back. Opening and closing take their time from the calls, and are counted as none. Every answer is
checked; one wrong answer fails the order. How fast this process is at most shows in the row ``direct``.
"""

import asyncio
import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import IO, Self, cast, final

import orjson
import uvloop

from bench.programs import environment
from etude.errors import InfrastructureError

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
SLACK_S = 60.0
"""Beyond ``MOST_S``, for connecting and for the last answers; then the order has failed."""
MOST_S = 40.0
"""When calls are not counted any more, however few were answered."""
QUOTED_BYTES = 300
"""Quoted length of a wrong answer in an error: its end is the most useful part."""
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CONTENT = re.compile(rb'"content": ?"[^"]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The API through which a gateway is called."""

    port: int
    """On the loopback."""
    key: str
    """Sent as the bearer's; ``sessions`` are opened with it."""
    sessions: bool = False
    """True if each conversation has its own session and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Parameters of the load on a gateway."""

    endpoint: Endpoint
    bodies: tuple[str, ...]
    """The calls of a conversation, in order; it is held again and again."""
    expected: str
    """Every right answer contains it."""
    concurrency: int
    """Callers."""
    seconds: float
    """Duration of the calls; longer until there is one answer per caller on average."""
    stream: bool = False

    @classmethod
    def parse(cls, line: str) -> "Order":
        """The inverse of ``json.dumps(asdict(order))``."""
        tree = json.loads(line)
        return cls(**{**tree, "endpoint": Endpoint(**tree["endpoint"]), "bodies": tuple(tree["bodies"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements by the callers."""

    calls: int
    """Answered calls, including those after the end of the time: the divisor of the gateway's CPU seconds."""
    per_s: float
    """Calls answered per second."""
    p50_s: float
    p99_s: float
    first_p50_s: float | None
    """Until the first text of a streamed answer."""


# ── the bench's end ─────────────────────────────────────────────────────────────────────────────────────────────────


@final
class LoadProcess:
    """The process that makes the load; leaving it ends the process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gateway.load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, order: Order) -> Measured:
        """Fill an order. Raises :class:`~etude.errors.InfrastructureError` with the first thing that went wrong."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise InfrastructureError("the load's process ended; what it said last is on standard error")
        answer = json.loads(line)
        if "error" in answer:
            raise InfrastructureError(answer["error"])
        return Measured(**answer)


# ── the load's end ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Answer:
    """One answer, as it comes."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    first_at: float | None = None
    """When the first text of a stream was there, by ``time.perf_counter``."""


@final
class Connection(asyncio.Protocol):
    """A kept-alive connection with one request in progress at a time."""

    def __init__(self) -> None:
        self._head = b""
        self._left: int | None = None
        self._answer = Answer()
        self._streamed = False
        self._done: asyncio.Future[Answer] | None = None

    async def ask(self, request: bytes, *, stream: bool = False) -> Answer:
        """Send a whole request and wait for the whole answer. Raises ``ConnectionError`` when there is none."""
        if self._transport.is_closing():
            raise ConnectionResetError("the gateway closed the connection")
        self._answer, self._streamed = Answer(), stream
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by descent

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionResetError("the gateway hung up"))

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        answer = self._answer
        if not answer.status:
            self._head += data
            head_end = self._head.find(HEAD_END)
            if head_end < 0:
                return
            head, data = self._head[:head_end], self._head[head_end + len(HEAD_END) :]
            self._head = b""
            status, length = _STATUS.match(head), _LENGTH.search(head)
            assert status is not None, head
            answer.status, self._left = int(status[1]), int(length[1]) if length else None
        answer.body += data
        if self._streamed and answer.first_at is None and _CONTENT.search(answer.body):
            answer.first_at = time.perf_counter()
        # JSON and events have no carriage returns of their own, so that the last chunk cannot stand within one.
        whole = answer.body.endswith(LAST_CHUNK) if self._left is None else len(answer.body) >= self._left
        if whole and self._done is not None and not self._done.done():
            self._done.set_result(answer)


@final
class Crowd:
    """The callers of one order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._bodies = [body.encode() for body in order.bodies]
        self._expected = order.expected.encode()
        self._latencies: list[float] = []
        self._firsts: list[float] = []
        self._calls = 0
        self._started = self._ended = 0.0

    async def run(self) -> Measured:
        """Everybody calls until time is up. Raises an ``ExceptionGroup`` of what went wrong, or ``TimeoutError``."""
        connections: list[Connection] = []
        try:
            async with asyncio.timeout(MOST_S + SLACK_S), asyncio.TaskGroup() as group:
                connections += [await self._connect() for _ in range(self._order.concurrency)]
                self._started = time.perf_counter()
                for connection in connections:
                    group.create_task(self._call_on(connection))
        finally:
            for connection in connections:
                connection.close()
        elapsed_s = (self._ended or time.perf_counter()) - self._started
        latencies, firsts = sorted(self._latencies), sorted(self._firsts)
        return Measured(
            calls=self._calls,
            per_s=len(latencies) / elapsed_s,
            p50_s=quantile(latencies, 0.5),
            p99_s=quantile(latencies, 0.99),
            first_p50_s=quantile(firsts, 0.5) if firsts else None,
        )

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._order.endpoint.port)
        return connection

    async def _call_on(self, connection: Connection) -> None:
        """One caller."""
        endpoint = self._order.endpoint
        while not self._ended:
            session_id, key = await self._open(connection) if endpoint.sessions else ("", endpoint.key)
            head = f"POST /v1/chat/completions HTTP/1.1\r\n{_headers(key)}content-type: application/json\r\n".encode()
            for body in self._bodies:
                if self._ended:
                    break
                await self._call(connection, b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
            if endpoint.sessions:
                closing = f"DELETE /sessions/{session_id} HTTP/1.1\r\n{_headers(endpoint.key)}\r\n"
                _check(await connection.ask(closing.encode()), b"")

    async def _open(self, connection: Connection) -> tuple[str, str]:
        """A new session's id and key."""
        opening = f"POST /sessions HTTP/1.1\r\n{_headers(self._order.endpoint.key)}content-length: 2\r\n\r\n{{}}"
        answer = await connection.ask(opening.encode())
        _check(answer, b"")
        fields = orjson.loads(answer.body)
        return fields["session_id"], fields["api_key"]

    async def _call(self, connection: Connection, request: bytes) -> None:
        asked_at = time.perf_counter()
        answer = await connection.ask(request, stream=self._order.stream)
        now = time.perf_counter()
        _check(answer, self._expected)
        self._calls += 1
        if self._ended:
            return
        self._latencies.append(now - asked_at)
        if self._order.stream:
            if answer.first_at is None:
                raise ConnectionError("a stream without text was answered")
            self._firsts.append(answer.first_at - asked_at)
        elapsed_s = now - self._started
        enough = elapsed_s >= self._order.seconds and len(self._latencies) >= self._order.concurrency
        if enough or elapsed_s >= MOST_S:
            self._ended = now


def quantile(ascending: Sequence[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def _headers(key: str) -> str:
    return f"host: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"


def _check(answer: Answer, expected: bytes) -> None:
    if answer.status != 200 or expected not in answer.body:
        quoted = bytes(answer.body[-QUOTED_BYTES:]).decode(errors="replace")
        raise ConnectionError(f"status {answer.status}, expected 200 and {expected.decode()!r}: … {quoted}")


def _filled(line: str) -> Mapping[str, object]:
    """Execute an order; returns the measurements, or the first error."""
    try:
        return asdict(uvloop.run(Crowd(Order.parse(line)).run()))
    except TimeoutError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except ExceptionGroup as group:
        first = group.exceptions[0]
        return {"error": f"{type(first).__name__}: {first}"}


def main(orders: IO[str], answers: IO[str]) -> None:
    """Fill orders until there are no more."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)  # its pauses would be taken for the gateway's
    for line in orders:
        answers.write(json.dumps(_filled(line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
