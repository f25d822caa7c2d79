"""The vLLM engine: starts the server, and updates its weights from version to version by files that it reads.

    update ──▶ changed numbers, or a whole checkpoint if too much changed ──▶ vLLM

A whole checkpoint is written to a memory file system if there is one. The next process that opens a scratch folder
removes the files that a killed process left there.
"""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import final

import aiohttp
from safetensors.torch import load_file

from etude.config.inference import VllmOptions
from etude.config.recipe import RunConfig
from etude.engines.api_client import ApiClient
from etude.engines.kinds import EngineContext, ServedEngine, Swap, WeightUpdate, WeightUpdater
from etude.engines.native.scheduler import SwapMode
from etude.engines.server_process import CheckpointWriter, free_port, limits_of, to_flags
from etude.engines.vllm.answers import ServerFeatures
from etude.engines.vllm.engine import VllmEngine
from etude.engines.vllm.process import VllmServer, find_python, start
from etude.errors import ConfigError, InfrastructureError
from etude.models.adapters import ABOUT
from etude.models.checkpoint import CONFIG_FILE
from etude.models.peft import PREFIX, WEIGHTS_FILE, write_peft
from etude.models.spec import ModelSpec
from etude.sandboxes.scratch import Scratch
from etude.weights.digest import state_digest
from etude.weights.replica import PulledWeights
from etude.weights.tensors import to_stored, to_tensors


@asynccontextmanager
async def open_vllm(context: EngineContext, pulled: PulledWeights) -> AsyncIterator[ServedEngine]:
    """Start a server with a weight version, and stop it when the context ends."""
    config, options = context.config, context.config.engine.options
    assert isinstance(options, VllmOptions), config.engine.kind
    with closing(Scratch.open(None)) as scratch:
        memory = scratch.create(reader=None)
        writer = CheckpointWriter(context.model_folder / CONFIG_FILE, memory)
        state, digest = pulled.state, pulled.digest
        if context.base is not None:  # adapters are loaded over it, one per version
            state = await asyncio.to_thread(context.base)
            digest = state_digest(state)
        model = await asyncio.to_thread(writer.write, state)
        python = find_python(options.python)
        key = secrets.token_urlsafe(32)  # for this server and its one client, new at each start
        server = server_of(config, context.spec, python=python, model=model, port=free_port(), api_key=key)
        process = start(server, context.logs)
        try:
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as http:
                client = ApiClient("vLLM", process.base_url, http)
                features = ServerFeatures(sparse_layers=context.spec.sparse_layers if server.routes else ())
                limits = limits_of(model, server.max_length)
                engine = VllmEngine(client, limits, features, memory)
                begin = partial(engine.start, pulled.version, digest, frozen=context.base is not None)
                await process.start_engine(client, limits.load_s, begin)
                updater: WeightUpdater = VllmUpdater(engine, writer, SwapMode(options.swap))
                if context.base is not None:
                    updater = AdapterUpdater(engine, context.spec, memory)
                    await updater.stage(WeightUpdate(weights=pulled, changed=None))()
                yield ServedEngine(engine=engine, updater=updater, tasks=(process.watch,))
        finally:
            process.stop()


def server_of(
    config: RunConfig, spec: ModelSpec, *, python: Path, model: Path, port: int, api_key: str = ""
) -> VllmServer:
    """The settings of the server that a run needs; it returns routes if the trainer replays them."""
    options = config.engine.options
    assert isinstance(options, VllmOptions), config.engine.kind
    if config.lora.trains("rl") and spec.experts is not None and config.engine.device == "cpu":
        raise ConfigError(
            "vLLM computes adapters of a model with experts in Triton, which has no CPU backend ('triton.language' has "
            "no attribute 'float32' in vLLM 0.32): use a GPU, or engine.kind = 'native'"
        )
    return VllmServer(
        python=python,
        model=model,
        port=port,
        api_key=api_key,
        device="cpu" if config.engine.device == "cpu" else "cuda",
        dtype=config.numerics.stored_dtype,
        max_length=config.engine.max_length,
        max_running=config.engine.max_running,
        lora_rank=config.lora.rank if config.lora.trains("rl") else 0,
        routes=spec.experts is not None and config.numerics.replay != "off",
        extra=to_flags(options.arguments),
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
        """Write a checkpoint if too much changed."""
        pulled = update.weights
        source = self._writer.write(pulled.state) if update.changed is None else update.changed

        async def swap() -> float:
            return (await self._engine.update(pulled.version, pulled.digest, source, self._mode)).pause_s

        return swap

    def settle(self) -> None:
        """Do nothing: the server has one copy."""


@final
class AdapterUpdater:
    """Loads one adapter after the other over a server's frozen weights; implements
    :class:`~etude.engines.kinds.WeightUpdater`.
    """

    def __init__(self, engine: VllmEngine, spec: ModelSpec, scratch: Path) -> None:
        """PEFT folders are written into ``scratch``, which the server must be able to read."""
        self._engine = engine
        self._spec = spec
        self._scratch = scratch

    @property
    def version(self) -> int:
        """The weight version being served."""
        return self._engine.version

    def stage(self, update: WeightUpdate) -> Swap:
        """Write the adapter as a PEFT folder, and verify the file. Raises :class:`~etude.errors.InfrastructureError` if
        it differs from the published adapter.
        """
        pulled, folder = update.weights, Path(tempfile.mkdtemp(dir=self._scratch))
        state = to_tensors(pulled.state)
        write_peft(folder, state, self._spec, base_name="base")
        written = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
        if (digest := state_digest(to_stored(written | {name: state[name] for name in ABOUT}))) != pulled.digest:
            raise InfrastructureError(f"{folder} holds the adapter {digest[:12]}, not {pulled.digest[:12]}")

        async def swap() -> float:
            await self._engine.load_adapter(pulled.version, pulled.digest, folder)
            return 0.0

        return swap

    def settle(self) -> None:
        """Do nothing: each adapter is loaded as a whole."""
