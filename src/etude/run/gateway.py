"""The gateway process: an OpenAI-shaped door in front of the engine."""

import asyncio

import aiohttp

from etude.clock import SystemClock
from etude.config import RunConfig
from etude.engines.http import HttpEngine
from etude.gateway.app import Gateway
from etude.gateway.recorder import Recorder
from etude.gateway.sessions import Sessions
from etude.ledger.payloads import Payloads
from etude.run.decisions import decide
from etude.run.folder import RunFolder
from etude.run.serving import listening, run_until_signal
from etude.tokens.chat import ChatTemplate
from etude.types import RouteSpace

EXPIRE_S = 30.0
"""How often idle sessions are looked for."""


async def _serve(folder: RunFolder) -> None:
    config, clock = decide(folder.config()), SystemClock()
    sessions = Sessions(ChatTemplate.load(folder.model))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        engine = HttpEngine(folder.endpoints.url("engine"), http, config.gateway.engine_timeout_s)
        gateway = Gateway(
            Recorder(engine, Payloads.beside(folder.ledger), _replayed_routes(folder, config)),
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


def _replayed_routes(folder: RunFolder, config: RunConfig) -> RouteSpace | None:
    """What routes the trainer will want; ``None`` for none."""
    if config.numerics.replay == "off":
        return None
    from etude.models.checkpoint import load_spec  # torch is most of this process's memory: only where it is needed
    from etude.run.numerics import route_space

    return route_space(load_spec(folder.model), config.numerics)


def run_gateway(folder: RunFolder) -> None:
    """Serve until told to stop."""
    run_until_signal(_serve(folder))
