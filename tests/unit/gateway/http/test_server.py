"""HTTP at the door: bodies, limits, hang-ups, and answers that end as they should."""

import asyncio
from collections.abc import Awaitable, Callable

from etude.gateway.api.calls import ApiError
from etude.gateway.http.server import HttpRequest, HttpResponse, RequestHandler, http_server
from etude.run.serving import listening

Scene = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(request: HttpRequest) -> HttpResponse:
    try:
        body = await request.read()
    except ApiError as api_error:
        return HttpResponse(body=api_error.code.encode(), status=api_error.status, content_type="text/plain")
    return HttpResponse(
        body=b"%s %s " % (request.method.encode(), request.path.encode()) + body, headers=(("X-A", "b"),)
    )


def play(handle: RequestHandler, scene: Scene, *, body_s: float = 10.0) -> None:
    async def run() -> None:
        async with listening(http_server(handle, max_body_bytes=1000, body_s=body_s), 0) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.wait_for(scene(reader, writer), 20)
            writer.close()

    asyncio.run(run())


def test_a_request_is_answered_and_the_connection_is_used_again() -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(b"POST /a%20b?c=d HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"X-A: b\r\n" in head
            assert b"Server: etude\r\n" in head
            assert await reader.readexactly(14) == b"POST /a%20b hi"

    play(echo, scene)


def test_a_caller_that_waits_for_it_is_invited_to_send_its_body() -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    play(echo, scene)


def test_a_body_that_is_too_large_is_refused_unread() -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\nExpect: 100-continue\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")

    play(echo, scene)


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhi")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408")

    play(echo, scene, body_s=0.05)


def test_a_body_that_is_not_packed_as_it_says_is_refused() -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Encoding: gzip\r\n\r\nhello")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400")

    play(echo, scene)


def test_events_are_sent_when_they_are_written_and_a_hang_up_cancels() -> None:
    cancelled = asyncio.Event()

    async def tick(request: HttpRequest) -> None:
        await request.open((("X-A", "b"),))
        await request.write(b"data: 1\n\n")
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Content-Type: text/event-stream\r\n" in head
        assert b"data: 1" in await reader.readuntil(b"\n\n")
        writer.close()
        await cancelled.wait()

    play(tick, scene)
