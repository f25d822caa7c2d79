"""Grading an agent's files: no process of the agent runs meanwhile, and damage by the agent is not our failure."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from etude.errors import AgentFault, SandboxError
from etude.harnesses.actions import Finding
from etude.protocols import Grade, HarnessResult, Sandbox
from etude.rollouts.fake import FakeSandbox
from etude.rollouts.sandbox import RolloutLimits
from etude.rollouts.worker import grade_work
from etude.types import Split, Task, Turn
from records import CHECKS

TASK = Task(task_id="a", family="f", template="t", split=Split.TRAIN, prompt="", files={}, checks=CHECKS)


class Bar:
    """A sandbox, a monitor and a grader that record the order of their calls."""

    def __init__(self, verdict: Callable[[], Grade]) -> None:
        self.calls: list[str] = []
        self._verdict = verdict

    async def look(self) -> None:
        self.calls.append("look")

    def findings(self, turns: Sequence[Turn]) -> Sequence[Finding]:
        raise NotImplementedError

    def fork(self, sandbox: Sandbox) -> "Bar":
        raise NotImplementedError

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        self.calls.append("grade")
        return self._verdict()

    def judge(self) -> Grade:
        bar = self

        class Watched(FakeSandbox):
            async def kill_processes(self) -> None:
                bar.calls.append("kill")

        sandbox = Watched({}, lambda sandbox: None)
        return asyncio.run(
            grade_work(TASK, sandbox, HarnessResult(reason="submit", counts={}), self, RolloutLimits(), self)
        )


def fails(error: Exception) -> Callable[[], Grade]:
    def fail() -> Grade:
        raise error

    return fail


def test_all_is_killed_before_anything_is_looked_at() -> None:
    bar = Bar(lambda: Grade(value=1.0, parts={}))
    assert bar.judge() == Grade(value=1.0, parts={})
    assert bar.calls == ["kill", "look", "grade"]


def test_what_the_agent_broke_is_worth_nothing_and_not_tried_again() -> None:
    bar = Bar(fails(AgentFault("its disk is full")))
    assert bar.judge() == Grade(value=0.0, parts={"agent_fault": 1.0})
    assert bar.calls == ["kill", "look", "grade"]


def test_what_a_machine_broke_is_tried_again_and_then_said() -> None:
    bar = Bar(fails(SandboxError("it died")))
    with pytest.raises(SandboxError, match="it died"):
        bar.judge()
    assert bar.calls == ["kill", "look", *["grade"] * RolloutLimits().gradings]
