"""The engine process: serves the newest published weights and swaps them while it serves.

weight store ──pull, verify, build (a thread)──▶ swap between two steps ──▶ tokens over HTTP
"""

import asyncio
import os
import time

import torch

from etude.config import EngineConfig
from etude.engines.native import NativeEngine, Weights
from etude.engines.server import engine_app
from etude.models.checkpoint import load_spec
from etude.models.qwen3_moe import ModelSpec
from etude.run.folder import RunFolder
from etude.run.serving import listening, run_until_signal
from etude.run.states import build_model, resolve_device
from etude.telemetry.events import EngineStats, WeightsSwapped
from etude.telemetry.log import EventLog
from etude.weights.log import read_commit
from etude.weights.pull import PulledWeights, pull
from etude.weights.store import ObjectStore

POLL_S = 0.05
"""How often the store is asked for the next version."""
STATS_S = 1.0
"""How often the load is reported."""


class WeightFollower:
    """Keeps one engine on the newest version of a store."""

    def __init__(self, store: ObjectStore, spec: ModelSpec, device: str) -> None:
        self._store = store
        self._spec = spec
        self._device = device
        self._held: PulledWeights | None = None

    def stage(self) -> Weights:
        """Pull the newest version, verify it and build its model; nothing that serves is touched."""
        self._held = pull(self._store, have=self._held)
        model = build_model(self._spec, self._held.state, self._device)
        return Weights(model, self._held.version, self._held.digest)

    async def follow(self, engine: NativeEngine, events: EventLog) -> None:
        """Swap every new version into ``engine``, for ever.

        consumes: commit records; produces: swaps; waits for: the record after the one served; woken by: its own
        polling; on shutdown: cancelled between two polls.
        """
        while True:
            if read_commit(self._store, engine.weights.version + 1) is None:
                await asyncio.sleep(POLL_S)
                continue
            started_s = time.perf_counter()
            weights = await asyncio.to_thread(self.stage)
            stage_s = time.perf_counter() - started_s
            pause_s = engine.swap(weights)
            events.write(WeightsSwapped(version=weights.version, stage_ms=1e3 * stage_s, pause_ms=1e3 * pause_s))


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


async def _serve(folder: RunFolder, config: EngineConfig, seed: int) -> None:
    follower = WeightFollower(ObjectStore(folder.store), load_spec(folder.model), resolve_device(config.device))
    # A restarted engine must not repeat the random numbers of the one before.
    engine = NativeEngine(follower.stage(), config, seed=seed * 2**32 + os.getpid())
    with EventLog(folder.events, "engine") as events:
        async with listening(engine_app(engine), folder.endpoints.port("engine")), asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run())
            tasks.create_task(follower.follow(engine, events))
            tasks.create_task(report_load(engine, events))


def run_engine(folder: RunFolder) -> None:
    """Serve until told to stop."""
    config = folder.config()
    torch.set_num_threads(config.engine.threads)
    run_until_signal(_serve(folder, config.engine, config.seed))
