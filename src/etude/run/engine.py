"""The engine process: serves the newest published weights and swaps them while it serves.

weight store ──WeightFollower──▶ engine of the recipe's kind ──▶ tokens over HTTP, in one format for all kinds
"""

import asyncio
from contextlib import ExitStack, closing
from functools import partial
from typing import cast

from etude.config.inference import ENGINES
from etude.config.recipe import RunConfig
from etude.engines.http import engine_app
from etude.engines.kinds import EngineContext, Opener
from etude.models.checkpoint import load_spec
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.listener import run_listener
from etude.run.numerics import largest_state, load_published, serving_model
from etude.run.parent import tell_person
from etude.run.process_name import ENGINE, ProcessName
from etude.run.region_stores import open_region_log, weights_url
from etude.run.serving import run_until_signal
from etude.run.store_outages import StoreOutages
from etude.run.weight_follower import WeightFollower
from etude.weights.log import WeightLog

FIRST_POLL_S = 0.5
"""Interval at which a log without any version is asked for one."""


def run_engine(folder: RunFolder, name: ProcessName) -> None:
    """Serve until told to stop."""
    run_until_signal(serve(folder, folder.config(), name))


async def serve(folder: RunFolder, config: RunConfig, name: ProcessName = ENGINE) -> None:
    """Serve until cancelled, or until a background task of the engine fails."""
    spec, opener = load_spec(folder.model), cast("Opener", ENGINES.find(config.engine.kind))
    logs, key = folder.logs / str(name), folder.key(KeyRole.ENGINE)
    logs.mkdir(exist_ok=True)
    with ExitStack() as stack:
        events = stack.enter_context(open_events(folder, config, name))
        outages = stack.enter_context(
            StoreOutages(weights_url(folder, name.region), config.rollouts.max_outage_s, events)
        )
        log = await asyncio.to_thread(open_region_log, folder, name.region, outages)
        follower = stack.enter_context(closing(await asyncio.to_thread(WeightFollower, log, largest_state(spec))))
        stack.enter_context(outages)  # ends before the follower, whose calls wait for it
        context = EngineContext(
            config=config,
            spec=spec,
            model_folder=folder.model,
            logs=logs,
            events=events,
            make_model=partial(serving_model, spec, config.numerics, config.engine.device),
            load=partial(load_published, config=config.numerics),
        )
        await first_version(log)
        weights = await asyncio.to_thread(follower.start)
        async with (
            opener(context, weights) as served,
            run_listener(folder, name, lambda: engine_app(served.engine, key), config.engine, outages) as url,
            asyncio.TaskGroup() as tasks,
        ):
            tell_person(f"{name} at {url}")
            for task in served.tasks:
                tasks.create_task(task())
            tasks.create_task(follower.follow(served.updater, events))


async def first_version(log: WeightLog) -> None:
    """Wait until a log has a version: into a region's store a relay brings it."""
    while await asyncio.to_thread(log.latest) is None:
        await asyncio.sleep(FIRST_POLL_S)
