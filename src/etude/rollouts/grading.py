"""The grading of what an agent left behind, once nothing of it runs any more.

    the agent is gone ──▶ its processes are killed ──▶ look for cheating ──▶ grade, and once more if a machine failed

A verdict that an agent could turn into a failure of ours would be tried again until it is a better one: a policy that
passes with probability p would be measured as one that passes with 1 − (1 − p)^attempts. So whoever is to blame is
found out where a job fails, not guessed here: :class:`~etude.errors.AgentFault` is worth zero, every other trouble is
infrastructure's.
"""

from contextlib import suppress
from typing import Protocol

import aiohttp

from etude.errors import AgentFault, InfrastructureError
from etude.protocols import Grade, Grader, HarnessResult, Sandbox
from etude.rollouts.bounds import Limits, within
from etude.types import Task

INFRASTRUCTURE = (InfrastructureError, aiohttp.ClientError, OSError)
"""Errors that are a machine's fault. ``TimeoutError`` is an ``OSError``, so a missed deadline is one of them. Anything
else that is raised is a bug, and passes.
"""
GRADINGS = 2
"""Tries to grade what an agent left behind: cheaper than the rollout once more, and long ones are not lost for it."""


class CheatMonitor(Protocol):
    """A look for cheating before anything is graded."""

    async def look(self) -> None:
        """Raises :class:`~etude.errors.SandboxError`."""
        ...


async def grade_leftovers(
    task: Task,
    sandbox: Sandbox,
    result: HarnessResult,
    grader: Grader,
    limits: Limits,
    monitor: CheatMonitor | None = None,
) -> Grade:
    """Grade the files that an agent left; 0 with the part ``agent_fault`` where it is in the way of grading.

    Every run that its checks may take has its whole time: else work that hangs its verifier, or takes one run more for
    being right, would be infrastructure's trouble and no reward. Raises ``INFRASTRUCTURE``.
    """
    deadline_s = limits.grading_s + task.grading_s
    try:
        await sandbox.kill_processes()
        if monitor is not None:
            await monitor.look()
        for _ in range(GRADINGS - 1):
            with suppress(*INFRASTRUCTURE):
                return await within(deadline_s, "grading", grader.grade(task, sandbox, result))
        return await within(deadline_s, "grading", grader.grade(task, sandbox, result))
    except AgentFault:
        return Grade(value=0.0, parts={AgentFault.REASON: 1.0})
