"""One rollout, from an open session to a graded or failed record.

Owns the order of events in a rollout, its deadline, and the one decision whose fault a failure is: only here do errors
become rollouts. Does not own retries or what the record is for (:mod:`etude.rollouts.flight`).
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import aiohttp

from etude.errors import InfrastructureError
from etude.ledger.ledger import OpenSlot
from etude.protocols import Clock, Grader, Harness, HarnessResult, Reward, Sandbox, Session
from etude.types import Rollout, RolloutStatus, Task, Turn, Verdict

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


class Worlds(Protocol):
    """Where tasks are worked on."""

    async def open(self, task: Task) -> Sandbox:
        """A fresh sandbox as the task's world says, with its files. Raises :class:`~etude.errors.SandboxError`."""
        ...


class Watching(Protocol):
    """A look at one rollout for cheating."""

    async def look(self) -> None:
        """The agent is gone, and nothing was graded yet. Raises :class:`~etude.errors.SandboxError`."""
        ...

    def judge(self, reward: Reward, turns: Sequence[Turn]) -> Verdict:
        """What becomes of it."""
        ...


class Watch(Protocol):
    """Looks for cheating in every rollout."""

    async def begin(self, task: Task, sandbox: Sandbox) -> Watching:
        """Get ready in a fresh sandbox. Raises :class:`~etude.errors.SandboxError`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """The parts that every rollout is run with."""

    sessions: Sessions
    worlds: Worlds
    harness: Harness
    grader: Grader
    clock: Clock
    watch: Watch | None = None
    """``None``: nobody looks for cheating."""


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
            played = await _play(slot.task, rig, temperature)
    except INFRASTRUCTURE as error:
        reason = f"no end within {timeout_s:g} s" if deadline.expired() else str(error)
        return ended(
            status=RolloutStatus.FAILED_INFRA,
            reward=None,
            reason=f"{type(error).__name__}: {reason}",
            seconds=rig.clock.now() - started_s,
        )
    verdict = played.verdict
    return ended(
        status=RolloutStatus.GRADED,
        reward=played.reward.value if verdict is None else verdict.reward,
        reward_parts=played.reward.parts,
        reason=played.result.reason,
        counts=played.result.counts,
        turns=played.turns,
        seconds=rig.clock.now() - started_s,
        verdict=verdict,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """How a session went, what it is worth, and what was sampled in it."""

    result: HarnessResult
    reward: Reward
    turns: tuple[Turn, ...]
    verdict: Verdict | None


async def _play(task: Task, rig: Rig, temperature: float) -> _Played:
    session = await rig.sessions.open()
    try:
        sandbox = await rig.worlds.open(task)
        try:
            watching = None if rig.watch is None else await rig.watch.begin(task, sandbox)
            result = await rig.harness.run(task, session, sandbox, temperature=temperature)
            if watching is not None:
                await watching.look()
            reward = await rig.grader.grade(task, sandbox, result)
        finally:
            await _quietly(sandbox.close())
    except BaseException:
        await _quietly(rig.sessions.close(session.session_id))
        raise
    turns = await rig.sessions.close(session.session_id)
    if not turns:
        raise InfrastructureError("the session has no turn: the harness never reached the gateway")
    verdict = None if watching is None else watching.judge(reward, turns)
    return _Played(result=result, reward=reward, turns=turns, verdict=verdict)


async def _quietly(closing: Awaitable[object]) -> None:
    """Close in bounded time; what matters is what happened before, so trouble here is not reported over it."""
    with suppress(*INFRASTRUCTURE):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await closing
