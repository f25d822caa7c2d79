"""What a run makes of rollouts that look like cheating."""

import asyncio

import numpy as np
import pytest

from etude.config.tasks import CheatingConfig
from etude.protocols import Grade
from etude.rollouts.fake import FakeSandbox
from etude.run.cheat_monitor import BaitingMonitor, policy_of
from etude.types import Disposition, Finish, Split, Task, Turn, Verdict
from records import CHECKS

TASK = Task(task_id="t", family="f", template="t", split=Split.TRAIN, prompt="", files={"a.py": ""}, checks=CHECKS)
ONE = np.ones(1, np.int32)
TURN = Turn(prompt_ids=ONE, completion_ids=ONE, logprobs=-ONE.astype(np.float32), versions=ONE, finish=Finish.STOP)


def judged(command: str, config: CheatingConfig, reward: Grade) -> Verdict:
    """The verdict on a rollout in which every reply is ``command``."""
    watch = BaitingMonitor(decode=lambda ids: command, policy=policy_of(config), honeypots=False, bare_shell=True)

    async def act() -> Verdict:
        watched = await watch.begin(TASK, FakeSandbox(TASK.files, lambda sandbox: None))
        await watched.look()
        return watched.judge(reward, (TURN,))

    return asyncio.run(act())


PASSED = Grade(value=1.0, parts={"hidden_passed": 1.0})


def test_honest_work_is_kept() -> None:
    verdict = judged("cat a.py", CheatingConfig(), PASSED)
    assert (verdict.disposition, verdict.reward, verdict.flags) == (Disposition.KEEP, 1.0, ())


def test_what_is_noticed_is_weighed_as_the_recipe_says() -> None:
    digging = "git log --all -p"
    strict = judged(digging, CheatingConfig(on_low="zero", on_medium="zero", on_high="zero"), PASSED)
    assert strict.flags
    assert (strict.disposition, strict.reward) == (Disposition.ZERO, 0.0)
    lax = judged(digging, CheatingConfig(exceptions=dict.fromkeys(strict.flags, "keep")), PASSED)
    assert (lax.disposition, lax.reward, lax.flags) == (Disposition.KEEP, 1.0, strict.flags)


@pytest.mark.parametrize(("part", "disposition"), [(1.0, Disposition.ZERO), (0.0, Disposition.KEEP)])
def test_a_grader_that_was_cheated_says_so_in_a_part(part: float, disposition: Disposition) -> None:
    reward = Grade(value=1.0, parts={"cheat_canary": part})
    assert judged("cat a.py", CheatingConfig(), reward).disposition is disposition


def test_a_rollout_that_branches_off_is_watched_in_its_own_world() -> None:
    """The same baits lie in both worlds; who touched one is found out where it was touched."""
    watch = BaitingMonitor(
        decode=lambda ids: "true", policy=policy_of(CheatingConfig()), honeypots=True, bare_shell=True
    )

    async def act() -> list[bool]:
        sandbox = FakeSandbox(TASK.files, lambda sandbox: None)
        trunk = await watch.begin(TASK, sandbox)
        (copy,) = await sandbox.fork()
        branch = trunk.beside(copy)
        await copy.write_file(".grader/expected.json", "[]")
        for watched in (trunk, branch):
            await watched.look()
        return [watched.judge(PASSED, (TURN,)).hacked for watched in (trunk, branch)]

    assert asyncio.run(act()) == [False, True]
