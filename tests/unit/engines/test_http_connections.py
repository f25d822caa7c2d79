"""Short exchanges over kept-alive connections."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.engines.http import ConnectionPool
from waiting import WAIT_S

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes, status: int = 200, more: str = "") -> bytes:
    return f"HTTP/1.1 {status} So\r\ncontent-type: x\r\nCONTENT-LENGTH: {len(body)}\r\n{more}\r\n".encode() + body


async def with_server(talk: Talk, scene: Callable[[ConnectionPool], Awaitable[None]], path: str = "") -> int:
    """Play ``scene`` against a server that talks so; how many connections it saw."""
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        try:
            await talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with closing(ConnectionPool(f"http://127.0.0.1:{port}{path}", connect_s=5.0)) as lines:
        await scene(lines)
    server.close()
    await server.wait_closed()
    return seen


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        _, body = await read_request(reader)
        writer.write(answer(body))


def saying(data: bytes, cuts: tuple[int, ...] = ()) -> Talk:
    """A server that answers each request with ``data``, sent in chunks."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
            for first, last in pairwise(edges):
                writer.write(data[first:last])
                await writer.drain()
                await asyncio.sleep(0)

    return talk


def test_one_connection_serves_one_exchange_after_the_other() -> None:
    async def scene(lines: ConnectionPool) -> None:
        for index in range(20):
            assert await lines.post("/x", b"%d" % index) == (200, b"%d" % index)

    assert asyncio.run(with_server(echo, scene)) == 1


def test_exchanges_at_a_time_do_not_mix() -> None:
    async def scene(lines: ConnectionPool) -> None:
        bodies = [b"%d" % index * 1000 for index in range(50)]
        assert await asyncio.gather(*(lines.post("/x", body) for body in bodies)) == [(200, body) for body in bodies]

    assert asyncio.run(with_server(echo, scene)) <= 50


def test_paths_are_below_the_base_url() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        writer.write(answer(head.splitlines()[0]))

    async def scene(lines: ConnectionPool) -> None:
        assert await lines.post("/generate", b"") == (200, b"POST /below/generate HTTP/1.1")

    asyncio.run(with_server(talk, scene, "/below/"))


@settings(max_examples=30, deadline=None)
@given(
    body=st.binary(max_size=300), cuts=st.tuples(*[st.integers(0, 400)] * 3), status=st.sampled_from([200, 400, 503])
)
def test_an_answer_may_come_in_any_chunks(body: bytes, cuts: tuple[int, ...], status: int) -> None:
    async def scene(lines: ConnectionPool) -> None:
        assert await lines.post("/x", b"?") == (status, body)
        assert await lines.post("/x", b"?") == (status, body)

    asyncio.run(with_server(saying(answer(body, status), cuts), scene))


def test_a_connection_that_the_server_ends_is_not_used_again() -> None:
    async def scene(lines: ConnectionPool) -> None:
        for _ in range(3):
            assert await lines.post("/x", b"?") == (200, b"bye")

    assert asyncio.run(with_server(saying(answer(b"bye", more="Connection: close\r\n")), scene)) == 3


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"HTTP/1.1 200 So\r\n\r\nbody", "not HTTP with a length"),
        (b"SMTP ready\r\n\r\n", "not HTTP with a length"),
        (answer(b"long") + b"er", "longer than it says"),
        (b"HTTP/1.1 200 " + b"x" * 70_000, "too long a head"),
    ],
)
def test_what_is_no_answer_is_an_error(data: bytes, why: str) -> None:
    async def scene(lines: ConnectionPool) -> None:
        with pytest.raises(ConnectionError, match=why):
            await lines.post("/x", b"?")

    asyncio.run(with_server(saying(data), scene))


def test_an_exchange_that_is_given_up_hangs_up() -> None:
    received, hung_up = asyncio.Event(), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        received.set()
        await reader.read()
        hung_up.set()

    async def scene(lines: ConnectionPool) -> None:
        asking = asyncio.create_task(lines.post("/x", b"?"))
        await asyncio.wait_for(received.wait(), WAIT_S)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.wait_for(hung_up.wait(), WAIT_S)

    asyncio.run(with_server(talk, scene))


def test_a_port_without_a_server_is_an_os_error() -> None:
    async def scene() -> None:
        with closing(ConnectionPool("http://127.0.0.1:1", connect_s=1.0)) as lines, pytest.raises(OSError, match=r".*"):
            await lines.post("/x", b"?")

    asyncio.run(scene())
