"""Each kind of checks has its grader."""

import asyncio

import pytest

from etude.errors import ConfigError
from etude.protocols import Grade, HarnessResult, Sandbox
from etude.rewards.graders.functions import GraderByKind
from etude.rollouts.fake import FakeSandbox
from etude.types import Case, Checks, FunctionChecks, ScriptChecks, Split, Task


class Says:
    """A grader with one word."""

    def __init__(self, value: float) -> None:
        self._value = value

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        return Grade(value=self._value, parts={})


def grade(checks: Checks) -> float:
    task = Task(task_id="t", family="f", template="t", split=Split.TRAIN, prompt="", files={}, checks=checks)
    grader = GraderByKind({FunctionChecks: Says(0.25)})
    result = HarnessResult(reason="submit", counts={})
    return asyncio.run(grader.grade(task, FakeSandbox({}, lambda sandbox: None), result)).value


def test_the_kind_of_checks_decides_who_grades() -> None:
    case = Case(arguments=(), expected=1)
    assert grade(FunctionChecks(path="a.py", function="f", visible=(), hidden=(case,))) == 0.25


def test_checks_without_a_grader_are_the_recipes_mistake() -> None:
    with pytest.raises(ConfigError, match=r"ScriptChecks.*sandboxes\.kind = 'ns'"):
        grade(ScriptChecks(files={}))
