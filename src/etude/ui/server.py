"""HTTP server of the live page: its files, a JSON API over runs, and a stream that announces new data.

    browser ──GET /, /app.js, /app.css──▶ files                               open to anyone who reaches the port
            ──GET /api/…  Authorization: Bearer TOKEN──▶ view in a thread ──▶ JSON
            ──GET /api/runs/{run}/stream──▶ server-sent events, at most one per second, only for changes

Owns paths, headers and status codes; the views own the content. It is idle while no browser is connected.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from etude.errors import EtudeError, UserError
from etude.key_comparison import same_key
from etude.types import Json
from etude.ui import compare_view, live_view, rollouts_view, run_view, timeline_view, weights_view
from etude.ui.routes import Download, Forbidden, NotFound, Routes, RunQuery, View
from etude.ui.runs import RunList, RunReader, overview_or_error

STATIC = Path(__file__).with_name("static")
PAGE = STATIC / "index.html"
FILES = {"/app.js": STATIC / "app.js", "/app.css": STATIC / "app.css"}
"""The page and its assets, as `make ui` builds them."""
VIEWS: tuple[Routes, ...] = (
    run_view.ROUTES,
    rollouts_view.ROUTES,
    timeline_view.ROUTES,
    weights_view.ROUTES,
    live_view.ROUTES,
    compare_view.ROUTES,
)
"""Routes below ``/api/runs/{run}``."""
TICK_S = 1.0
KEEPALIVE_TICKS = 15
"""Number of ticks without news after which a comment is sent, since proxies close idle connections."""
FAREWELL_S = 1.5
"""Time for browsers to fetch the last data."""
SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Streams:
    """The open streams of browsers: each announces new data of a run, at most once per ``tick_s``."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._closing = asyncio.Event()
        self._open = 0

    async def announce(self, run: RunReader, response: web.StreamResponse) -> None:
        """Announce changes to a browser until it disconnects, or all streams are closed."""
        self._open += 1
        try:
            with contextlib.suppress(ConnectionResetError):
                await self._send_ticks(run, response)
        finally:
            self._open -= 1

    async def close(self) -> None:
        """Let streams announce the last data and their end, and leave time to fetch it."""
        self._closing.set()
        if self._open:
            await asyncio.sleep(FAREWELL_S)

    async def _send_ticks(self, run: RunReader, response: web.StreamResponse) -> None:
        seen, quiet, is_last = None, 0, False
        while not is_last:
            is_last = self._closing.is_set()
            stamp = await asyncio.to_thread(run.stamp)
            quiet = 0 if stamp != seen else quiet + 1
            if stamp != seen or is_last:
                seen = stamp
                tick = {"cursor": sum(stamp), "closed": is_last, **await asyncio.to_thread(overview_or_error, run)}
                await response.write(b"event: tick\ndata: " + orjson.dumps(tick) + b"\n\n")
            elif quiet % KEEPALIVE_TICKS == 0:
                await response.write(b":\n\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._closing.wait()


STREAMS = web.AppKey("streams", Streams)
"""The streams of an application; close them before stopping it."""


def ui_app(runs: RunList, token: str, *, tick_s: float = TICK_S) -> web.Application:
    """The application; ``token`` is required for its API. ``tick_s`` is the interval at which files are checked while a
    page is open.
    """
    streams = Streams(tick_s)
    server = _Server(runs, streams)
    app = web.Application(middlewares=[_errors_as_json, _keyed(token)])
    app.on_response_prepare.append(_secure)
    app[STREAMS] = streams
    app.on_startup.append(server.begin)
    app.router.add_get("/", server.page)
    for path, file in FILES.items():
        app.router.add_get(path, partial(_file, file))
    app.router.add_get("/api/runs", server.runs)
    app.router.add_get("/api/metrics", server.metrics)
    app.router.add_get("/api/compare", server.compare)
    app.router.add_get("/api/runs/{run}/stream", server.stream)
    for routes in VIEWS:
        for route, view in routes.items():
            method, _, path = route.partition(" ")
            app.router.add_route(method, f"/api/runs/{{run}}{path}", partial(server.view, view))
    return app


class _Server:
    """The request handlers."""

    def __init__(self, runs: RunList, streams: Streams) -> None:
        self._runs = runs
        self._streams = streams
        self._ahead: asyncio.Future[None] | None = None
        """The read that the newest visitor started; referenced here because an event loop holds tasks weakly."""

    async def begin(self, app: web.Application) -> None:
        """Start reading the newest run, which a visitor will request first."""
        self._ahead = asyncio.ensure_future(asyncio.to_thread(self._read_newest))

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Send the page; new data of the newest run is read while the browser loads its scripts."""
        await self.begin(request.app)
        return web.FileResponse(PAGE)

    def _read_newest(self) -> None:
        with contextlib.suppress(EtudeError, OSError):  # the page will be told, when it asks
            for run in self._runs.all()[:1]:
                run_view.read_ahead(run)

    async def runs(self, request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(self._runs.overviews))

    async def metrics(self, request: web.Request) -> web.Response:
        return _json(run_view.metric_table())

    async def compare(self, request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(compare_view.compare, self._runs, dict(request.query)))

    async def view(self, view: View, request: web.Request) -> web.StreamResponse:
        """Answer a query about one run."""
        run = await asyncio.to_thread(self._run, request)
        names = {name: value for name, value in request.match_info.items() if name != "run"}
        key, body = request.headers.get("X-Etude-Key", ""), None
        if request.method == "POST":
            body = orjson.loads(await request.read() or b"null")
        query = RunQuery(run=run, names=names, options=dict(request.query), body=body, key=key)
        answer = await asyncio.to_thread(view, query)
        return await _send(request, answer) if isinstance(answer, Download) else _json(answer)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Announce new data of a run until the browser disconnects."""
        run = await asyncio.to_thread(self._run, request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._streams.announce(run, response)
        return response

    def _run(self, request: web.Request) -> RunReader:
        run_id = request.match_info["run"]
        run = self._runs.get(run_id)
        if run is None:
            raise NotFound(f"there is no run {run_id!r} here")
        return run


async def _file(file: Path, request: web.Request) -> web.StreamResponse:
    return web.FileResponse(file)


async def _send(request: web.Request, download: Download) -> web.StreamResponse:
    """Send a file in chunks, each produced in a thread."""
    disposition = f'attachment; filename="{download.name}"'
    response = web.StreamResponse(headers={"Content-Type": download.media_type, "Content-Disposition": disposition})
    await response.prepare(request)
    chunks = iter(download.chunks)
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        await response.write(chunk)
    await response.write_eof()
    return response


def _json(value: Json, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json", status=status)


def _keyed(token: str) -> Middleware:
    """Reject API requests without the token."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path.startswith("/api/") and not same_key(given, token):
            return _json(
                {"error": "open the page by the URL that `etude ui` printed: the token in it is missing here"}, 401
            )
        return await handler(request)

    return check


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except NotFound as error:
        return _json({"error": str(error)}, 404)
    except Forbidden as error:
        return _json({"error": str(error)}, 403)
    except (UserError, orjson.JSONDecodeError) as error:
        return _json({"error": str(error)}, 400)
    except EtudeError as error:
        return _json({"error": str(error)}, 503)
    except web.HTTPException as error:
        return _json({"error": error.reason}, error.status)


async def _secure(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(SECURITY)
