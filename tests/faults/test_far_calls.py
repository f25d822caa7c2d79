"""A call to a distant gateway fails soon when its link is cut, and a retry succeeds when the link is back."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from bench.sync.wan import Wan, WanShape
from etude.errors import UserError

CUT_S = 20.0
"""By then a connection that only TCP looks after sends nothing for as long again."""
SERVER = """
import asyncio, sys
from aiohttp import web

async def slow(request):
    await asyncio.sleep(3.0)
    return web.Response(body=b"an answer")

app = web.Application()
app.router.add_get("/", slow)
web.run_app(app, host=sys.argv[1], port=8000, print=lambda *_: print("up", flush=True))
"""
CALLER = """
import asyncio, sys, time
import aiohttp
from etude.sockets import alert_connector

async def main():
    async with aiohttp.ClientSession(connector=alert_connector()) as http:
        while True:
            try:
                async with http.get(f"http://{sys.argv[1]}:8000", timeout=aiohttp.ClientTimeout(total=None)) as answer:
                    await answer.read()
                    print("answered", flush=True)
            except (aiohttp.ClientError, OSError):
                print("failed", flush=True)
                await asyncio.sleep(0.1)

asyncio.run(main())
"""


@pytest.fixture
def wan() -> Iterator[Wan]:
    try:
        with Wan(("home", "eu"), WanShape(rtt_s=0.08, loss=0.0, bits_per_s=1e9)) as made:
            yield made
    except UserError as error:
        pytest.skip(str(error))


def line_of(program: "subprocess.Popen[bytes]") -> str:
    assert program.stdout is not None
    return program.stdout.readline().decode().strip()


@pytest.mark.heavy("root or user namespaces, and half a minute")
@pytest.mark.timeout(300)
def test_a_cut_is_noticed_while_it_lasts_and_its_end_at_once(wan: Wan) -> None:
    with (
        wan.popen("eu", [sys.executable, "-c", SERVER, wan.address("eu")], stdout=subprocess.PIPE) as server,
        wan.popen("home", [sys.executable, "-c", CALLER, wan.address("eu")], stdout=subprocess.PIPE) as caller,
    ):
        try:
            assert line_of(server) == "up"
            cut_and_heal(wan, caller)
        finally:
            wan.close()  # ends both


def cut_and_heal(wan: Wan, caller: "subprocess.Popen[bytes]") -> None:
    while line_of(caller) != "answered":
        pass
    wan.cut("eu")
    cut_s = time.monotonic()
    while line_of(caller) != "failed":
        pass
    assert time.monotonic() - cut_s < CUT_S, "the kernel asked, and was not answered"
    time.sleep(max(0.0, CUT_S - (time.monotonic() - cut_s)))
    wan.heal("eu")
    healed_s = time.monotonic()
    while line_of(caller) != "answered":
        assert time.monotonic() - healed_s < CUT_S, "left to itself, TCP would wait as long as the cut took"
    sys.stdout.write(f"answered {time.monotonic() - healed_s:.1f} s after the cut, 3 of which the answer took\n")
