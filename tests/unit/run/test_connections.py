"""A client without a key holds no connection for long, takes no other client's place, and cannot write to a log."""

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from etude.clock import SystemClock
from etude.engines.fake import FakeEngine
from etude.engines.http import engine_app
from etude.gateway.http.app import http_server
from etude.run.connections import RESERVE, Connections, connection_limit
from etude.run.serving import listening
from waiting import WAIT_S

SECRET = b"etude-production-SECRET"
UNFINISHED = b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bea"
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK"
ENDLESS_S = 1e6
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Server = web.Server | web.Application


async def yes(request: web.BaseRequest) -> web.Response:
    return web.Response(body=b"yes")


def of_gateway() -> web.Server:
    return http_server(yes, max_body_bytes=1000)


def of_engine() -> web.Application:
    return engine_app(FakeEngine(SystemClock(), vocab_size=300, max_length=64))


@asynccontextmanager
async def serving(server: Server, connections: Connections) -> AsyncIterator[Callable[[], Awaitable[Stream]]]:
    """A server; yields a function that connects to it."""
    opened = list[Stream]()
    async with listening(server, 0, connections=connections) as port, asyncio.timeout(WAIT_S):

        async def connect() -> Stream:
            opened.append(await asyncio.open_connection("127.0.0.1", port))
            return opened[-1]

        try:
            yield connect
        finally:
            for _, writer in opened:
                writer.close()


async def ask(stream: Stream) -> bytes:
    """The status line of an answer; empty for none."""
    stream[1].write(WHOLE)
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        return (await stream[0].readuntil(b"yes")).split(b"\r\n")[0]
    return b""


async def closed(stream: Stream) -> None:
    """Wait for the other side to close a connection."""
    with suppress(ConnectionError):
        assert await stream[0].read() == b""


@pytest.mark.parametrize("app", [of_gateway, of_engine])
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization : Bearer " + SECRET + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + SECRET + b"\0\r\n\r\n",
        b"GET /s/" + SECRET + b" a/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /s/" + SECRET + b"\x01/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /s/" + SECRET + b"\xc3\xa9/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /s/" + SECRET + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"G\xff /s/" + SECRET + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_a_malformed_request_is_counted_and_quoted_nowhere(
    request_bytes: bytes, app: Callable[[], Server], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    connections = Connections()

    async def run() -> None:
        async with serving(app(), connections) as connect:
            for _ in range(3):
                reader, writer = await connect()
                writer.write(request_bytes)
                answer = await reader.read()
                assert answer.split(b"\r\n")[0].endswith(b"400 Bad Request")
                assert SECRET not in answer
                assert b"aiohttp" not in answer

    asyncio.run(run())
    assert connections.malformed == 3
    assert SECRET.decode() not in caplog.text
    (line,) = (record for record in caplog.records if record.name.startswith("etude"))
    assert "1 malformed HTTP requests" in line.getMessage()


def test_a_body_that_is_not_packed_as_it_says_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    connections = Connections()

    async def run() -> None:
        async with serving(of_engine(), connections) as connect:
            for _ in range(3):
                reader, writer = await connect()
                head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 6\r\n\r\n"
                writer.write(head + SECRET[-6:])
                assert b" 400 Bad Request" in await reader.read()

    asyncio.run(run())
    assert connections.malformed == 3
    assert len(caplog.records) == 1


def test_what_a_handler_fails_at_is_logged_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_request: web.Request) -> web.Response:
        raise RuntimeError(SECRET.decode())

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/health", fail)
        async with serving(app, Connections()) as connect:
            reader, writer = await connect()
            writer.write(WHOLE)
            assert b"500 Internal Server Error" in await reader.read()

    asyncio.run(run())
    assert "RuntimeError" in caplog.text
    assert "in fail" in caplog.text
    assert SECRET.decode() not in caplog.text


@pytest.mark.parametrize("sent", [b"", UNFINISHED])
def test_headers_that_do_not_come_are_not_waited_for(sent: bytes) -> None:
    async def run() -> None:
        async with serving(of_gateway(), Connections(idle_s=0.05)) as connect:
            stream = await connect()
            stream[1].write(sent)
            await closed(stream)

    asyncio.run(run())


def test_a_connection_that_was_served_is_not_kept_for_ever_either() -> None:
    async def run() -> None:
        async with serving(of_gateway(), Connections(idle_s=0.2)) as connect:
            stream = await connect()
            assert await ask(stream) == OK
            await closed(stream)

    asyncio.run(run())


def test_who_reads_nothing_of_its_answers_is_given_up() -> None:
    async def much(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(2**20))
        finally:
            over.set()

    over = asyncio.Event()

    async def run() -> None:
        async with serving(http_server(much, max_body_bytes=1), Connections(stalled_s=0.2)) as connect:
            _, writer = await connect()
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # of sockets
            writer.write(WHOLE)
            await over.wait()

    asyncio.run(run())


@contextmanager
def limited(room: int) -> Iterator[Connections]:
    """``Connections`` with room for ``room`` more files; free numbers between those of open files are used up first."""
    highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    taken = [os.dup(0)]
    while taken[-1] < highest:
        taken.append(os.dup(0))
    try:
        yield Connections(limit=taken[-1] + 1 + room, idle_s=ENDLESS_S)
    finally:
        for number in taken:
            os.close(number)


def test_at_the_limit_the_longest_idle_make_room_and_the_busy_stay() -> None:
    requested, answer = asyncio.Event(), asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.Response:
        if request.method == "POST":
            requested.set()
            await answer.wait()
        return web.Response(body=b"yes")

    async def run(connections: Connections) -> None:
        async with serving(http_server(handle, max_body_bytes=9), connections) as connect:
            busy = await connect()
            busy[1].write(WHOLE.replace(b"GET", b"POST"))
            await requested.wait()
            served = await connect()
            assert await ask(served) == OK
            idle = [await connect() for _ in range(60)]
            for stream in idle:
                stream[1].write(UNFINISHED)
            await closed(idle[0])  # first those that never asked anything, the oldest before the others
            assert await ask(served) == OK
            assert await ask(await connect()) == OK
            answer.set()
            assert (await busy[0].readuntil(b"yes")).startswith(OK)

    with limited(60) as connections:
        asyncio.run(run(connections))


ROOM = 12
"""Files: the server's own, and at least two connections, even if this process opens a few more meanwhile."""


def test_where_all_are_busy_a_new_connection_is_turned_away() -> None:
    requested, answer = asyncio.Event(), asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.Response:
        requested.set()
        await answer.wait()
        return web.Response(body=b"yes")

    async def run(connections: Connections) -> None:
        async with serving(http_server(handle, max_body_bytes=9), connections) as connect:
            calls = list[asyncio.Task[bytes]]()
            while not any(call.done() for call in calls):
                calls.append(asyncio.create_task(ask(await connect())))
                waiting = asyncio.create_task(requested.wait())
                await asyncio.wait({waiting, calls[-1]}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                requested.clear()
            assert await calls[-1] == b""
            answer.set()
            assert [await call for call in calls[:-1]] == [OK] * (len(calls) - 1)
            assert len(calls) > 2

    with limited(ROOM) as connections:
        asyncio.run(run(connections))


def test_connections_leave_files_for_everything_else() -> None:
    assert connection_limit(4096) == 4096 - RESERVE
    assert connection_limit(64) == 32
    assert connection_limit(resource.RLIM_INFINITY) == sys.maxsize
