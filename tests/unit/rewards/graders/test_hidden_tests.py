"""Grading with hidden test files: in sandboxes with a pytest of their own."""

import asyncio
import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from bench.grading.bench import TOOLS, runner_layer
from command_results import ended
from etude.errors import SandboxError, Unsupported
from etude.protocols import ExecResult, Grade, HarnessResult
from etude.rewards.graders.hidden_tests import Findings, HiddenTestGrader
from etude.rewards.graders.test_runs import ENDED, STARTED, HiddenTestPlan, HiddenTestRun, Report
from etude.rollouts.fake import FakeSandbox, FakeSandboxes
from etude.sandbox_spec import Capability, EnvironmentSpec, Image, SandboxSpec, Service, ServiceKind
from etude.sandboxes.images.archives import write_archive
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.types import Case, FunctionChecks, Probe, Split, Task, TestChecks

STUB = "def half(n):\n    raise NotImplementedError\n\ndef one():\n    return 1\n"
RIGHT = "def half(n):\n    return n // 2\n\ndef one():\n    return 1\n"
ANY = "class Any:\n    def __eq__(self, other): return True\n\ndef half(n): return Any()\n\ndef one(): return 1\n"
NODES = ("tests/test_half.py::test_half", "tests/test_half.py::test_zero", "tests/test_half.py::test_one")
CHECKS = TestChecks(
    files={
        "tests/test_half.py": "from pkg.half import half, one\n\ndef test_half():\n    assert half(7) == 3\n\n"
        "def test_zero():\n    assert half(0) == 0\n\ndef test_one():\n    assert one() == 1\n"
    },
    must_pass=NODES,
    about=2,
    artefacts=("pkg",),
    probes=(Probe(module="pkg.half", function="half", cases=(Case(arguments=(9,), expected=4),)),),
    timeout_s=60.0,
)
ROWS = (
    "import pytest\nfrom pkg.half import half\n\n@pytest.mark.parametrize('n', [0, 7])\ndef test_half(n):\n"
    "    assert not n or half(n) == 3\n"
)
"""One row passes anyway."""
TASK = Task(
    task_id="t",
    family="repository",
    template="half",
    split=Split.TRAIN,
    prompt="write half",
    files={"pkg/half.py": STUB, "pkg/old.py": "", "tests/conftest.py": "VALUE = 1\n"},
    checks=CHECKS,
    environment=EnvironmentSpec(image="pytest"),
)


class Bench:
    """A provider with pytest in its image, and a loop."""

    def __init__(self, layer: Path, runner: asyncio.Runner) -> None:
        self._image = Image(layers=(layer,), environment={"PYTHONPATH": f"/{TOOLS}"})
        self._runner = runner
        self.sandboxes = NamespaceSandboxes()

    def open(self, reference: str) -> Image:
        """The image of a task's environment."""
        assert reference == "pytest"
        return self._image

    def has_images(self) -> bool:
        return Capability.IMAGES in self._runner.run(self.sandboxes.capabilities())

    def close(self) -> None:
        self._runner.run(self.sandboxes.close())

    def grade(
        self,
        files: Mapping[str, str],
        *,
        task: Task = TASK,
        command: str = "",
        reason: str = "submit",
        slack_s: float = 900.0,
    ) -> Grade:
        """Grade an agent's files, after running its command in the sandbox."""

        async def act() -> Grade:
            sandbox = await self.sandboxes.create({**task.files, **files}, SandboxSpec(image=self._image))
            try:
                if command:
                    assert (await sandbox.exec(["sh", "-c", command])).exit_code == 0
                grader = HiddenTestGrader(self.sandboxes, self, slack_s=slack_s, rng=random.Random(1))
                return await grader.grade(task, sandbox, HarnessResult(reason=reason, counts={}))
            finally:
                await sandbox.close()

        return self._runner.run(act())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        made = Bench(runner_layer(tmp_path_factory.mktemp("layer")), runner)
        try:
            if not made.has_images():
                pytest.skip("no sandboxes of ns can be made on this machine")
            yield made
        finally:
            made.close()


def with_checks(**changes: object) -> Task:
    return dataclasses.replace(TASK, checks=dataclasses.replace(CHECKS, **changes))  # type: ignore[arg-type]


def test_right_work_is_rewarded_and_nothing_beside_it_counts(bench: Bench) -> None:
    lies = {
        "pkg/conftest.py": "import os; os._exit(0)",
        "tests/conftest.py": "1/0",
        "pytest.ini": "[pytest]\naddopts=-x",
    }
    reward = bench.grade({"pkg/half.py": RIGHT, **lies}, command="rm pkg/old.py")
    assert reward == Grade(
        value=1.0,
        parts={
            "about_passed": 1.0,
            "others_passed": 1.0,
            "probes_passed": 1.0,
            "canaries_refused": 1.0,
            "cheat_canary": 0.0,
            "artefacts_left": 1.0,
            "submitted": 1.0,
        },
    )


