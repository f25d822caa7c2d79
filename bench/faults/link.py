"""A fault-injecting proxy between two processes that talk HTTP: it can answer with errors, break, or stall.

    caller ──▶ Link ──▶ server

Owns the connections through it. Bytes pass unread: HTTP/1.1 without pipelining takes turns, so the first bytes after an
answer begin a request, which is all it needs to know to answer one itself. :mod:`bench.faults.machine` decides whose
connections go through it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, final

from etude.aio import background_task

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16
START_S = 10.0
"""Longest time until the loop listens."""
LINGER_S = 5.0
"""Longest time for a caller that was answered here to hang up."""
STATUSES = (
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
"""Statuses that a link answers with."""


class Weather(Enum):
    """State of a link."""

    FAIR = auto()
    REFUSING = auto()
    """Requests are answered here, with an error."""
    BREAKING = auto()
    """Every connection is reset."""
    STALLING = auto()
    """Nothing is transferred."""


@final
class Link:
    """One proxy, with an event loop in a thread of its own; a context manager, for one run."""

    def __init__(self) -> None:
        self.port = 0
        """The port that callers connect to."""
        self.target = 0
        """The server's port."""
        self._status = STATUSES[0]
        self._weather = Weather.FAIR
        self._pairs: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._calm = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)

    def __enter__(self) -> "Link":
        self._thread.start()
        self._server = self._ask(asyncio.start_server(self._serve, HOST, 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        self._calm.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._ask(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    @contextlib.contextmanager
    def disturbed(self, weather: Weather, pick: float = 0.0) -> Iterator[None]:
        """Let ``weather`` reign meanwhile; ``pick`` in [0, 1) chooses the status of refusals."""
        self._status = STATUSES[int(pick * len(STATUSES))]
        self._ask(self._become(weather))
        try:
            yield
        finally:
            self._ask(self._become(Weather.FAIR))

    def _ask(self, work: "Coroutine[Any, Any, Any]") -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    async def _become(self, weather: Weather) -> None:
        self._weather = weather
        if weather is Weather.STALLING:
            self._calm.clear()
        else:
            self._calm.set()
        if weather is Weather.BREAKING:
            self._break_all()

    async def _shut(self) -> None:
        self._server.close()
        await self._become(Weather.BREAKING)
        own = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not own]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _break_all(self) -> None:
        for writer in self._pairs:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        self._pairs.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            await self._calm.wait()
            if self._weather is Weather.BREAKING:
                return
            answers, upstream = await asyncio.open_connection(HOST, self.target)
            self._pairs.add(upstream)
            turn = _Turn()
            async with background_task(self._answers(answers, writer, turn)):
                await self._requests(reader, (writer, upstream), turn)
        except OSError:
            pass  # an end that is gone: the other one notices
        finally:
            for end in filter(None, (writer, upstream)):
                self._pairs.discard(end)
                end.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter], turn: "_Turn"
    ) -> None:
        writer, upstream = ends
        while data := await reader.read(CHUNK_BYTES):
            await self._calm.wait()
            if self._weather is Weather.REFUSING and turn.over:
                await self._refuse(reader, writer)
                break
            turn.over = False
            upstream.write(data)
            await upstream.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, turn: "_Turn") -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._calm.wait()
            turn.over = True
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer with an error and let the caller hang up: who does so first would cut its own words off."""
        status = self._status
        writer.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await writer.drain()
                while await reader.read(CHUNK_BYTES):
                    pass


class _Turn:
    """The side that sends next on a connection."""

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over = True
        """The last bytes came from the server, or there were none: the caller's next bytes begin a request."""
