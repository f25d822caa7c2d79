"""Calls of a model behind an external API, through a local server that counts them and retries while the API is busy
(:mod:`etude.gateway.upstream.passthrough`).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

from etude.aio import gather_or_cancel
from etude.clock import SystemClock
from etude.errors import UserError
from etude.gateway.upstream.calls import Upstream
from etude.gateway.upstream.passthrough import OK, QUOTED_CHARACTERS, Passthrough
from etude.run.endpoints import HOST
from etude.run.serving import listening
from etude.sockets import alert_connector

REPLY_TOKENS = 1024


@asynccontextmanager
async def serving_passthrough(upstream: Upstream, http: aiohttp.ClientSession) -> AsyncIterator[Passthrough]:
    """A server of sessions with a model; the caller closes ``http``."""
    passthrough = Passthrough(upstream, http, SystemClock())
    async with listening(passthrough.app(), 0) as port:
        passthrough.serves_at(f"http://{HOST}:{port}")
        yield passthrough


async def ask_each(upstream: Upstream, prompts: Sequence[str], *, concurrency: int) -> list[str]:
    """Send each prompt to a model once, greedily, and return the answers in order.

    Raises :class:`~etude.errors.UserError` if one is not answered.
    """
    async with (
        aiohttp.ClientSession(connector=alert_connector()) as http,
        serving_passthrough(upstream, http) as server,
    ):
        session, places = await server.open(), asyncio.Semaphore(concurrency)
        headers = {"Authorization": f"Bearer {session.api_key}"}

        async def ask(prompt: str) -> str:
            body = {
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0.0,
                "max_tokens": REPLY_TOKENS,
            }
            async with places, http.post(f"{session.base_url}/chat/completions", json=body, headers=headers) as answer:
                if answer.status != OK:
                    words = (await answer.text())[:QUOTED_CHARACTERS]
                    raise server.fault or UserError(f"{upstream.url} answers {answer.status}: {words}")
                return str((await answer.json())["choices"][0]["message"]["content"] or "")

        return await gather_or_cancel(ask(prompt) for prompt in prompts)
