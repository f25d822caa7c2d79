"""The engine process: serves the newest published weights and swaps them while it serves.

weight store ──pull, verify, prepare (a thread)──▶ swap between two steps ──▶ tokens over HTTP
"""

import asyncio
import secrets
import time
from contextlib import closing

import torch

from etude.config.recipe import RunConfig
from etude.engines.native.engine import NativeEngine
from etude.engines.native.server import engine_app
from etude.models.checkpoint import load_spec
from etude.run.folder import RunFolder
from etude.run.serving import listening, run_until_signal, tell_person
from etude.run.store_outages import StoreOutages
from etude.run.vllm import serve_vllm
from etude.run.weight_follower import Serving, WeightFollower
from etude.run.weight_log import open_log
from etude.telemetry.events import EngineStats, WeightsSwapped
from etude.telemetry.log import EventLog

STATS_S = 1.0
"""How often the load is reported."""


async def follow(follower: WeightFollower, engine: NativeEngine, events: EventLog) -> None:
    """Swap every new version into ``engine``, for ever.

    consumes: commit records; produces: swaps; waits for: the version after the one served; woken by:
    :func:`~etude.run.weight_follower.next_arrival`; on shutdown: cancelled between two polls.
    """
    while True:
        stage_s, pause_s = await follower.update(engine)
        await asyncio.to_thread(follower.settle)
        version = engine.weights.version
        events.write(WeightsSwapped(version=version, stage_ms=1e3 * stage_s, pause_ms=1e3 * pause_s))


async def report_load(engine: NativeEngine, events: EventLog) -> None:
    """Write what the engine did, once per ``STATS_S``."""
    busy_s, since_s = engine.busy_s, time.perf_counter()
    while True:
        await asyncio.sleep(STATS_S)
        counters, health, now_s = engine.take_counters(), await engine.health(), time.perf_counter()
        events.write(
            EngineStats(
                busy_s=engine.busy_s - busy_s,
                window_s=now_s - since_s,
                generated_tokens=counters.generated_tokens,
                prefill_tokens=counters.prefill_tokens,
                reused_tokens=counters.reused_tokens,
                running=health.running,
                waiting=health.waiting,
            )
        )
        busy_s, since_s = engine.busy_s, now_s


async def _serve(folder: RunFolder, config: RunConfig) -> None:
    serving = Serving(
        spec=load_spec(folder.model),
        numerics=config.numerics,
        device=config.engine.device,
        spare=config.engine.spare_weights,
    )
    with (
        EventLog(folder.events, "engine") as events,
        StoreOutages(folder.store, config.rollouts.max_outage_s, events) as outages,
        closing(await asyncio.to_thread(WeightFollower, open_log(folder, outages), serving)) as follower,
        outages,  # first of all nobody waits any more
    ):
        engine = NativeEngine(
            await asyncio.to_thread(follower.start),
            config.engine,
            seed=secrets.randbits(64),  # a restarted engine must not repeat the numbers of the one before
            record_routes=config.numerics.replay != "off",
        )
        async with listening(engine_app(engine), folder.endpoints.port("engine")), asyncio.TaskGroup() as tasks:
            tell_person(f"engine at {folder.endpoints.url('engine')}")
            tasks.create_task(engine.run())
            tasks.create_task(follow(follower, engine, events))
            tasks.create_task(report_load(engine, events))


def run_engine(folder: RunFolder) -> None:
    """Serve until told to stop."""
    config = folder.config()
    if config.engine.kind == "vllm":
        run_until_signal(serve_vllm(folder, config))
        return
    torch.set_num_threads(config.engine.threads)
    run_until_signal(_serve(folder, config))
