"""The agents of an environment of the ``verifiers`` package, which call our gateway; ``harness.kind = "verifiers"``.

One environment process serves all rollouts of a process of the run. The first rollout starts it, and a later one
restarts it if it has ended.
"""

import asyncio

from etude.config.rollouts import VerifiersHarnessOptions
from etude.config.tasks import VerifiersOptions
from etude.errors import EngineUnavailable, SandboxError
from etude.harnesses.completions import MODEL, HarnessContext
from etude.protocols import HarnessResult, Sandbox, Session
from etude.tasks.outcomes import index_of, leave_outcome
from etude.tasks.verifiers.family import FAMILY
from etude.tasks.verifiers.process import EnvironmentCommand, EnvironmentProcess
from etude.types import Json, Task


class VerifiersHarness:
    """Lets the environment's own agent work with a session's model; implements :class:`~etude.protocols.Harness`."""

    def __init__(self, options: VerifiersHarnessOptions, context: HarnessContext) -> None:
        """Raises :class:`~etude.errors.ConfigError` if there is no Python interpreter with the package."""
        assert isinstance(context.tasks.options, VerifiersOptions), "the recipe has seen to it"
        self._timeout_s = options.timeout_s
        self._command = EnvironmentCommand.of(context.tasks.options, context.tasks.folder)
        self._process: EnvironmentProcess | None = None
        self._starting = asyncio.Lock()
        context.on_close(self.close)

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Run one task and write its reward into ``sandbox``.

        Raises :class:`~etude.errors.EngineUnavailable` if the model is unreachable, and
        :class:`~etude.errors.SandboxError` if the environment fails.
        """
        request: dict[str, Json] = {
            "do": "run",
            "index": index_of(task, FAMILY),
            "base_url": session.base_url,
            "api_key": session.api_key,
            "model": MODEL,
            "temperature": temperature,
        }
        process = await self._running()
        answer = await process.ask(request, self._timeout_s)
        if "error" in answer:
            error = EngineUnavailable if answer["kind"] == "provider" else SandboxError
            raise error(f"the environment {self._command.name!r} failed in {task.template}: {answer['error']}")
        parts = answer["parts"]
        assert isinstance(parts, dict), "the program names parts"
        numbers = {name: float(str(value)) for name, value in parts.items()}
        await leave_outcome(sandbox, float(str(answer["reward"])), numbers)
        return HarnessResult(reason=str(answer["reason"]), counts={"turns": int(str(answer["turns"]))})

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._process.close()

    async def _running(self) -> EnvironmentProcess:
        async with self._starting:
            if self._process is None or not self._process.is_running:
                await self.close()
                self._process = EnvironmentProcess(self._command)
                await self._process.open()
            return self._process
