"""The shadow: some users' prompts are sampled a second time by weights under test; no user sees the result.

    answered call ──offer──▶ chance, room ──▶ engine of the shadow's arm ──▶ ShadowCall ──▶ receive

Consumes answered calls of users; produces one :class:`ShadowCall` each; waits for engines, :data:`DEADLINE_S` at most;
woken by calls; on shutdown cancelled with its calls in progress. It takes no permit, has the lowest priority at the
engines and skips a call while :data:`AT_ONCE` are in progress: users never wait for it. Texts and tokens are not
stored.
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
"""Shadow calls of one gateway in progress at a time."""
DEADLINE_S = 120.0
"""Longest duration of one call, including the wait for an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowCall:
    """One prompt with the users' answer and the shadow's answer."""

    digest: str
    """The weights of the shadow."""
    failed: bool
    seconds: float
    tokens: int
    live_seconds: float
    live_tokens: int


@final
class Shadow:
    """Samples a ``share`` of the offered calls again, and passes the results on."""

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
        """Sample an answered call again, or skip it."""
        arm = None if self._arms.table is None else self._arms.table.shadow
        if arm is None or len(self._tasks) >= AT_ONCE or self._random.random() >= self._share:
            return
        unseen = replace(params, priority=SHADOW_PRIORITY, want_routes=False)
        work = self._sample(prompt_ids, unseen, ShadowArm(digest=arm.digest), session, (seconds, len(answer.token_ids)))
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the calls in progress."""
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
                return  # no engine has these weights yet, which says nothing about them
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
