"""Handling of rollouts that look like cheating."""

import asyncio
from collections.abc import Sequence

import numpy as np

from etude.config.recipe import RunConfig
from etude.config.tasks import CheatingConfig
from etude.harnesses.actions import Finding
from etude.protocols import Grade, Score
from etude.rewards.score import score
from etude.rollouts.fake import FakeSandbox
from etude.run.scoring import BaitingMonitor, policy_of
from etude.types import Disposition, Finish, Split, Task, Turn
from records import CHECKS

TASK = Task(task_id="t", family="f", template="t", split=Split.TRAIN, prompt="", files={"a.py": ""}, checks=CHECKS)
ONE = np.ones(1, np.int32)
TURN = Turn(prompt_ids=ONE, completion_ids=ONE, logprobs=-ONE.astype(np.float32), versions=ONE, finish=Finish.STOP)


def judged(command: str, config: CheatingConfig, grade: Grade) -> Score:
    """The score of a rollout in which every reply is ``command``."""
    monitor = BaitingMonitor(decode=lambda ids: command, honeypots=False, bare_shell=True)

    async def findings() -> Sequence[Finding]:
        monitored = await monitor.begin(TASK, FakeSandbox(TASK.files, lambda sandbox: None))
        await monitored.look()
        return monitored.findings((TURN,))

    return score(grade, asyncio.run(findings()), {}, policy_of(RunConfig(cheating=config)))


def outcome(score: Score) -> tuple[Disposition, float, tuple[str, ...]]:
    assert score.verdict is not None
    return score.verdict.disposition, score.value, score.verdict.flags


PASSED = Grade(value=1.0, parts={"hidden_passed": 1.0})


def test_honest_work_is_kept() -> None:
    assert outcome(judged("cat a.py", CheatingConfig(), PASSED)) == (Disposition.KEEP, 1.0, ())


def test_what_is_noticed_is_weighed_as_the_recipe_says() -> None:
    digging = "git log --all -p"
    strict = outcome(judged(digging, CheatingConfig(outcomes=dict.fromkeys(("low", "medium", "high"), "zero")), PASSED))
    assert strict[:2] == (Disposition.ZERO, 0.0)
    assert strict[2]
    lax = judged(digging, CheatingConfig(outcomes=dict.fromkeys(strict[2], "keep")), PASSED)
    assert outcome(lax) == (Disposition.KEEP, 1.0, strict[2])


def test_a_forked_rollout_is_monitored_in_its_own_sandbox() -> None:
    """The same baits lie in both sandboxes; a touch is detected where it was made."""
    monitor = BaitingMonitor(decode=lambda ids: "true", honeypots=True, bare_shell=True)

    async def act() -> list[bool]:
        sandbox = FakeSandbox(TASK.files, lambda sandbox: None)
        parent = await monitor.begin(TASK, sandbox)
        (copy,) = await sandbox.fork()
        fork = parent.fork(copy)
        await copy.write_file(".grader/expected.json", "[]")
        for monitored in (parent, fork):
            await monitored.look()
        return [bool(monitored.findings((TURN,))) for monitored in (parent, fork)]

    assert asyncio.run(act()) == [False, True]
