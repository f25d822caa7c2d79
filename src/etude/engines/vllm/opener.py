"""The vLLM engine kind: a server started by étude, updated from version to version by files that it reads.

    update ──▶ changed numbers, or a whole checkpoint where very much changed ──▶ vLLM

A whole checkpoint goes to a memory file system where there is one; the next process to open a scratch removes what a
killed one left there.
"""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import final

import aiohttp

from etude.config.inference import VllmOptions
from etude.config.recipe import RunConfig
from etude.engines.api_client import ApiClient
from etude.engines.kinds import EngineContext, ServedEngine, Swap, WeightUpdate
from etude.engines.native.scheduler import SwapMode
from etude.engines.vllm.answers import ServerFeatures
from etude.engines.vllm.engine import VllmEngine
from etude.engines.vllm.process import HOST, VllmProcess, VllmServer, find_python
from etude.errors import ConfigError, EngineUnavailable
from etude.models.checkpoint import CONFIG_FILE
from etude.models.spec import ModelSpec
from etude.sandboxes.scratch import Scratch
from etude.weights.interop.checkpoint import write_checkpoint
from etude.weights.replica import PulledWeights
from etude.weights.state import State

WATCH_S = 0.2
"""Seconds between two looks at whether the server runs."""
START_S = 1800.0
"""Longest time for a server to load a checkpoint and to compile; half a minute on two cores for a small one, many for
a large one on a GPU. One that ends is noticed at once.
"""


@asynccontextmanager
async def open_vllm(context: EngineContext, pulled: PulledWeights) -> AsyncIterator[ServedEngine]:
    """Start a server on a version, and stop it with the context."""
    config, options = context.config, context.config.engine.options
    assert isinstance(options, VllmOptions), config.engine.kind
    with closing(Scratch.open(None)) as scratch:
        memory = scratch.create(reader=None)
        writer = CheckpointWriter(context.model_folder / CONFIG_FILE, memory)
        model = await asyncio.to_thread(writer.write, pulled.state)
        python = find_python(options.python)
        server = server_of(config, context.spec, python=python, model=model, port=_free_port())
        process = VllmProcess(server, context.logs)
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                client = ApiClient("vLLM", process.base_url, http)
                features = ServerFeatures(sparse_layers=context.spec.sparse_layers if server.routes else ())
                engine = VllmEngine(client, server.limits(), features, memory)
                await _start(process, engine, client, pulled)
                updater = VllmUpdater(engine, writer, SwapMode(options.swap))
                yield ServedEngine(engine=engine, updater=updater, tasks=(lambda: _watch(process),))
        finally:
            process.stop()


def server_of(config: RunConfig, spec: ModelSpec, *, python: Path, model: Path, port: int) -> VllmServer:
    """The settings of the server that a run needs; it returns routes where the trainer replays them."""
    return VllmServer(
        python=python,
        model=model,
        port=port,
        device="cpu" if config.engine.device == "cpu" else "cuda",
        dtype=config.numerics.dtype,
        max_length=config.engine.max_length,
        max_running=config.engine.max_running,
        routes=spec.experts is not None and config.numerics.replay != "off",
    )


@final
@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """Writes weight states as Hugging Face checkpoints."""

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


@final
class VllmUpdater:
    """Updates a server from version to version; implements :class:`~etude.engines.kinds.WeightUpdater`."""

    def __init__(self, engine: VllmEngine, writer: CheckpointWriter, mode: SwapMode) -> None:
        self._engine = engine
        self._writer = writer
        self._mode = mode

    @property
    def version(self) -> int:
        """The weight version being served."""
        return self._engine.version

    def stage(self, update: WeightUpdate) -> Swap:
        """Write a checkpoint where very much changed."""
        pulled = update.weights
        source = self._writer.write(pulled.state) if update.changed is None else update.changed

        async def swap() -> float:
            return (await self._engine.update(pulled.version, pulled.digest, source, self._mode)).pause_s

        return swap

    def settle(self) -> None:
        """Nothing: the server has one copy."""


async def _start(process: VllmProcess, engine: VllmEngine, client: ApiClient, pulled: PulledWeights) -> None:
    """Wait for the server and make sure of its weights.

    Raises :class:`~etude.errors.ConfigError` when that fails: started again with the same settings it would again.
    """
    try:
        await process.ready(client, START_S)
        await engine.start(pulled.version, pulled.digest)
    except EngineUnavailable as error:
        raise ConfigError(f"vLLM cannot serve this run: {error}; see {process.log}") from error


async def _watch(process: VllmProcess) -> None:
    """Raise :class:`~etude.errors.EngineUnavailable` once the server ends."""
    while process.is_running:
        await asyncio.sleep(WATCH_S)
    raise EngineUnavailable(f"vLLM ended: see {process.log}")


def _free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
