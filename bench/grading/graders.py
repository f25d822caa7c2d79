"""The contestants of `bench grading`: ours, and three that are in use, each a step further than the one before.

exit code in place       hidden tests are written into the agent's sandbox; status 0 is a pass
exit code (fresh)        the agent's files and the hidden tests in a fresh sandbox; status 0 is a pass
named tests (fresh)      there, every named test has to be reported as passed, by the same reporter as ours
étude (no probes)        :class:`~etude.rewards.graders.hidden_tests.HiddenTestGrader`, whose task has no probe, and
                         :class:`~etude.rewards.graders.script.ScriptGrader` with a canary
étude                    the same with the task's probes
"""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from etude.protocols import HarnessResult, Images, Sandbox, SandboxProvider
from etude.rewards.graders.answers import SUBMITTED
from etude.rewards.graders.functions import GraderByKind
from etude.rewards.graders.hidden_tests import HiddenTestGrader
from etude.rewards.graders.script import ScriptGrader
from etude.rewards.graders.test_runs import ENVIRONMENT, HiddenTestRun, module_of
from etude.rollouts.sandbox import RolloutLimits
from etude.rollouts.worker import grade_work
from etude.sandbox_spec import SandboxSpec
from etude.types import ScriptChecks, Task, TestChecks

GradeFunction: TypeAlias = Callable[["Examiner", Task, Sandbox], Awaitable[bool]]
"""Protocol of a grader: accepts or refuses the contents of a sandbox as a solution."""

OURS = ("étude (no probes)", "étude")


class Examiner:
    """Dependencies of all graders."""

    def __init__(self, sandboxes: SandboxProvider, images: Images, spec: SandboxSpec) -> None:
        """``spec`` is that of the tasks' sandboxes."""
        self.sandboxes = sandboxes
        self.spec = spec
        self.ours = GraderByKind(
            {TestChecks: HiddenTestGrader(sandboxes, images), ScriptChecks: ScriptGrader(sandboxes, images)}
        )

    async def grade(self, grader: str, task: Task, sandbox: Sandbox) -> bool:
        """True if a grader accepts. Raises :class:`~etude.errors.SandboxError`."""
        return await GRADERS[grader](self, task, sandbox)

    async def fresh(self, task: Task, sandbox: Sandbox) -> Sandbox:
        """A sandbox with all that the agent left, unchecked."""
        copy = await self.sandboxes.create(task.files, self.spec)
        try:
            await copy.load(await sandbox.export(["."]))
        except BaseException:
            await copy.close()
            raise
        return copy


async def _status_in_place(examiner: Examiner, task: Task, sandbox: Sandbox) -> bool:
    checks = _checks(task)
    for path, text in checks.files.items():
        try:
            await sandbox.write_file(path, text)
        except ValueError:
            return False  # the agent is in the way
    paths = dict.fromkeys(map(module_of, checks.must_pass))
    done = await sandbox.exec((*checks.command, *paths), timeout_s=checks.timeout_s)
    return done.exit_code == 0 and not done.timed_out


async def _status_in_fresh(examiner: Examiner, task: Task, sandbox: Sandbox) -> bool:
    try:
        copy = await examiner.fresh(task, sandbox)
    except ValueError:
        return False
    try:
        return await _status_in_place(examiner, task, copy)
    finally:
        await copy.close()


async def _named_in_fresh(examiner: Examiner, task: Task, sandbox: Sandbox) -> bool:
    checks = _checks(task)
    run = HiddenTestRun(command=checks.command, paths=tuple(dict.fromkeys(map(module_of, checks.must_pass))))
    try:
        copy = await examiner.fresh(task, sandbox)
    except ValueError:
        return False
    try:
        for path, text in {**checks.files, **run.files}.items():
            await copy.write_file(path, text)
        done = await copy.exec(run.argv, stdin=run.secret, timeout_s=checks.timeout_s, environment=ENVIRONMENT)
    except ValueError:
        return False
    finally:
        await copy.close()
    return run.read(done, checks.must_pass).passed.issuperset(checks.must_pass)


async def _ours(examiner: Examiner, task: Task, sandbox: Sandbox) -> bool:
    result = HarnessResult(reason=SUBMITTED, counts={})
    grade = await grade_work(task, sandbox, result, examiner.ours, RolloutLimits())
    return grade.value > 0


def _checks(task: Task) -> TestChecks:
    assert isinstance(task.checks, TestChecks)
    return task.checks


GRADERS: Mapping[str, GradeFunction] = MappingProxyType(
    {
        "exit code in place": _status_in_place,
        "exit code (fresh)": _status_in_fresh,
        "named tests (fresh)": _named_in_fresh,
        **dict.fromkeys(OURS, _ours),
    }
)
"""By the name that they have in the table."""
