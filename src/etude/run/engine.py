"""The engine process: serves published weights and swaps them without stopping.

weight store ──WeightFollower──▶ engine of the recipe's kind ──▶ tokens over HTTP, in one format for all kinds
                  ▲ which version
                  └── `serve`: the newest      `production`: that of the arm which the routing table gives this engine
"""

import asyncio
from contextlib import ExitStack, closing
from typing import cast, final

from etude.config.inference import ENGINES
from etude.config.recipe import RunConfig
from etude.engines.http import engine_app
from etude.engines.kinds import Opener
from etude.models.checkpoint import load_spec
from etude.releases.routing import held_arm
from etude.routing_table import RoutingTable
from etude.run.engine_adapters import adapter_routes
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.listener import run_listener
from etude.run.numerics import engine_context, frozen_base, largest_state
from etude.run.parent import tell_person
from etude.run.process_name import ENGINE, PRODUCTION, ProcessName
from etude.run.region_stores import open_region_log, weights_url
from etude.run.routing_tables import RoutingTables
from etude.run.serving import run_until_signal
from etude.run.store_outages import StoreOutages
from etude.run.weight_follower import WeightFollower
from etude.weights.log import WeightLog

FIRST_POLL_S = 0.5
"""Interval at which an empty weight log is polled for its first version."""


def run_engine(folder: RunFolder, name: ProcessName) -> None:
    """Serve until a stop signal."""
    run_until_signal(serve(folder, folder.config(), name))


async def serve(folder: RunFolder, config: RunConfig, name: ProcessName = ENGINE) -> None:
    """Serve until cancelled, or until a background task of the engine fails."""
    spec, opener = load_spec(folder.model, config.model.impl), cast("Opener", ENGINES.find(config.engine.kind))
    logs, key = folder.logs / str(name), folder.key(KeyRole.ENGINE)
    logs.mkdir(exist_ok=True)
    with ExitStack() as stack:
        events = stack.enter_context(open_events(folder, name))
        outages = stack.enter_context(
            StoreOutages(weights_url(folder, name.region), config.rollouts.max_outage_s, events)
        )
        log = await asyncio.to_thread(open_region_log, folder, name.region, outages)
        arm = ServedArm(folder, config.release.engines, name) if name.command == PRODUCTION.command else None
        target = (lambda: None) if arm is None else arm.version
        follower = stack.enter_context(
            closing(await asyncio.to_thread(WeightFollower, log, largest_state(spec), target))
        )
        stack.enter_context(outages)  # closed before the follower, whose calls may wait in it
        base = frozen_base(folder.model, config)
        context = engine_context(config, spec, model_folder=folder.model, logs=logs, events=events, base=base)
        await first_version(log)
        if arm is not None:
            await arm.first()
        weights = await asyncio.to_thread(follower.start)
        async with (
            opener(context, weights) as served,
            run_listener(
                folder,
                name,
                lambda: engine_app(served.engine, key, adapter_routes(served.engine)),
                config.engine,
                outages,
            ) as url,
            asyncio.TaskGroup() as tasks,
        ):
            tell_person(f"{name} at {url}")
            for task in served.tasks:
                tasks.create_task(task())
            tasks.create_task(follower.follow(served.updater, events))
            if arm is not None:
                tasks.create_task(arm.follow())


@final
class ServedArm:
    """The arm of the routing table that one engine for users serves."""

    def __init__(self, folder: RunFolder, engines: int, name: ProcessName) -> None:
        self._tables = RoutingTables.open(folder)
        self._engine, self._engines = name.replica, engines
        self._table: RoutingTable | None = None

    def version(self) -> int:
        """The version to serve now."""
        assert self._table is not None, "wait for the first table"
        return held_arm(self._table, self._engine, self._engines).version

    async def first(self) -> None:
        """Wait until a version is released: before that, an engine for users has nothing to serve."""
        while (table := await asyncio.to_thread(self._tables.newest)) is None:
            await asyncio.sleep(FIRST_POLL_S)
        self._table = table

    async def follow(self) -> None:
        """Follow the routing table forever."""
        await self._tables.follow(self._receive)

    def _receive(self, table: RoutingTable) -> None:
        self._table = table


async def first_version(log: WeightLog) -> None:
    """Wait until a log has a version; a relay copies it into a region's store."""
    while await asyncio.to_thread(log.latest) is None:
        await asyncio.sleep(FIRST_POLL_S)
