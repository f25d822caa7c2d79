"""The grader of hidden test files: it runs tests, including canaries, in a sandbox that the agent never entered.

    agent's sandbox ──export──▶ artefacts ──carry──▶ base sandbox: the original image and the artefacts, nothing else
                                                    ├─fork─▶ real plan: every named test has to pass
                                                    ├─fork─▶ probes: arguments in, results out      (if there are any)
                                                    └─fork─▶ mixed plans: randomly drawn tests are canaries

Hidden tests are copied into a fork after the artefacts, and nowhere else. Printed output is not read. A test is
identified by its name alone, and a pass proves nothing by itself: code under test can manipulate the process that tests
it, so a reward also requires that no canary passes (:mod:`etude.rewards.graders.test_runs`). Only work that passes
every test is checked with canaries; other work takes one run of the tests. A run in an untouched sandbox, once per
task, determines the tests that can have canaries: those of which no case passes there. A task with neither a canary nor
a probe cannot prove any work, so it gives no reward, not even zero.

Attribution of failures: a test that fails, hangs, kills its process or leaves no report is the agent's fault if the
same tests run in an untouched sandbox. There they must start, end in time and, of the tests that passed before, pass at
least one. If they do not, or if a sandbox fails, the fault is in the system: :class:`~etude.errors.SandboxError`, and
no reward at all. If only the time was too short, this machine is busy or slower than the one on which the task was made
(perhaps an emulated processor): the work is graded again with at least twice the time that the untouched sandbox took.
The task keeps this time limit until it is measured again, when its tests next run out of time.

If an agent's work fills all of the disk space of a grading sandbox, the fault is the agent's
(:class:`~etude.errors.AgentFault`).

A hidden test brings its expected values into the process of the code under test, where they can be read. A probe brings
only arguments; its results are returned as plain JSON and compared by the grader, by value and type. The only way to
pass is to compute them.

Owns the order of these steps. Canaries have a limit: code that recognises a changed test, by knowing the correct answer
or from the text of the test, can fail only that test. Probes have no such limit.
"""

import math
import random
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from etude.errors import AgentFault, SandboxError, Unsupported
from etude.protocols import Grade, HarnessResult, Images, Sandbox, SandboxProvider
from etude.rewards.graders.answers import SUBMITTED
from etude.rewards.graders.artefacts import Ground, carry
from etude.rewards.graders.test_runs import (
    ENVIRONMENT,
    REPORT_LIMIT,
    HiddenTestPlan,
    HiddenTestPlanner,
    HiddenTestRun,
    Report,
    module_of,
    test_of,
)
from etude.sandbox_spec import EnvironmentSpec, SandboxSpec
from etude.sandboxes.function_calls import call_function, same_value
from etude.sandboxes.images.archives import Entry, read_archive, write_archive
from etude.sandboxes.services import ServicedSandboxes, sandbox_spec
from etude.types import Probe, Task, TestChecks

START_TIMEOUT_S = 60.0
"""Time for an interpreter to start on a busy machine."""
SHIM = """\
import importlib, operator
_target = operator.attrgetter({function!r})(importlib.import_module({module!r}))
def probe(*arguments):
    return _target(*arguments)
"""


async def check_interpreter(sandbox: Sandbox) -> None:
    """Check that a sandbox can run probes, before it contains any file of an agent.

    Raises :class:`~etude.errors.SandboxError`.
    """
    result = await sandbox.exec(["python", "-c", ""], timeout_s=START_TIMEOUT_S)
    if result.exit_code != 0:
        raise SandboxError(f"no Python starts in this sandbox, so it cannot be probed: {result.stderr.strip()[-200:]}")


async def count_passed(sandbox: Sandbox, probes: Sequence[Probe], timeout_s: float) -> int:
    """Number of probe cases that return the expected value; each probe has its own process and ``timeout_s``.

    Raises :class:`~etude.errors.SandboxError` if the sandbox fails, as opposed to the probed code.
    """
    passed = 0
    for probe in probes:
        path = f".{secrets.token_hex(6)}.py"
        await sandbox.write_file(path, SHIM.format(function=probe.function, module=probe.module))
        calls = [case.arguments for case in probe.cases]
        outcomes = await call_function(sandbox, path, "probe", calls, timeout_s)
        passed += sum(
            outcome.ok and same_value(outcome.value, case.expected)
            for outcome, case in zip(outcomes, probe.cases, strict=True)
        )
    return passed


