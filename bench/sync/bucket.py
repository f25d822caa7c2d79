"""A bucket that speaks S3 over connections that stay open, for measurements over long distances.

moto answers the requests; aiohttp serves them. The server that comes with moto closes every connection after one
request, which no cloud does and which costs each request one more round trip and a new slow start.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

LARGEST_OBJECT_BYTES = 1 << 30
THREADS = 64
"""Requests answered at a time."""


def nothing(request: web.Request, reply: web.Response) -> None:
    """Take no note of a request."""


async def serve_bucket(
    address: str,
    port: int,
    bucket: str,
    ready: Callable[[], None],
    seen: Callable[[web.Request, web.Response], None] = nothing,
) -> None:
    """Serve one empty bucket in memory until cancelled; ``ready`` is called when it can be used, ``seen`` with each
    request and its answer.
    """
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.test import Client

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = DomainDispatcherApplication(create_backend_app)
    threads = ThreadPoolExecutor(THREADS, "moto")

    def ask(method: str, path: str, query: str, headers: list[tuple[str, str]], body: bytes) -> web.Response:
        client = Client(moto, use_cookies=False)
        reply = client.open(path, f"http://{address}:{port}", query, method=method, headers=headers, data=body)
        return web.Response(status=reply.status_code, headers=list(reply.headers.items()), body=reply.data)

    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        headers = [(name, value) for name, value in request.headers.items() if name.lower() != "host"]
        url = request.rel_url
        reply = await asyncio.get_running_loop().run_in_executor(
            threads, ask, request.method, url.path, url.raw_query_string, headers, body
        )
        seen(request, reply)
        return reply

    ask("PUT", f"/{bucket}", "", [], b"")
    application = web.Application(client_max_size=LARGEST_OBJECT_BYTES)
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
        ready()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
