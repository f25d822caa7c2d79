"""A grader: how near a number is. ``tasks.graders = { near = "@grader.py:Near" }``, named by ``family.py``."""

from pydantic import Field

from etude.config.section import Section
from etude.protocols import Grade, GraderContext, HarnessResult, Sandbox
from etude.types import Task


class NearOptions(Section):
    """How near a number is to the right one."""

    right: int
    """The right number."""
    tolerance: float = Field(default=10.0, gt=0)
    """The distance at which the grade is a half."""


class Near:
    Options = NearOptions

    def __init__(self, options: NearOptions, context: GraderContext) -> None:
        self._right, self._tolerance = options.right, options.tolerance

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        distance = abs(int(result.answer) - self._right) if result.answer.strip().isdecimal() else float("inf")
        return Grade(value=1 / (1 + distance / self._tolerance), parts={"exact": float(distance == 0)})
