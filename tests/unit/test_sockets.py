"""Calls to other machines use connections that notice a lost machine."""

import asyncio
import socket
import sys

import aiohttp
import pytest
from aiohttp import web

from etude.engines.http import ConnectionPool
from etude.run.serving import listening
from etude.sockets import GONE_S, PROBE_S, PROBES, alert_connector

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's options are Linux's")


def is_alert(connection: socket.socket) -> bool:
    """True if the kernel asks for the other side, and gives it up in time."""
    return (
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == PROBE_S
        and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == PROBES
        and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * GONE_S
    )


async def yes(request: web.Request) -> web.Response:
    return web.Response(body=b"yes")


async def endless(request: web.Request) -> web.StreamResponse:
    """An answer that does not end before its caller hangs up."""
    answer = web.StreamResponse()
    await answer.prepare(request)
    await asyncio.Event().wait()
    return answer


def test_calls_to_gateways_and_to_engines_notice_that_a_machine_is_gone() -> None:
    async def check() -> None:
        app = web.Application()
        app.router.add_post("/", yes)
        app.router.add_get("/endless", endless)
        async with listening(app, 0) as port:
            url = f"http://127.0.0.1:{port}"
            async with aiohttp.ClientSession(connector=alert_connector()) as http, http.get(f"{url}/endless") as answer:
                assert answer.connection is not None and answer.connection.transport is not None
                assert is_alert(answer.connection.transport.get_extra_info("socket"))
            pool = ConnectionPool(url, connect_s=10.0)
            assert await pool.post("/", b"") == (200, b"yes")
            assert all(is_alert(each._transport.get_extra_info("socket")) for each in pool._idle)
            assert len(pool._idle) == 1
            pool.close()

    asyncio.run(check())
