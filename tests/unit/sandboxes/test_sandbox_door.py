"""The outer half of a door: bytes go through unchanged, ends are passed on, and closing cuts all."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from etude.sandboxes.door import Door

T = TypeVar("T")


def behind_door(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    ask: Callable[[Path, Door], Awaitable[T]],
    tmp_path: Path,
) -> T:
    """Ask through a door to a server that answers."""

    async def main() -> T:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        door = Door(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/some/path")
        await door.open(tmp_path / "door", owner=None)
        try:
            return await ask(tmp_path / "door", door)
        finally:
            await door.close()
            await door.close()
            server.close()
            await server.wait_closed()
            await asyncio.sleep(0.05)  # for the server's ends of what was cut

    return asyncio.run(main())


async def reverse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write((await reader.read())[::-1])
    writer.close()


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        await reader.read()
    writer.close()


def test_bytes_and_ends_go_both_ways(tmp_path: Path) -> None:
    sent = bytes(range(256)) * 5_000

    async def ask(socket: Path, door: Door) -> bytes:
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(sent)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    assert behind_door(reverse, ask, tmp_path) == sent[::-1]


def test_the_socket_is_its_owners_alone(tmp_path: Path) -> None:
    async def ask(socket: Path, door: Door) -> os.stat_result:
        return os.stat(socket)  # noqa: PTH116 - of a path, but nothing to wait for

    assert behind_door(reverse, ask, tmp_path).st_mode & 0o777 == 0o600


def test_closing_cuts_what_is_open(tmp_path: Path) -> None:
    async def ask(socket: Path, door: Door) -> bytes:
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(b"a question without an end")
        await asyncio.sleep(0.1)
        await door.close()
        try:
            return await asyncio.wait_for(reader.read(), 5)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    assert behind_door(hang, ask, tmp_path) == b""


def test_a_dead_address_ends_the_connection(tmp_path: Path) -> None:
    async def main() -> bytes:
        door = Door("http://127.0.0.1:1")
        await door.open(tmp_path / "door", owner=None)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "door")
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await door.close()
        return answer

    assert asyncio.run(main()) == b""


@pytest.mark.parametrize(("url", "port"), [("http://h", 80), ("https://h", 443), ("http://[::1]:8", 8)])
def test_a_web_address_has_a_port(url: str, port: int) -> None:
    assert Door(url).port == port


@pytest.mark.parametrize("url", ["", "h:80", "unix:///x", "http://"])
def test_any_other_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http or https"):
        Door(url)