ARTEFACT_LIMIT_BYTES = 64 << 20
ARCHIVE_LIMIT_BYTES = 1 << 40
"""Limit of the archive that is written: effectively none, as reading is limited already."""
PREPARE_TIMEOUT_S = 60.0
"""Time to prepare a sandbox."""
GRACE_S = 600.0
"""Life of a sandbox beyond its grading."""
PACE = 4.0
"""Factor by which the time limit of a task's tests is raised until it is enough on a slow machine."""
HEADROOM = 2.0
"""Least ratio of a time limit to the time that the tests took in an untouched sandbox: the load of a machine varies."""
SOUND_TASKS = 4096
"""Number of tasks for which the result in an untouched sandbox is cached."""


class _TooSlow(Exception):
    """An untouched sandbox needs more time for the tests than the agent's sandbox was given."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"{timeout_s:g} s are what it takes")
        self.timeout_s = timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Untouched:
    """Result of a task's tests in an untouched sandbox."""

    needed_s: float
    """Time limit of the tests on this machine."""
    idle: frozenset[str]
    """Node ids, without parameters, of tests with at least one passing case."""


class HiddenTestGrader:
    """Grades by :class:`~etude.types.TestChecks`; implements :class:`~etude.protocols.Grader`."""

    def __init__(
        self,
        sandboxes: SandboxProvider,
        images: Images,
        *,
        slack_s: float = 900.0,
        rng: random.Random | None = None,
    ) -> None:
        """The caller closes ``sandboxes``, which must be able to fork.

        ``slack_s`` is the time that a grading may take beyond the task's own limit (``rollouts.grading_timeout_s``):
        half of it is for tests on a slow machine, the rest for creating sandboxes. ``rng`` draws canaries (default: the
        system's randomness).
        """
        self._sandboxes = sandboxes
        self._images = images
        self._slack_s = slack_s
        self._rng = rng or random.SystemRandom()
        self._sound: OrderedDict[str, Untouched] = OrderedDict()
        """By task."""

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """1.0 for submitted work that passes every named test and probe, and no canary; else 0.0.

        Parts: ``about_passed`` and ``others_passed``, shares of the named tests; ``probes_passed``, a share of calls,
        where the task has probes; ``canaries_refused``, a share, where canaries were run; ``cheat_canary``, 1 if one
        passed; ``artefacts_left``, the number of files that were not copied; ``submitted``, 0 or 1. Or only
        ``submitted`` and ``artefacts_refused``, which is 1 if the artefacts were too large or could not be copied. The
        shares alone prove nothing: without canaries a test may have been made to pass.

        Raises :class:`~etude.errors.SandboxError` for a failure of the system, including a task that cannot be graded,
        and :class:`~etude.errors.ConfigError` for a missing image.
        """
        left: tuple[Entry, ...] | None = None
        with suppress(ValueError):  # once for all runs, so that sandbox may close earlier
            left = await _artefacts(sandbox, task)
        measured = self._sound.get(task.task_id)
        timeout_s = measured.needed_s if measured else _test_checks(task).timeout_s
        while True:
            try:
                return await self._grade(task, left, timeout_s, submitted=float(result.reason == SUBMITTED))
            except _TooSlow as slow:
                timeout_s = slow.timeout_s

    async def guarded(self, task: Task) -> frozenset[str]:
        """The node ids that can be canaries. A task with neither these nor a probe cannot be graded.

        Raises :class:`~etude.errors.SandboxError`, also if the tests do not run in an untouched sandbox.
        """
        async with self._untouched(task) as sandbox:
            seen = await _read_modules(sandbox, _test_checks(task))
        return (await self._planner(task, seen, math.inf)).guarded

    async def _grade(self, task: Task, left: Sequence[Entry] | None, timeout_s: float, *, submitted: float) -> Grade:
        """Grade of the files that an agent ``left`` (``None``: they cannot be copied), if ``timeout_s`` is enough for a
        run of the tests.

        Raises :class:`_TooSlow`.
        """
        checks = _test_checks(task)
        async with self._untouched(task) as base:
            seen = await _read_modules(base, checks)
            try:
                original = await _artefacts(base, task)
            except (ValueError, AgentFault) as error:
                raise SandboxError(
                    f"task {task.task_id} ({task.template}): its artefacts {list(checks.artefacts)} cannot be carried "
                    f"even as they were: {error}; name only what an agent has to change, or set the task aside"
                ) from error
            dropped = None
            if left is not None:
                with suppress(ValueError):
                    dropped = await _prepare(base, checks, original, left)
            if dropped is None:
                return Grade(value=0.0, parts={"artefacts_refused": 1.0, "submitted": submitted})
            findings = await self._examine(task, base, seen, timeout_s)
        parts = {**findings.parts(checks), "artefacts_left": float(dropped), "submitted": submitted}
        return Grade(value=float(submitted == 1.0 and findings.is_proved(checks)), parts=parts)

    async def _examine(self, task: Task, base: Sandbox, seen: Mapping[str, str], timeout_s: float) -> "Findings":
        """Run the plans in order until one fails; ``seen`` are the test modules that the agent had."""
        checks = _test_checks(task)
        if not checks.probes and not (await self._planner(task, seen, timeout_s)).guarded:
            raise SandboxError(f"task {task.task_id}: none of its tests can have a canary, and it has no probe")
        real = await _run_in_fork(base, task, HiddenTestPlan(real=frozenset(checks.must_pass)), timeout_s)
        if not real.passed or real.result.timed_out:
            await self._check_sound(task, timeout_s, has_time=not real.result.timed_out)
        findings = Findings(passed=real.passed)
        if checks.probes:
            findings = replace(findings, probed=await _probe(base, checks, timeout_s))
        if not findings.passed.issuperset(checks.must_pass):
            return findings
        planner = await self._planner(task, seen, timeout_s)
        for _ in range(planner.mixed_plans):
            if not findings.is_proved(checks):
                break
            plan = planner.mixed()
            report = await _run_in_fork(base, task, plan, timeout_s)
            if not report.started or report.result.timed_out:
                await self._check_sound(task, timeout_s, has_time=False)
            findings = findings.with_run(plan, report)
        return findings

    async def _planner(self, task: Task, seen: Mapping[str, str], timeout_s: float) -> HiddenTestPlanner:
        """Raises as :meth:`_check_sound` does."""
        checks = _test_checks(task)
        idle = (await self._check_sound(task, timeout_s, has_time=True)).idle
        return HiddenTestPlanner(checks.files, checks.must_pass, checks.about, self._rng, seen=seen, idle=idle)

    async def _check_sound(self, task: Task, timeout_s: float, *, has_time: bool) -> Untouched:
        """Raise :class:`~etude.errors.SandboxError` unless the tests run in an untouched sandbox.

        :class:`_TooSlow` if they take longer there than ``timeout_s``. Checked once per task; always if not
        ``has_time``, since the machine may be too busy now.
        """
        if has_time and task.task_id in self._sound:
            return self._sound[task.task_id]
        checks = _test_checks(task)
        longest_s = checks.timeout_s * (1 + self._slack_s / 2 / checks.grading_s)
        async with self._untouched(task) as sandbox:
            try:
                report = await _run(sandbox, task, HiddenTestPlan(), longest_s)
            except AgentFault as fault:  # no agent has been here
                raise SandboxError(f"the sandbox of task {task.task_id} is too small for its tests: {fault}") from fault
        others = checks.must_pass[checks.about :]
        in_time = report.ended and not report.result.timed_out
        if not (report.started and in_time and (not others or report.passed.intersection(others))):
            more = ", or raise rollouts.grading_timeout_s: machines are slow" if report.result.timed_out else ""
            raise SandboxError(
                f"the hidden tests of task {task.task_id} ({task.template}) do not run in an untouched "
                f"sandbox (exit code {report.result.exit_code}, {report.result.seconds:.0f} s): repair the task, or "
                f"set it aside{more}\n{report.tail}"
            )
        needed_s = checks.timeout_s
        while needed_s < HEADROOM * report.result.seconds:
            needed_s *= PACE
        names = frozenset(map(test_of, checks.must_pass))
        untouched = Untouched(needed_s=min(needed_s, longest_s), idle=report.passed & names)
        self._sound[task.task_id] = untouched
        if len(self._sound) > SOUND_TASKS:
            self._sound.popitem(last=False)
        if untouched.needed_s > timeout_s:
            raise _TooSlow(untouched.needed_s)
        return untouched

    @asynccontextmanager
    async def _untouched(self, task: Task) -> AsyncIterator[Sandbox]:
        """A sandbox with the task's original files, as its agent received it."""
        environment = task.environment or EnvironmentSpec()
        spec = replace(self._spec(environment), ttl_s=_test_checks(task).grading_s + self._slack_s + GRACE_S)
        if not environment.services:
            sandbox = await self._sandboxes.create(task.files, spec)
        elif isinstance(self._sandboxes, ServicedSandboxes):
            sandbox = await self._sandboxes.create(task.files, spec, environment.services)
        else:
            raise Unsupported(f"task {task.task_id} has services: grade it in ServicedSandboxes")
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def _spec(self, environment: EnvironmentSpec) -> SandboxSpec:
        return sandbox_spec(environment, self._images.open(environment.image) if environment.image else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Test results of one agent's work so far."""

    passed: frozenset[str]
    """Node ids that passed wherever they were real."""
    probed: int = 0
    """Probe calls that returned the expected value."""
    canaries: int = 0
    """Number of canaries that were run."""
    cheated: frozenset[str] = frozenset()
    """Node ids whose canaries passed, as they themselves did."""

    def with_run(self, plan: HiddenTestPlan, report: Report) -> "Findings":
        """Findings after another run. A run that did not start proves nothing, so it has no passed test."""
        return replace(
            self,
            passed=self.passed - (plan.real - report.passed) if report.started else frozenset(),
            canaries=self.canaries + len(plan.canaries),
            cheated=self.cheated | (plan.canaries & report.passed),
        )

    def is_proved(self, checks: TestChecks) -> bool:
        """True if every test and every probe passed, and no canary did."""
        is_complete = self.passed.issuperset(checks.must_pass) and self.probed == _calls(checks)
        return is_complete and not self.cheated

    def parts(self, checks: TestChecks) -> dict[str, float]:
        """Parts of the grade."""
        about, others = checks.must_pass[: checks.about], checks.must_pass[checks.about :]
        parts = {"about_passed": _share(about, self.passed), "others_passed": _share(others, self.passed)}
        if checks.probes:
            parts["probes_passed"] = self.probed / max(_calls(checks), 1)
        if self.canaries:
            parts["canaries_refused"] = 1 - len(self.cheated) / self.canaries
        parts["cheat_canary"] = float(bool(self.cheated))
        return parts


async def _artefacts(sandbox: Sandbox, task: Task) -> tuple[Entry, ...]:
    """Entries at the paths of a task's artefacts. Raises ``ValueError`` for entries that cannot be copied."""
    return read_archive(await sandbox.export(_test_checks(task).artefacts, limit_bytes=ARTEFACT_LIMIT_BYTES))


async def _prepare(base: Sandbox, checks: TestChecks, original: Sequence[Entry], agents: Sequence[Entry]) -> int:
    """Put the agent's files into an untouched sandbox; returns the number of files that were not copied. Raises
    ``ValueError`` for files that cannot be written there.
    """
    ground = Ground.of((*checks.files, *map(module_of, checks.must_pass)), checks.command)
    carried = carry(original, agents, ground)
    tar = write_archive(carried.entries, ARCHIVE_LIMIT_BYTES)
    if carried.removed:
        names = "\0".join(carried.removed)
        done = await base.exec(["xargs", "-0", "rm", "-rf", "--"], stdin=names, timeout_s=PREPARE_TIMEOUT_S)
        if done.exit_code != 0:
            raise SandboxError(f"a sandbox to grade in could not be made ready: {done.stderr.strip()[-200:]}")
    await base.load(tar)
    return len(carried.left)


async def _run_in_fork(base: Sandbox, task: Task, plan: HiddenTestPlan, timeout_s: float) -> Report:
    """Run the tests of a plan in a fork of ``base``."""
    (fork,) = await base.fork()
    try:
        return await _run(fork, task, plan, timeout_s)
    finally:
        await fork.close()


async def _run(sandbox: Sandbox, task: Task, plan: HiddenTestPlan, timeout_s: float) -> Report:
    """Write the hidden tests, as the plan changes them, into a sandbox, and run them there."""
    checks = _test_checks(task)
    if len(checks.must_pass) > REPORT_LIMIT:
        raise SandboxError(f"task {task.task_id} names {len(checks.must_pass)} tests, at most {REPORT_LIMIT}: split it")
    run = HiddenTestRun(command=checks.command, paths=tuple(dict.fromkeys(map(module_of, checks.must_pass))))
    for path, text in {**checks.files, **plan.files, **run.files}.items():
        await sandbox.write_file(path, text)
    done = await sandbox.exec(run.argv, stdin=run.secret, timeout_s=timeout_s, environment=ENVIRONMENT)
    return run.read(done, plan.canaries.union(checks.must_pass, map(test_of, checks.must_pass)))


async def _probe(base: Sandbox, checks: TestChecks, timeout_s: float) -> int:
    """Count the probe calls that return the expected value, in a fork without tests."""
    (fork,) = await base.fork()
    try:
        return await count_passed(fork, checks.probes, timeout_s)
    finally:
        await fork.close()


async def _read_modules(base: Sandbox, checks: TestChecks) -> dict[str, str]:
    """Read the modules that an agent finds at the paths of the hidden ones; check that the sandbox can run probes."""
    seen: dict[str, str] = {}
    for path in checks.files:
        with suppress(ValueError):
            seen[path] = await base.read_file(path) or ""
    if checks.probes:
        await check_interpreter(base)
    return seen


def _test_checks(task: Task) -> TestChecks:
    if not isinstance(task.checks, TestChecks):
        raise ValueError(f"task {task.task_id} has {type(task.checks).__name__}: this grader takes TestChecks")
    return task.checks


def _calls(checks: TestChecks) -> int:
    return sum(len(probe.cases) for probe in checks.probes)


def _share(nodes: Sequence[str], passed: frozenset[str]) -> float:
    return sum(node in passed for node in nodes) / len(nodes) if nodes else 1.0
