"""Grader of a function in a file, and the dispatch to the grader of a task's checks.

    FunctionChecks ──▶ the agent's file, in a fresh sandbox ──▶ its function on hidden arguments ──▶ results compared

Expected results never enter a sandbox, so code in it can neither read nor fake them
(:mod:`etude.sandboxes.function_calls`). Only the file that the task names is copied, as text: the grading sandbox has
none of the processes, modules and settings that the agent left in its own.
"""

from collections.abc import Mapping

from etude.errors import ConfigError
from etude.protocols import Grade, Grader, HarnessResult, Sandbox, SandboxProvider
from etude.rewards.graders.answers import SUBMITTED
from etude.sandboxes.function_calls import CALL_TIMEOUT_S, call_function, same_value
from etude.types import Checks, Task


class HiddenTests:
    """Rewards 1 for a submitted program that passes every hidden case; implements :class:`~etude.protocols.Grader`."""

    def __init__(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Run the hidden cases: 1.0 if the agent submitted and all pass, else 0.0.

        Parts: ``hidden_passed``, the share of cases passed, submitted or not; ``submitted``, 0 or 1. A program that
        does not load, hangs or ends the process fails its cases. Raises :class:`~etude.errors.SandboxError`.
        """
        checks = task.function_checks
        calls = [case.arguments for case in checks.hidden]
        outcomes = await call_function(sandbox, checks.path, checks.function, calls, self._timeout_s)
        passed = sum(
            outcome.ok and same_value(outcome.value, case.expected)
            for outcome, case in zip(outcomes, checks.hidden, strict=True)
        )
        submitted = result.reason == SUBMITTED
        return Grade(
            value=1.0 if submitted and passed == len(checks.hidden) else 0.0,
            parts={"hidden_passed": passed / len(checks.hidden), "submitted": float(submitted)},
        )


class FreshGrader:
    """Copies the agent's file to a fresh sandbox for another grader; implements :class:`~etude.protocols.Grader`."""

    def __init__(self, grader: Grader, sandboxes: SandboxProvider) -> None:
        """The caller closes ``sandboxes``."""
        self._grader = grader
        self._sandboxes = sandboxes

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Grade the copy; a path that is missing or not a file is not copied. Raises like the wrapped grader."""
        path = task.function_checks.path
        try:
            text = await sandbox.read_file(path)
        except ValueError:
            text = None
        fresh = await self._sandboxes.create({} if text is None else {path: text})
        try:
            return await self._grader.grade(task, fresh, result)
        finally:
            await fresh.close()


class GraderByKind:
    """Dispatches a task to the grader of its kind of checks; implements :class:`~etude.protocols.Grader`."""

    def __init__(self, graders: Mapping[type[Checks], Grader]) -> None:
        """``graders`` must have one for each kind of checks in the run's tasks."""
        self._graders = dict(graders)

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Grade by the kind of checks. Raises like that grader; :class:`~etude.errors.ConfigError` if there is none."""
        grader = self._graders.get(type(task.checks))
        if grader is None:
            raise ConfigError(
                f"task {task.task_id!r} is graded by {type(task.checks).__name__}, for which these sandboxes have no "
                f"grader: set sandboxes.kind = 'ns'"
            )
        return await grader.grade(task, sandbox, result)
