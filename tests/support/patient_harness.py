"""A harness that takes its time, whatever the model does: for runs in which places for rollouts are what is short."""

import asyncio

from etude.config.rollouts import CodingOptions
from etude.harnesses.coding import CodingHarness
from etude.harnesses.completions import HarnessContext
from etude.protocols import HarnessResult, Sandbox, Session
from etude.types import Task

THINKING_S = 1.5


class PatientHarness:
    """The coding agent, which begins after a while."""

    Options = CodingOptions

    def __init__(self, options: CodingOptions, context: HarnessContext) -> None:
        self._agent = CodingHarness.open(options, context)

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        await asyncio.sleep(THINKING_S)
        return await self._agent.run(task, session, sandbox, temperature=temperature)
