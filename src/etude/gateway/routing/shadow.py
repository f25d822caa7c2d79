"""The shadow: some prompts of users, sampled a second time by the weights that are tried, which nobody sees.

    answered call ──offer──▶ chance, room ──▶ engine of the shadow's arm ──▶ ShadowCall ──▶ receive

Consumes answered calls of users; produces one :class:`ShadowCall` each; waits for engines, :data:`DEADLINE_S` at most;
woken by calls; on shutdown cancelled with what is under way. It takes no permit, has the lowest priority at the engines
and is given up where :data:`AT_ONCE` are under way: users never wait for it. Texts and tokens are kept nowhere.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import final

from etude.errors import EngineUnavailable, VersionPending
from etude.gateway.routing.admission import SHADOW_PRIORITY
from etude.gateway.routing.arms import ReleasedArms, ShadowArm
from etude.gateway.routing.pool import CallOptions, EnginePool
from etude.protocols import Clock, Completion, SamplingParams
from etude.types import TokenIds

AT_ONCE = 2
"""Shadow calls of one gateway that are under way at a time."""
DEADLINE_S = 120.0
"""Longest time of one, waiting for an engine included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowCall:
    """One prompt, as users were answered and as the shadow would have."""

    digest: str
    """The weights of the shadow."""
    failed: bool
    seconds: float
    tokens: int
    live_seconds: float
    live_tokens: int


@final
class Shadow:
    """Samples a ``share`` of the calls it is offered again, and hands out what came of it."""

    def __init__(
        self,
        pool: EnginePool,
        arms: ReleasedArms,
        clock: Clock,
        receive: Callable[[ShadowCall], None],
        *,
        share: float,
    ) -> None:
        self._pool = pool
        self._arms = arms
        self._clock = clock
        self._receive = receive
        self._share = share
        self._random = Random()
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(
        self, prompt_ids: TokenIds, params: SamplingParams, answer: Completion, session: str, seconds: float
    ) -> None:
        """Take an answered call, or leave it."""
        arm = None if self._arms.table is None else self._arms.table.shadow
        if arm is None or len(self._tasks) >= AT_ONCE or self._random.random() >= self._share:
            return
        unseen = replace(params, priority=SHADOW_PRIORITY, want_routes=False)
        work = self._sample(prompt_ids, unseen, ShadowArm(digest=arm.digest), session, (seconds, len(answer.token_ids)))
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sample(
        self, prompt_ids: TokenIds, params: SamplingParams, arm: ShadowArm, session: str, live: tuple[float, int]
    ) -> None:
        dispatched: list[float] = []
        options = CallOptions(
            arm=arm, deadline_s=DEADLINE_S, dispatched=lambda at, _: None if at is None else dispatched.append(at)
        )
        tokens, failed = 0, False
        try:
            completion = await self._pool.generate(prompt_ids, params, session=f"shadow.{session}", options=options)
            tokens = len(completion.token_ids)
        except (EngineUnavailable, VersionPending, ValueError):
            if not dispatched:
                return  # no engine holds it yet, which says nothing of it
            failed = True
        seconds = self._clock.now() - dispatched[-1]
        self._receive(
            ShadowCall(
                digest=arm.digest,
                failed=failed,
                seconds=seconds,
                tokens=tokens,
                live_seconds=live[0],
                live_tokens=live[1],
            )
        )
