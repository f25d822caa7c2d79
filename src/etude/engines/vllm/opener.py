"""The vLLM engine kind: a server started by étude, updated from version to version by files that it reads.

    update ──▶ changed numbers, or a whole checkpoint where very much changed ──▶ vLLM

A whole checkpoint goes to a memory file system where there is one; the next process to open a scratch removes what a
killed one left there.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import final

import aiohttp

from etude.config.inference import VllmOptions
from etude.config.recipe import RunConfig
from etude.engines.api_client import ApiClient
from etude.engines.kinds import EngineContext, ServedEngine, Swap, WeightUpdate
from etude.engines.native.scheduler import SwapMode
from etude.engines.server_process import CheckpointWriter, free_port, limits_of, spelt
from etude.engines.vllm.answers import ServerFeatures
from etude.engines.vllm.engine import VllmEngine
from etude.engines.vllm.process import VllmServer, find_python, start
from etude.models.checkpoint import CONFIG_FILE
from etude.models.spec import ModelSpec
from etude.sandboxes.scratch import Scratch
from etude.weights.replica import PulledWeights


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
        key = secrets.token_urlsafe(32)  # of this server and its one client, new with each start
        server = server_of(config, context.spec, python=python, model=model, port=free_port(), api_key=key)
        process = start(server, context.logs)
        try:
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as http:
                client = ApiClient("vLLM", process.base_url, http)
                features = ServerFeatures(sparse_layers=context.spec.sparse_layers if server.routes else ())
                limits = limits_of(model, server.max_length)
                engine = VllmEngine(client, limits, features, memory)
                await process.start_engine(client, limits.load_s, partial(engine.start, pulled.version, pulled.digest))
                updater = VllmUpdater(engine, writer, SwapMode(options.swap))
                yield ServedEngine(engine=engine, updater=updater, tasks=(process.watch,))
        finally:
            process.stop()


def server_of(
    config: RunConfig, spec: ModelSpec, *, python: Path, model: Path, port: int, api_key: str = ""
) -> VllmServer:
    """The settings of the server that a run needs; it returns routes where the trainer replays them."""
    options = config.engine.options
    assert isinstance(options, VllmOptions), config.engine.kind
    return VllmServer(
        python=python,
        model=model,
        port=port,
        api_key=api_key,
        device="cpu" if config.engine.device == "cpu" else "cuda",
        dtype=config.numerics.stored_dtype,
        max_length=config.engine.max_length,
        max_running=config.engine.max_running,
        routes=spec.experts is not None and config.numerics.replay != "off",
        extra=spelt(options.arguments),
    )


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
