"""One rollout, from an open session to a graded or failed record.

    open a session ──▶ make a world ──▶ the agent ──▶ look for cheating ──▶ grade ──▶ fetch the turns
                                           └─ out of its own time: graded as it stands

Owns the order of events in a rollout and the one decision whose fault a failure is: only here do errors become
rollouts. Does not own how long each part may take (:mod:`etude.rollouts.bounds`), retries, or what the record is for
(:mod:`etude.rollouts.flight`).
"""

from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import aiohttp

from etude.errors import EngineUnavailable, InfrastructureError
from etude.ledger.ledger import OpenSlot
from etude.protocols import Clock, Grader, Harness, HarnessResult, Reward, Sandbox, Session
from etude.rollouts.bounds import AgentTime, BoundedSandbox, Limits, OutOfTime, within
from etude.types import Rollout, RolloutStatus, Task, Turn, Verdict

INFRASTRUCTURE = (InfrastructureError, aiohttp.ClientError, OSError)
"""What is a machine's fault. ``TimeoutError`` is an ``OSError``, so a missed deadline is one of them. Everything else
that is raised is a bug, and passes.
"""
GRADINGS = 2
"""Tries to grade what an agent left behind: cheaper than the rollout once more, and long ones are not lost for it."""
OUT_OF_TIME = "time"
"""Why an agent stopped whose commands took all the time they may; beside the reasons of harnesses."""


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


async def run_rollout(slot: OpenSlot, rig: Rig, limits: Limits, *, rollout_id: str, temperature: float) -> Rollout:
    """Attempt a slot once; the result is graded or failed by infrastructure, in bounded time.

    Bad or malformed work of the model is graded, and so is work that used up its own time. Cancellation and bugs are
    raised. Whatever happens, sandbox and session are closed.
    """
    ended = partial(Rollout, rollout_id=rollout_id, group_index=slot.group_index, slot=slot.slot, attempt=slot.attempt)
    started_s = rig.clock.now()
    try:
        played = await _play(slot, rig, limits, temperature)
    except INFRASTRUCTURE as error:
        return ended(
            status=RolloutStatus.FAILED_INFRA,
            reward=None,
            reason=f"{type(error).__name__}: {error}",
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


async def _play(slot: OpenSlot, rig: Rig, limits: Limits, temperature: float) -> _Played:
    task = slot.task
    session = await within(limits.start_s, "opening a session", rig.sessions.open())
    try:
        sandbox = BoundedSandbox(await within(limits.start_s, "making a world", rig.worlds.open(task)))
        try:
            watching = None if rig.watch is None else await rig.watch.begin(task, sandbox)
            agent = AgentTime(limits)
            hands = BoundedSandbox(sandbox, agent)
            try:
                result = await agent.wait(rig.harness.run(task, session, hands, temperature=temperature))
            except OutOfTime:
                result = HarnessResult(reason=OUT_OF_TIME, counts={})
            if watching is not None:
                await watching.look()
            reward = await _grade(task, sandbox, result, rig.grader, limits)
        finally:
            await _quietly(limits, sandbox.close())
    except BaseException:
        await _quietly(limits, rig.sessions.close(session.session_id))
        raise
    turns = await within(limits.start_s, "fetching the turns", rig.sessions.close(session.session_id))
    if not turns:
        raise InfrastructureError("the session has no turn: the harness never reached the gateway")
    _check_versions(turns, slot.admitted_version)
    verdict = None if watching is None else watching.judge(reward, turns)
    return _Played(result=result, reward=reward, turns=turns, verdict=verdict)


def _check_versions(turns: Sequence[Turn], admitted_version: int) -> None:
    """No token is older than what every engine served when its group was admitted: the bound of staleness rests on it.

    An engine that was out of reach, and so not counted, may have come back with old weights.
    """
    oldest = min((int(turn.versions.min()) for turn in turns if len(turn.versions)), default=admitted_version)
    if oldest < admitted_version:
        raise EngineUnavailable(
            f"an engine sampled with weight version {oldest}; every engine had served {admitted_version} or a later "
            f"one when this group was admitted"
        )


async def _grade(task: Task, sandbox: Sandbox, result: HarnessResult, grader: Grader, limits: Limits) -> Reward:
    """The work is done and lies there: trouble while grading it is no reason to do it again, the first time."""
    for _ in range(GRADINGS - 1):
        with suppress(*INFRASTRUCTURE):
            return await within(limits.grading_s, "grading", grader.grade(task, sandbox, result))
    return await within(limits.grading_s, "grading", grader.grade(task, sandbox, result))


async def _quietly(limits: Limits, closing: Awaitable[object]) -> None:
    """Close in bounded time; what matters is what happened before, so trouble here is not reported over it."""
    with suppress(*INFRASTRUCTURE):
        await within(limits.closing_s, "closing", closing)
