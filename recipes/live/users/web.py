"""A web page on which a real person is one of the users: choose a request, watch the agent, keep its work or not.

    GET  /                         the page
    GET  /api/requests             some requests to choose from, with the file as it is
    POST /api/sessions             {"request", "user", "consent"} → the agent's turns as events, then its work
    POST /api/sessions/ID/signals  {"kind", "value", "turn"}      → sent to POST /feedback, as simulated ones

What a person on this page thinks is known to nobody, so nothing of it is in the file of truth.
"""

import json
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import final

import aiohttp
from aiohttp import web
from backend import Caller, Product, Requests, Step, Work
from population import Signal
from simulation import Reports

from etude.errors import EtudeError
from etude.harnesses import tools

PAGE = Path(__file__).with_name("page.html")
CHOICES = 6
"""Requests that a person may choose from."""
REMEMBERED = 1000
"""Sessions that can still be spoken of."""
KINDS = ("kept", "reverted", "thumbs", "follow_up")
"""Signals that the page has buttons for."""
REGION = "eu"
LONGEST_NAME = 40
REQUESTS = 1_000_000_000
"""Numbers of requests: those of this page are none of the simulated people's."""


@final
class Page:
    """The page and its API, over one product."""

    def __init__(self, product: Product, requests: Requests, reports: Reports) -> None:
        self._product = product
        self._requests = requests
        self._reports = reports
        self._sessions: OrderedDict[str, tuple[Work, str]] = OrderedDict()
        self._rng = Random()

    def app(self) -> web.Application:
        """The application to serve."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/api/requests", self._choices),
                web.post("/api/sessions", self._work),
                web.post("/api/sessions/{id}/signals", self._signal),
            ]
        )
        return app

    async def _page(self, _request: web.Request) -> web.StreamResponse:
        return web.FileResponse(PAGE, headers={"Cache-Control": "no-store"})

    async def _choices(self, _request: web.Request) -> web.StreamResponse:
        numbers = [self._rng.randrange(10**8, REQUESTS) for _ in range(CHOICES)]
        tasks = [(number, self._requests.draw(number)) for number in numbers]
        return web.json_response(
            [{"number": number, "prompt": task.prompt, "files": dict(task.files)} for number, task in tasks]
        )

    async def _work(self, request: web.Request) -> web.StreamResponse:
        """Let the agent work, and show each turn as it is made."""
        fields = await _read(request)
        number, user = fields.get("request"), str(fields.get("user") or "")[:LONGEST_NAME]
        if not isinstance(number, int) or not 0 <= number < REQUESTS or not user.isascii() or not user:
            raise web.HTTPBadRequest(text="expected a request's number and a name of ASCII letters")
        consent = "train" if fields.get("consent") else "none"
        caller = Caller(user=f"page:{user}", region=REGION, consent=consent)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        try:
            async with self._product.open(self._requests.draw(number), caller) as (work, steps):
                await _send(response, {"session": work.session_id})
                async for step in steps:
                    await _send(response, _shown(step))
            self._remember(work, caller.user)
            path, before = next(iter(work.task.files.items()))
            await _send(
                response,
                {"path": path, "before": before, "after": work.text, "submitted": work.submitted,
                 "versions": sorted(work.versions, key=int)},
            )  # fmt: skip
        except (EtudeError, aiohttp.ClientError) as error:
            await _send(response, {"error": str(error)})
        return response

    async def _signal(self, request: web.Request) -> web.StreamResponse:
        """Send what a person said, once for each click."""
        remembered = self._sessions.get(request.match_info["id"])
        if remembered is None:
            raise web.HTTPNotFound(text="no such session is remembered")
        fields = await _read(request)
        kind, value = fields.get("kind"), fields.get("value")
        if kind not in KINDS or not isinstance(value, int | float) or not -1 <= value <= 1:
            raise web.HTTPBadRequest(text=f"kind: expected one of {', '.join(KINDS)}, with a value from -1 to 1")
        work, user = remembered
        try:
            await self._reports.send(work, user, [Signal(kind=str(kind), value=float(value))])
        except EtudeError as error:
            raise web.HTTPBadGateway(text=str(error)) from error
        return web.json_response({"sent": kind})

    def _remember(self, work: Work, user: str) -> None:
        self._sessions[work.session_id] = (work, user)
        while len(self._sessions) > REMEMBERED:
            self._sessions.popitem(last=False)


async def _read(request: web.Request) -> dict[str, object]:
    try:
        fields = await request.json()
    except json.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise web.HTTPBadRequest(text="expected a JSON object")
    return fields


def _shown(step: Step) -> dict[str, str]:
    """A turn as the page shows it: the word of its tool, the rest of the call, what came back."""
    word = type(tools.parse_call(step.reply)).__name__
    return {"tool": word, "reply": step.reply, "observation": step.observation}


async def _send(response: web.StreamResponse, data: object) -> None:
    await response.write(f"data: {json.dumps(data)}\n\n".encode())
