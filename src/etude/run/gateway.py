"""The gateway process: an OpenAI-shaped door in front of the engine."""

import asyncio

import aiohttp

from etude.clock import SystemClock
from etude.engines.http import HttpEngine
from etude.gateway.app import Gateway
from etude.gateway.sessions import Sessions
from etude.run.folder import RunFolder
from etude.run.serving import listening, run_until_signal
from etude.tokens.chat import ChatTemplate

EXPIRE_S = 30.0
"""How often idle sessions are looked for."""


async def _serve(folder: RunFolder) -> None:
    config, clock = folder.config(), SystemClock()
    sessions = Sessions(ChatTemplate.load(folder.model))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        gateway = Gateway(
            HttpEngine(folder.endpoints.url("engine"), http, config.gateway.engine_timeout_s),
            sessions,
            clock,
            config.gateway,
            admin_key=folder.admin_key(),
            max_length=config.engine.max_length,
        )
        async with listening(gateway.app(), folder.endpoints.port("gateway")):
            while True:
                await asyncio.sleep(EXPIRE_S)
                sessions.expire(clock.now())


def run_gateway(folder: RunFolder) -> None:
    """Serve until told to stop."""
    run_until_signal(_serve(folder))
