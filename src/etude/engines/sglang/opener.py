"""The SGLang engine kind: a server started by étude, updated from version to version by checkpoints that it reads.

    stage ──▶ checkpoint in a memory file system ──▶ swap: requests are aborted, SGLang loads it, they resume

A whole checkpoint is written for each version; the next process that opens a scratch folder removes the files of a
killed one.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import final

import aiohttp

from etude.config.inference import SglangOptions
from etude.config.recipe import RunConfig
from etude.engines.api_client import ApiClient
from etude.engines.kinds import EngineContext, ServedEngine, Swap, WeightUpdate
from etude.engines.server_process import CheckpointWriter, ServerProcess, free_port, limits_of, to_flags
from etude.engines.sglang.engine import SglangEngine, SglangFeatures
from etude.engines.sglang.server import SglangServer, find_python
from etude.models.checkpoint import CONFIG_FILE
from etude.models.spec import ModelSpec
from etude.sandboxes.scratch import Scratch
from etude.weights.replica import PulledWeights


@asynccontextmanager
async def open_sglang(context: EngineContext, pulled: PulledWeights) -> AsyncIterator[ServedEngine]:
    """Start a server on a version, and stop it with the context."""
    config, options = context.config, context.config.engine.options
    assert isinstance(options, SglangOptions), config.engine.kind
    with closing(Scratch.open(None)) as scratch:
        writer = CheckpointWriter(context.model_folder / CONFIG_FILE, scratch.create(reader=None))
        model = await asyncio.to_thread(writer.write, pulled.state)
        server = server_of(config, context.spec, python=find_python(options.python), model=model, pulled=pulled)
        process = ServerProcess(server.command(os.environ), context.logs)
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                client = ApiClient("SGLang", process.base_url, http)
                limits = limits_of(model, server.max_length)
                engine = SglangEngine(client, limits, features_of(context.spec, server))
                await process.start_engine(client, limits.load_s, partial(engine.start, server.version, server.model))
                yield ServedEngine(engine=engine, updater=SglangUpdater(engine, writer), tasks=(process.watch,))
        finally:
            process.stop()


def server_of(config: RunConfig, spec: ModelSpec, *, python: Path, model: Path, pulled: PulledWeights) -> SglangServer:
    """The settings of the server that a run needs; it returns routes if the trainer replays them."""
    options = config.engine.options
    assert isinstance(options, SglangOptions), config.engine.kind
    return SglangServer(
        python=python,
        model=model,
        version=pulled.version,
        port=free_port(),
        device="cpu" if config.engine.device == "cpu" else "cuda",
        dtype=config.numerics.stored_dtype,
        max_length=config.engine.max_length,
        max_running=config.engine.max_running,
        routes=spec.experts is not None and config.numerics.replay != "off",
        extra=to_flags(options.arguments),
    )


def features_of(spec: ModelSpec, server: SglangServer) -> SglangFeatures:
    """The features of a server of this model."""
    if not server.routes or spec.experts is None:
        return SglangFeatures()
    return SglangFeatures(
        sparse_layers=spec.sparse_layers, hidden_layers=spec.layers, experts_per_token=spec.experts.per_token
    )


@final
class SglangUpdater:
    """Updates a server from version to version; implements :class:`~etude.engines.kinds.WeightUpdater`."""

    def __init__(self, engine: SglangEngine, writer: CheckpointWriter) -> None:
        self._engine = engine
        self._writer = writer

    @property
    def version(self) -> int:
        """The weight version being served."""
        return self._engine.version

    def stage(self, update: WeightUpdate) -> Swap:
        """Write a checkpoint: SGLang serves from memory, and reads no file until an update request."""
        pulled = update.weights
        folder = self._writer.write(pulled.state)

        async def swap() -> float:
            return await self._engine.update(pulled.version, pulled.digest, folder)

        return swap

    def settle(self) -> None:
        """Do nothing: the server has one copy."""
