"""The grader of each kind of checks."""

from collections.abc import Mapping

from etude.errors import ConfigError
from etude.protocols import Grade, Grader, HarnessResult, Sandbox
from etude.types import Checks, Task


class GraderByKind:
    """Hands a task to the grader of its kind of checks; implements :class:`~etude.protocols.Grader`."""

    def __init__(self, graders: Mapping[type[Checks], Grader]) -> None:
        """``graders`` has one for every kind that the run's tasks have."""
        self._graders = dict(graders)

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Grade as the checks say. Raises like that grader, and :class:`~etude.errors.ConfigError` without one."""
        grader = self._graders.get(type(task.checks))
        if grader is None:
            raise ConfigError(
                f"task {task.task_id!r} is graded by {type(task.checks).__name__}, for which these sandboxes have no "
                f"grader: set sandboxes.kind = 'ns'"
            )
        return await grader.grade(task, sandbox, result)
