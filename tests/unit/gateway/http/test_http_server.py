"""HTTP at the door: bodies, limits, hang-ups, and answers that end as they should."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from etude.gateway.api.calls import ApiError
from etude.gateway.http.app import http_server, read_body
from etude.gateway.request_log import RequestRecord
from etude.run.serving import listening

Scene = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(request: web.BaseRequest) -> web.Response:
    try:
        body = await read_body(request, RequestRecord(began=0.0))
    except ApiError as api_error:
        return web.Response(text=api_error.code, status=api_error.status)
    return web.Response(body=b"%s %s " % (request.method.encode(), request.raw_path.encode()) + body)


async def echo_in_a_hurry(request: web.BaseRequest) -> web.Response:
    try:
        return web.Response(body=await read_body(request, RequestRecord(began=0.0), longest_s=0.05))
    except ApiError as api_error:
        return web.Response(text=api_error.code, status=api_error.status)


def play(handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], scene: Scene) -> None:
    async def run() -> None:
        async with listening(http_server(handle, max_body_bytes=1000), 0) as port:
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
            assert await reader.readexactly(18) == b"POST /a%20b?c=d hi"

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

    play(echo_in_a_hurry, scene)


def test_a_body_that_is_not_packed_as_it_says_is_refused() -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Encoding: gzip\r\n\r\nhello")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400")

    play(echo, scene)