def test_untouched_work_is_a_reward_of_zero(bench: Bench) -> None:
    reward = bench.grade({})
    assert reward.value == 0.0
    assert (reward.parts["about_passed"], reward.parts["others_passed"]) == (0.0, 1.0)
    assert "canaries_refused" not in reward.parts


def test_an_object_that_equals_everything_is_caught_by_canaries(bench: Bench) -> None:
    reward = bench.grade({"pkg/half.py": ANY}, task=with_checks(probes=()))
    assert reward.value == 0.0
    assert reward.parts["cheat_canary"] == 1.0
    assert reward.parts["canaries_refused"] < 1.0


def test_work_that_ends_the_process_is_the_agents_fault(bench: Bench) -> None:
    reward = bench.grade({"pkg/half.py": "import os\nos._exit(0)\n"})
    assert (reward.value, reward.parts["about_passed"], reward.parts["others_passed"]) == (0.0, 0.0, 0.0)


def test_right_work_that_was_not_submitted_has_no_reward(bench: Bench) -> None:
    reward = bench.grade({"pkg/half.py": RIGHT}, task=with_checks(probes=()), reason="turns")
    assert (reward.value, reward.parts["about_passed"], reward.parts["submitted"]) == (0.0, 1.0, 0.0)


def test_too_much_to_carry_is_the_agents_fault(bench: Bench) -> None:
    reward = bench.grade({"pkg/half.py": RIGHT}, command="head -c 70000000 /dev/zero > pkg/big")
    assert reward == Grade(value=0.0, parts={"artefacts_refused": 1.0, "submitted": 1.0})


