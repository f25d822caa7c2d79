"""The engine process when vLLM is the engine: starts a server, keeps its weights on the newest version, serves it.

weight store ──pull, verify──▶ changed numbers ──patch──▶ vLLM ──▶ tokens over HTTP, in the native engine's own format

The gateway sees no difference: the same address, the same wire format. A version that changed very much goes there as a
whole checkpoint, on a memory file system where there is one; whoever opens a scratch next removes what a killed process
left there.
"""

import asyncio
import shutil
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from etude.config.recipe import RunConfig
from etude.engines.http.exchange import Exchange
from etude.engines.native.scheduler import SwapMode
from etude.engines.native.server import engine_app
from etude.engines.vllm.answers import Offer
from etude.engines.vllm.engine import Source, VllmEngine
from etude.engines.vllm.process import VllmProcess, VllmServer, find_python
from etude.engines.weights.inplace import RELOAD_SHARE
from etude.errors import ConfigError, EngineUnavailable
from etude.models.checkpoint import CONFIG_FILE, load_spec
from etude.models.spec import ModelSpec
from etude.run.endpoints import probe_port
from etude.run.folder import RunFolder
from etude.run.numerics import largest_state, route_space
from etude.run.serving import listening, tell_person
from etude.run.store_outages import StoreOutages
from etude.run.weight_follower import next_arrival
from etude.run.weight_log import open_log
from etude.sandboxes.scratch import Scratch
from etude.telemetry.events import WeightsSwapped
from etude.telemetry.log import EventLog
from etude.weights.interop.checkpoint import write_checkpoint
from etude.weights.log import WeightLog
from etude.weights.pull import Arrival, Receiver
from etude.weights.replica import PulledWeights
from etude.weights.state import State

WATCH_S = 0.2
"""How often it is looked after the server."""
START_S = 1800.0
"""Longest time for a server to load a checkpoint and to compile; half a minute on two cores for a small one, many for
a large one on a GPU. One that ends is noticed at once.
"""


async def serve_vllm(folder: RunFolder, config: RunConfig) -> None:
    """Serve until cancelled. Raises :class:`~etude.errors.EngineUnavailable` when the server ends."""
    spec = load_spec(folder.model)
    python = find_python(config.engine.vllm_python)
    with (
        closing(Scratch.open(None)) as scratch,
        EventLog(folder.events, "engine") as events,
        StoreOutages(folder.store, config.rollouts.max_outage_s, events) as outages,
        closing(Receiver(log := open_log(folder, outages), largest_state(spec))) as receiver,
        outages,  # first of all nobody waits any more
    ):
        await asyncio.to_thread(receiver.advance)
        pulled = receiver.weights()
        memory = scratch.create(reader=None)
        writer = _Writer(folder.model / CONFIG_FILE, memory)
        with probe_port(0) as port:
            pass  # let go of it again: the server is to listen there
        server = server_of(config, spec, python=python, model=writer.write(pulled.state), port=port)
        process = VllmProcess(server, folder.logs)
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                exchange = Exchange("vLLM", process.base_url, http)
                offer = Offer(sparse_layers=spec.sparse_layers if server.routes else ())
                engine = VllmEngine(exchange, server.limits(), offer, memory)
                await _start(process, engine, exchange, pulled)
                follower = _Follower(log=log, receiver=receiver, engine=engine, writer=writer)
                async with listening(engine_app(engine), folder.endpoints.port("engine")), asyncio.TaskGroup() as tasks:
                    tell_person(f"engine at {folder.endpoints.url('engine')}")
                    tasks.create_task(_watch(process))
                    tasks.create_task(_follow(follower, pulled.version, SwapMode(config.engine.swap), events))
        finally:
            process.stop()


def server_of(config: RunConfig, spec: ModelSpec, *, python: Path, model: Path, port: int) -> VllmServer:
    """The server that a run asks for; it returns routes where the trainer replays any."""
    return VllmServer(
        python=python,
        model=model,
        port=port,
        device="cpu" if config.engine.device == "cpu" else "cuda",
        dtype=config.numerics.dtype,
        max_length=config.engine.max_length,
        max_running=config.engine.max_running,
        routes=route_space(spec, config.numerics) is not None,
    )


async def _start(process: VllmProcess, engine: VllmEngine, exchange: Exchange, pulled: PulledWeights) -> None:
    """Wait for the server and make sure of its weights.

    Raises :class:`~etude.errors.ConfigError` when that fails: started again with the same settings it would again.
    """
    try:
        await process.ready(exchange, START_S)
        await engine.start(pulled.version, pulled.digest)
    except EngineUnavailable as error:
        raise ConfigError(f"vLLM cannot serve this run: {error}; see {process.log}") from error


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes states as Hugging Face checkpoints."""

    config: Path
    """The file that describes the model."""
    scratch: Path

    def write(self, state: State) -> Path:
        """A folder with a checkpoint of a published state; the one before is gone."""
        target = self.scratch / "model"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        shutil.copy(self.config, target / CONFIG_FILE)
        write_checkpoint(target, state)
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class _Follower:
    """Brings a log's newest version to the server."""

    log: WeightLog
    receiver: Receiver
    engine: VllmEngine
    writer: _Writer

    def stage(self, arrival: Arrival) -> tuple[PulledWeights, Source]:
        """What has arrived, and what leads there."""
        pulled = self.receiver.weights()
        if self.receiver.changed_share(arrival) * RELOAD_SHARE > 1:
            return pulled, self.writer.write(pulled.state)
        return pulled, self.receiver.changed(arrival)


async def _follow(follower: _Follower, served: int, mode: SwapMode, events: EventLog) -> None:
    """Swap every version after ``served`` in, for ever."""
    while True:
        arrival = await next_arrival(follower.log, follower.receiver, served)
        started_s = time.perf_counter()
        pulled, source = await asyncio.to_thread(follower.stage, arrival)
        stage_s = arrival.seconds + time.perf_counter() - started_s
        pause = await follower.engine.update(pulled.version, pulled.digest, source, mode)
        served = pulled.version
        events.write(WeightsSwapped(version=served, stage_ms=1e3 * stage_s, pause_ms=1e3 * pause.pause_s))


async def _watch(process: VllmProcess) -> None:
    """Raise :class:`~etude.errors.EngineUnavailable` once the server ends."""
    while process.is_running:
        await asyncio.sleep(WATCH_S)
    raise EngineUnavailable(f"vLLM ended: see {process.log}")
