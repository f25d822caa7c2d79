"""Grading in a sandbox that the agent has never been in.

Only the file that a task asks for is carried over, as text. What else an agent left behind, programs that it started,
modules that it planted, settings that it changed, does not exist where it is graded.
"""

from etude.protocols import Grade, Grader, HarnessResult, Sandbox, SandboxProvider
from etude.types import Task


class FreshGrader:
    """Hands a copy of the agent's file to another grader; implements :class:`~etude.protocols.Grader`."""

    def __init__(self, grader: Grader, sandboxes: SandboxProvider) -> None:
        """``sandboxes`` stays the caller's to close."""
        self._grader = grader
        self._sandboxes = sandboxes

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Grade the copy; a file that is gone, or is no file any more, is not copied. Raises like the other grader."""
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
