"""The engine process: serves the newest published weights and swaps them while it serves.

weight store ──WeightFollower──▶ engine of the recipe's kind ──▶ tokens over HTTP, in one format for all kinds
"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from functools import partial
from typing import cast

from etude.config.inference import ENGINES, EngineConfig
from etude.config.recipe import RunConfig
from etude.engines.http import engine_app
from etude.engines.kinds import EngineContext, Opener
from etude.models.checkpoint import load_spec
from etude.protocols import Engine
from etude.run.connections import Connections
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.numerics import largest_state, load_published, serving_model
from etude.run.process_name import ENGINE, ProcessName
from etude.run.serving import listening, run_until_signal, tell_person, tls_context
from etude.run.store_outages import StoreOutages
from etude.run.weight_follower import WeightFollower
from etude.run.weight_log import open_log


def run_engine(folder: RunFolder, name: ProcessName) -> None:
    """Serve until told to stop."""
    run_until_signal(serve(folder, folder.config(), name))


async def serve(folder: RunFolder, config: RunConfig, name: ProcessName = ENGINE) -> None:
    """Serve until cancelled, or until a background task of the engine fails."""
    spec, opener = load_spec(folder.model), cast("Opener", ENGINES.find(config.engine.kind))
    logs = folder.logs / str(name)
    logs.mkdir(exist_ok=True)
    with (
        open_events(folder, config, name) as events,
        StoreOutages(folder.store, config.rollouts.max_outage_s, events) as outages,
        closing(await asyncio.to_thread(WeightFollower, open_log(folder, outages), largest_state(spec))) as follower,
        outages,  # ends before the follower, whose calls wait for it
    ):
        context = EngineContext(
            config=config,
            spec=spec,
            model_folder=folder.model,
            logs=logs,
            events=events,
            make_model=partial(serving_model, spec, config.numerics, config.engine.device),
            load=partial(load_published, config=config.numerics),
        )
        weights = await asyncio.to_thread(follower.start)
        async with opener(context, weights) as served, AsyncExitStack() as servers, asyncio.TaskGroup() as tasks:
            for server in _servers(folder, config.engine, name, served.engine):
                await servers.enter_async_context(server)
            tell_person(f"{name} at {folder.endpoints.url(name)}")
            for task in served.tasks:
                tasks.create_task(task())
            tasks.create_task(follower.follow(served.updater, events))


def _servers(
    folder: RunFolder, config: EngineConfig, name: ProcessName, engine: Engine
) -> Iterator[AbstractAsyncContextManager[int]]:
    """The server for the run's own processes, and the one for gateways elsewhere, where there may be any."""
    connections, key = Connections(), folder.key(KeyRole.ENGINE)
    yield listening(engine_app(engine, key), folder.endpoints.port(name), connections=connections)
    if config.public:
        yield listening(
            engine_app(engine, key),
            folder.endpoints.public_port(name),
            host=config.host,
            tls=tls_context("engine", config.tls_cert, config.tls_key),
            connections=connections,
        )
