"""One rollout, from an open session to a graded or failed record.

Owns the order of events in a rollout, its deadline, and the one decision whose fault a failure is: only here do errors
become rollouts. Does not own retries or what the record is for (:mod:`etude.rollouts.flight`).
"""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import aiohttp

from etude.errors import InfrastructureError
from etude.ledger.ledger import OpenSlot
from etude.protocols import Clock, Grader, Harness, HarnessResult, Reward, SandboxProvider, Session
from etude.types import Rollout, RolloutStatus, Task, Turn

INFRASTRUCTURE = (InfrastructureError, aiohttp.ClientError, OSError)
"""What is a machine's fault. ``TimeoutError`` is an ``OSError``, so a missed deadline is one of them. Everything else
that is raised is a bug, and passes.
"""
CLOSE_TIMEOUT_S = 10.0
"""How long a failed rollout may take to give back its sandbox or session."""


class Sessions(Protocol):
    """The gateway as rollouts see it: it lends a way to the model and says afterwards what was sampled there."""

    async def open(self) -> Session:
        """Start a session. Raises :class:`~etude.errors.EngineUnavailable` when the gateway cannot be reached."""
        ...

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session and hand over its turns in order.

        Raises :class:`~etude.errors.SessionLost` when it is not known (any more), else
        :class:`~etude.errors.EngineUnavailable` when the gateway cannot be reached.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """The parts that every rollout is run with."""

    sessions: Sessions
    sandboxes: SandboxProvider
    harness: Harness
    grader: Grader
    clock: Clock


async def run_rollout(slot: OpenSlot, rig: Rig, *, rollout_id: str, temperature: float, timeout_s: float) -> Rollout:
    """Attempt a slot once; the result is graded or failed by infrastructure, within ``timeout_s`` plus closing.

    Bad or malformed work of the model is graded. Cancellation and bugs are raised. Whatever happens, sandbox and
    session are closed.
    """
    ended = partial(Rollout, rollout_id=rollout_id, group_index=slot.group_index, slot=slot.slot, attempt=slot.attempt)
    started_s = rig.clock.now()
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            result, reward, turns = await _play(slot.task, rig, temperature)
    except INFRASTRUCTURE as error:
        reason = f"no end within {timeout_s:g} s" if deadline.expired() else str(error)
        return ended(
            status=RolloutStatus.FAILED_INFRA,
            reward=None,
            reason=f"{type(error).__name__}: {reason}",
            seconds=rig.clock.now() - started_s,
        )
    return ended(
        status=RolloutStatus.GRADED,
        reward=reward.value,
        reward_parts=reward.parts,
        reason=result.reason,
        counts=result.counts,
        turns=turns,
        seconds=rig.clock.now() - started_s,
    )


async def _play(task: Task, rig: Rig, temperature: float) -> tuple[HarnessResult, Reward, tuple[Turn, ...]]:
    session = await rig.sessions.open()
    try:
        sandbox = await rig.sandboxes.create(task.files)
        try:
            result = await rig.harness.run(task, session, sandbox, temperature=temperature)
            reward = await rig.grader.grade(task, sandbox, result)
        finally:
            await _quietly(sandbox.close())
    except BaseException:
        await _quietly(rig.sessions.close(session.session_id))
        raise
    turns = await rig.sessions.close(session.session_id)
    if not turns:
        raise InfrastructureError("the session has no turn: the harness never reached the gateway")
    return result, reward, turns


async def _quietly(closing: Awaitable[object]) -> None:
    """Close in bounded time; what matters is what happened before, so trouble here is not reported over it."""
    with suppress(*INFRASTRUCTURE):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await closing
