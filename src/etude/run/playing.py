"""One task played in this process, before or outside a run: with the recipe's sandboxes, grader and harness, and a
separate gateway in front of any engine.

    task ──▶ sandbox, harness ──HTTP──▶ gateway ──▶ engine, a fake one or a real one
                                                     └─▶ each completion is reported to the caller

Wiring only: :mod:`etude.rollouts.worker` runs the rollout, of which nothing is recorded.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final
from uuid import uuid4

import aiohttp

from etude.aio import background_task
from etude.clock import SystemClock
from etude.config.recipe import RunConfig
from etude.gateway.http.app import http_server
from etude.gateway.http.auth import Key, Scope, digest_of, new_key_id, new_secret
from etude.gateway.routing.router import EngineEntry
from etude.gateway.service import Recorder
from etude.ledger.ledger import OpenSlot
from etude.protocols import Completion, Engine, EngineHealth, SamplingParams, TokenChunk
from etude.rollouts.gateway_table import GatewayTable
from etude.rollouts.sandbox import RolloutLimits
from etude.rollouts.sessions import GatewaySessions
from etude.rollouts.worker import RolloutContext, run_rollout
from etude.run.endpoints import HOST
from etude.run.gateway import GatewaySpec, open_gateway
from etude.run.rollouts import open_stage
from etude.run.serving import listening
from etude.tokens.messages import ChatFormat
from etude.types import Rollout, Task, TokenIds

OnCompletion = Callable[[TokenIds, Completion], None]
"""Called with the ids of a prompt and its completion."""
POLL_S = 0.02
"""Interval at which the gateway is polled until it has connected to its engine."""


@final
class WatchedEngine:
    """An engine that reports every completion; implements :class:`~etude.protocols.Engine`."""

    def __init__(self, engine: Engine, tell: OnCompletion) -> None:
        self._engine = engine
        self._tell = tell

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        """Sample one completion, and report it."""
        completion = await self._engine.generate(prompt_ids, params, session=session)
        self._tell(prompt_ids, completion)
        return completion

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Sample one completion token by token, and report the whole."""
        async with contextlib.aclosing(self._engine.stream(prompt_ids, params, session=session)) as chunks:
            async for chunk in chunks:
                if chunk.completion is not None:
                    self._tell(prompt_ids, chunk.completion)
                yield chunk

    async def health(self) -> EngineHealth:
        """The engine's own health."""
        return await self._engine.health()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The components for playing a task."""

    config: RunConfig
    chat: ChatFormat
    engine: Engine
    folder: Path
    """Scratch folder: the files of an external harness are written there."""
    max_length: int
    """The engine's bound on prompt and completion together, in tokens."""


async def play(stage: Stage, task: Task, *, temperature: float, tell: OnCompletion) -> Rollout:
    """Play a task once and grade it; the rollout records how it ended, as in a run.

    Raises :class:`~etude.errors.ConfigError` if this machine lacks requirements of the recipe's sandboxes or harness.
    """
    config, secret = stage.config, new_secret(Scope.ADMIN)
    admin = Key(key_id=new_key_id(), digest=digest_of(secret), scope=Scope.ADMIN)
    spec = GatewaySpec(
        chat=stage.chat,
        max_length=stage.max_length,
        recorder=Recorder(None),
        engines=(EngineEntry(name="engine", url="http://engine"),),
        keys=(admin,),
    )
    watched = WatchedEngine(stage.engine, tell)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        parts = await stack.enter_async_context(open_gateway(spec, config.gateway, SystemClock(), lambda _: watched))
        server = http_server(parts.gateway.handle)
        url = f"http://{HOST}:{await stack.enter_async_context(listening(server, 0))}"
        sandboxes, grader, harness = await open_stage(stack, config, http, folder=stage.folder, gateway_urls=[url])
        sessions = GatewaySessions(GatewayTable([url]), secret, http)
        await stack.enter_async_context(background_task(sessions.keep_alive()))
        context = RolloutContext(
            sessions=sessions,
            sandboxes=sandboxes,
            harness=harness,
            grader=grader,
            clock=SystemClock(),
            limits=RolloutLimits.of(config.rollouts, config.harness),
        )
        while not parts.pool.versions():
            await asyncio.sleep(POLL_S)
        slot = OpenSlot(task=task, group_index=0, slot=0, attempt=0)
        return await run_rollout(slot, context, rollout_id=uuid4().hex, temperature=temperature)