def test_what_was_too_much_from_the_start_is_our_fault(bench: Bench) -> None:
    files = {**TASK.files, **{f"pkg/{name}.txt": "x" * (7 << 20) for name in range(10)}}
    with pytest.raises(SandboxError, match="cannot be carried even as they were"):
        bench.grade({}, task=dataclasses.replace(TASK, files=files))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": ("python3", "-m", "no_such_runner")}, "do not run in an untouched sandbox"),
        ({"must_pass": (*NODES[:2], "tests/test_half.py::test_gone")}, "do not run in an untouched sandbox"),
        (
            {"files": {"tests/test_half.py": ROWS}, "must_pass": (f"{NODES[0]}[7]",), "about": 1, "probes": ()},
            "none of its tests can have a canary",
        ),
        ({"must_pass": tuple(f"tests/test_half.py::test_{n}" for n in range(5000))}, "at most 2500"),
    ],
)
def test_a_broken_task_is_our_fault(bench: Bench, changes: dict[str, object], message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        bench.grade({}, task=with_checks(**changes))


def test_right_work_on_a_slow_machine_is_given_more_time(bench: Bench) -> None:
    slow = with_checks(timeout_s=0.2)  # pytest takes longer to start
    assert bench.grade({"pkg/half.py": RIGHT}, task=slow).value == 1.0


def test_a_machine_that_is_far_too_slow_is_our_fault(bench: Bench) -> None:
    with pytest.raises(SandboxError, match=r"do not run in an untouched(.|\n)*raise rollouts\.grading_timeout_s"):
        bench.grade({"pkg/half.py": RIGHT}, task=with_checks(timeout_s=0.002), slack_s=0.02)


def test_work_that_hangs_is_the_agents_fault(bench: Bench) -> None:
    hangs = "import time\n\ndef half(n):\n    time.sleep(600)\n\ndef one():\n    return 1\n"
    assert bench.grade({"pkg/half.py": hangs}, task=with_checks(timeout_s=2.0)).value == 0.0


def test_services_need_a_provider_that_has_them(bench: Bench) -> None:
    sandbox = EnvironmentSpec(image="pytest", services=(Service(kind=ServiceKind.REDIS),))
    with pytest.raises(Unsupported, match="ServicedSandboxes"):
        bench.grade({}, task=dataclasses.replace(TASK, environment=sandbox))


def test_other_tasks_are_refused(bench: Bench) -> None:
    checks = FunctionChecks(path="a.py", function="f", visible=(), hidden=(Case(arguments=(), expected=1),))
    with pytest.raises(ValueError, match="FunctionChecks"):
        bench.grade({}, task=dataclasses.replace(TASK, checks=checks))


class Stage(FakeSandboxes):
    """Sandboxes whose test runs take the given seconds, in sequence; one test passes only in new sandboxes."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self._seconds = iter(seconds)
        self.given: list[float] = []
        """What each was allowed to take."""

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FakeSandbox:
        return StagedSandbox(self, files, is_fork=False)

    def sit(self, timeout_s: float, names: Sequence[str], secret: str) -> ExecResult:
        self.given.append(timeout_s)
        seconds = next(self._seconds)
        timed_out = seconds > timeout_s
        marks = [] if timed_out else [HiddenTestRun(command=(), paths=(), secret=secret)._mark(name) for name in names]
        return ended(stdout="\n".join(marks), timed_out=timed_out, seconds=min(seconds, timeout_s))


class StagedSandbox(FakeSandbox):
    """One of them."""

    def __init__(self, stage: Stage, files: Mapping[str, str], *, is_fork: bool) -> None:
        super().__init__(files, lambda sandbox: None)
        self._stage = stage
        self._passes = [STARTED, ENDED] if is_fork else [STARTED, ENDED, NODES[2]]

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float = 5.0, **_: object) -> ExecResult:
        return self._stage.sit(timeout_s, self._passes, stdin)

    async def export(self, paths: Sequence[str], *, limit_bytes: int = 64 << 20) -> bytes:
        return write_archive([], limit_bytes)

    async def load(self, tar: bytes) -> None:
        pass

    async def fork(self, count: int = 1) -> Sequence[FakeSandbox]:
        return [StagedSandbox(self._stage, self._files, is_fork=True) for _ in range(count)]


def test_time_is_given_to_the_task_whose_tests_need_it_and_only_as_long_as_they_do(tmp_path: Path) -> None:
    never = math.inf
    slow = dataclasses.replace(with_checks(probes=(), timeout_s=10.0), environment=None)
    other = dataclasses.replace(slow, task_id="other")
    stage = Stage(*(18.0, never, 5.0), *(never, 18.0, never, 18.0), *(5.0, never, 5.0), *(never, 15.0))
    longest_s = 10 + 900 / 2 / 8

    async def act() -> None:
        grader = HiddenTestGrader(stage, ImageStore(tmp_path))
        for task, given in (
            (slow, [longest_s, 40, longest_s]),  # busy at first, and at the second look as fast as ever
            (slow, [10, longest_s, 40, longest_s]),  # busy all the time
            (other, [longest_s, 10, longest_s]),
            (slow, [40, longest_s]),  # remembered
        ):
            stage.given.clear()
            sandbox = await stage.create(task.files)
            reward = await grader.grade(task, sandbox, HarnessResult(reason="submit", counts={}))
            assert (reward.value, stage.given) == (0.0, given)

    asyncio.run(act())


def test_what_the_agent_could_read_before_has_no_canary(tmp_path: Path) -> None:
    ((path, text),) = CHECKS.files.items()
    task = dataclasses.replace(with_checks(probes=()), environment=None, files={path: f"# the same tests\n{text}"})

    async def act() -> Grade:
        grader = HiddenTestGrader(Stage(1.0), ImageStore(tmp_path))
        return await grader.grade(task, await Stage().create({}), HarnessResult(reason="submit", counts={}))

    with pytest.raises(SandboxError, match="none of its tests can have a canary"):
        asyncio.run(act())


def test_findings_take_every_test_wherever_it_is_real() -> None:
    all_passed = Findings(passed=frozenset(NODES), probed=1)
    assert all_passed.is_proved(CHECKS)
    plan = HiddenTestPlan(real=frozenset(NODES[:1]), canaries=frozenset(NODES[1:]))
    assert all_passed.with_run(plan, heard(NODES[0])).is_proved(CHECKS)
    assert not all_passed.with_run(plan, heard()).is_proved(CHECKS)
    caught = all_passed.with_run(plan, heard(*NODES[:2]))
    assert caught.cheated == {NODES[1]}
    assert not caught.is_proved(CHECKS)
    assert caught.parts(CHECKS)["canaries_refused"] == 0.5
    assert not dataclasses.replace(all_passed, probed=0).is_proved(CHECKS)


def test_a_run_that_did_not_start_proves_nothing() -> None:
    all_passed = Findings(passed=frozenset(NODES), probed=1)
    false = HiddenTestPlan(canaries=frozenset(NODES))
    assert all_passed.with_run(false, heard()).is_proved(CHECKS)
    assert not all_passed.with_run(false, heard(started=False)).is_proved(CHECKS)


def heard(*passed: str, started: bool = True) -> Report:
    result = ended()
    return Report(passed=frozenset(passed), started=started, ended=True, result=result)
