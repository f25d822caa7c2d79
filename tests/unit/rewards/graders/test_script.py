"""Verifier scripts: allowed reward files, what an agent cannot forge, and who is at fault for a failure."""

import asyncio
import json
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import AgentFault, ConfigError, SandboxError
from etude.protocols import ExecResult, Grade, HarnessResult, Sandbox
from etude.rewards.graders.script import (
    CANARY_RUNS,
    REWARD_LIMIT_CHARACTERS,
    REWARD_TEXT,
    ScriptGrader,
    VerifierReward,
    read_reward,
)
from etude.rollouts.fake import FakeSandbox, FakeSandboxes
from etude.sandbox_spec import Capability, EnvironmentSpec, SandboxLimits, SandboxSpec
from etude.sandboxes.images.archives import write_archive
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.services import sandbox_spec
from etude.types import Case, FunctionChecks, Json, ScriptChecks, Split, Task

DONE = HarnessResult(reason="submit", counts={})
WRITE = "echo {} > /logs/verifier/reward.txt\n"
ANSWERED = "grep -qx yes answer.txt && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
"""A verifier of the usual kind."""


# --- What a reward file may say -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("json_text", "text", "verdict"),
    [
        (None, "1", VerifierReward(value=1.0, parts={})),
        (None, " 0.25\n", VerifierReward(value=0.25, parts={})),
        ("0.5", "1", VerifierReward(value=0.5, parts={})),
        ('{"reward": 1, "style": 0.5}', None, VerifierReward(value=1.0, parts={"style": 0.5})),
        ('{"passed": 0.75}', None, VerifierReward(value=0.75, parts={"passed": 0.75})),
    ],
)
def test_a_reward_is_a_number_or_named_ones(json_text: str | None, text: str | None, verdict: VerifierReward) -> None:
    assert read_reward(json_text, text) == verdict


@pytest.mark.parametrize(
    ("json_text", "text", "words"),
    [
        (None, None, "neither"),
        (None, "", "expected a number"),
        (None, "yes", "expected a number"),
        (None, "nan", "from 0 to 1"),
        (None, "inf", "from 0 to 1"),
        (None, "1.5", "from 0 to 1"),
        (None, "-1", "from 0 to 1"),
        (None, "1" * (REWARD_LIMIT_CHARACTERS + 1), "at most"),
        ("NaN", None, "from 0 to 1"),
        ("1e309", None, "from 0 to 1"),
        ("1" * 5000, None, "JSON"),
        ("true", None, "from 0 to 1"),
        ('"1"', None, "from 0 to 1"),
        ("[1]", None, "from 0 to 1"),
        ("{}", None, "0 parts"),
        ('{"reward": 1, "x": "y"}', None, "its x is y"),
        ('{"a": 1, "b": 1}', None, "which one counts"),
        ("{", "1", "not JSON"),
        ("[" * 60_000, None, "not JSON"),
    ],
)
def test_anything_else_is_no_reward(json_text: str | None, text: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_reward(json_text, text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_whatever_is_read_is_between_0_and_1(value: Json) -> None:
    try:
        verdict = read_reward(json.dumps(value), None)
    except ValueError:
        return
    assert 0 <= verdict.value <= 1


# --- How long a grading takes ---------------------------------------------------------------------------------------


class Stage(FakeSandboxes):
    """Sandboxes in which verifiers write the given texts, in sequence; for ``""`` they write nothing and hang."""

    def __init__(self, *written: str) -> None:
        super().__init__()
        self._written = iter(written)
        self.seconds = 0.0
        """All that verifiers were given."""

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FakeSandbox:
        return StagedSandbox(self, files)

    def verify(self, timeout_s: float) -> str:
        self.seconds += timeout_s
        return next(self._written)


class StagedSandbox(FakeSandbox):
    """One of them."""

    def __init__(self, stage: Stage, files: Mapping[str, str]) -> None:
        super().__init__(files, lambda sandbox: None)
        self._stage = stage

    async def exec(self, argv: Sequence[str], *, timeout_s: float = 5.0, **_: object) -> ExecResult:
        done = await super().exec(argv)
        if tuple(argv) != ScriptChecks(files={}).command:
            return done
        await self.write_file(REWARD_TEXT, self._stage.verify(timeout_s))
        return replace(done, timed_out=not await self.read_file(REWARD_TEXT))

    async def export(self, paths: Sequence[str], *, limit_bytes: int = 64 << 20) -> bytes:
        return write_archive([], limit_bytes)

    async def load(self, tar: bytes) -> None:
        pass


class AllTwins(random.Random):
    """Draws a twin for every run of a canary."""

    def randrange(self, *limits: int) -> int:  # type: ignore[override]  # as it is asked
        return limits[1] - 1


@pytest.mark.parametrize(
    ("canary", "written", "value"),
    [("", ("", "0", ""), 0.0), ("", ("", "0", "1"), 1.0), ("a", ("", "0", "1", *["0"] * CANARY_RUNS), 1.0)],
)
def test_no_grading_takes_longer_than_its_task_says(canary: str, written: Sequence[str], value: float) -> None:
    async def act() -> None:
        stage = Stage(*written)
        checks = ScriptChecks(files={"a": "def test_a():\n    assert f(1) == 2\n"}, canary=canary)
        task = replace(task_of(""), checks=checks)
        with tempfile.TemporaryDirectory() as folder:
            grader = ScriptGrader(stage, ImageStore(Path(folder)), rng=AllTwins())
            reward = await grader.grade(task, await stage.create({}), DONE)
        assert (reward.value, stage.seconds) == (value, task.grading_s)

    asyncio.run(act())


def test_a_verdict_that_is_not_the_same_again_is_not_believed() -> None:
    class OneTwin(random.Random):
        def randrange(self, *limits: int) -> int:  # type: ignore[override]  # as it is asked
            return 1

    async def act() -> Grade:
        stage = Stage("1", "0", "0")
        checks = ScriptChecks(files={"a": "def test_a():\n    assert f(1) == 2\n"}, canary="a")
        with tempfile.TemporaryDirectory() as folder:
            grader = ScriptGrader(stage, ImageStore(Path(folder)), rng=OneTwin())
            return await grader.grade(replace(task_of(""), checks=checks), await stage.create({}), DONE)

    reward = asyncio.run(act())
    assert (reward.value, reward.parts["repeated"], "cheat_canary" in reward.parts) == (0.0, 0.0, False)


# --- Verifiers in sandboxes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Court:
    """A grader with real sandboxes."""

    runner: asyncio.Runner
    sandboxes: NamespaceSandboxes
    store: ImageStore
    grader: ScriptGrader

    def judge(
        self,
        task: Task,
        work: Callable[[Sandbox], Awaitable[object]] | str = "true",
        result: HarnessResult = DONE,
    ) -> Grade:
        """Grade a sandbox after the agent's ``work``, which is a script or a function."""

        async def act() -> Grade:
            sandbox = await self.sandboxes.create(task.files, sandbox_spec(task.environment or EnvironmentSpec()))
            try:
                if isinstance(work, str):
                    done = await sandbox.exec(["bash", "-c", work], timeout_s=20)
                    assert done.exit_code == 0, done
                else:
                    await work(sandbox)
                return await self.grader.grade(task, sandbox, result)
            finally:
                await sandbox.close()

        return self.runner.run(act())


@pytest.fixture(scope="module")
def court() -> Iterator[Court]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        sandboxes = NamespaceSandboxes()
        try:
            if Capability.CONFINED not in runner.run(sandboxes.capabilities()):
                pytest.skip("no sandbox with namespaces can be made here")
            store = ImageStore(Path(folder))
            yield Court(runner, sandboxes, store, ScriptGrader(sandboxes, store))
        finally:
            runner.run(sandboxes.close())


def task_of(
    script: str,
    *,
    artefacts: tuple[str, ...] = (".",),
    files: Mapping[str, str] | None = None,
    more: Mapping[str, str] | None = None,
    timeout_s: float = 20.0,
    task_id: str = "",
    environment: EnvironmentSpec | None = None,
) -> Task:
    return Task(
        task_id=task_id or f"{hash((script, artefacts)):016x}",
        family="harbor",
        template="answer",
        split=Split.TRAIN,
        prompt="write yes into answer.txt",
        files={"kept.txt": "kept", "folder/gone.txt": "gone"} | dict(files or {}),
        checks=ScriptChecks(
            files={"test.sh": "#!/bin/bash\n" + script, **(more or {})},
            artefacts=artefacts,
            environment={"MODE": "hard"},
            timeout_s=timeout_s,
        ),
        environment=environment or EnvironmentSpec(workdir="/app"),
    )


def test_honest_work_passes_and_none_fails(court: Court) -> None:
    task = task_of(ANSWERED)
    assert court.judge(task).value == 0.0
    reward = court.judge(task, "echo yes > answer.txt")
    assert (reward.value, reward.parts) == (1.0, {"verified": 1.0, "submitted": 1.0})


def test_the_sandbox_is_graded_however_the_agent_stopped(court: Court) -> None:
    reward = court.judge(task_of(ANSWERED), "echo yes > answer.txt", HarnessResult(reason="turns", counts={}))
    assert (reward.value, reward.parts["submitted"]) == (1.0, 0.0)


def test_parts_of_a_reward_are_kept(court: Court) -> None:
    reward = court.judge(task_of("""echo '{"reward": 0.5, "style": 0.25}' > /logs/verifier/reward.json"""))
    assert (reward.value, reward.parts["style"]) == (0.5, 0.25)


def test_a_verifier_is_root_in_the_working_folder_with_its_variables_and_files(court: Court) -> None:
    script = '[ "$(id -u) $PWD $MODE $(/tests/tools/say)" = "0 /app hard said" ] && ' + WRITE.format(1)
    assert court.judge(task_of(script, more={"tools/say": "#!/bin/sh\necho said\n"})).value == 1.0


def test_what_was_deleted_is_gone_and_what_was_left_is_there(court: Court) -> None:
    script = "[ -e kept.txt ] && [ ! -e folder ] && [ -L link ] && [ -x run ] && " + WRITE.format(1)
    work = "rm -r folder && ln -s kept.txt link && printf '#!/bin/sh\\n' > run && chmod +x run"
    assert court.judge(task_of(script), work).value == 1.0


def test_only_declared_artefacts_are_carried(court: Court) -> None:
    script = "[ -e out/a ] && [ ! -e b ] && [ ! -e /tmp/c ] && [ -e folder/gone.txt ] && " + WRITE.format(1)
    work = "mkdir out && touch out/a b /tmp/c && rm -r folder"
    assert court.judge(task_of(script, artefacts=("out", "missing")), work).value == 1.0


def test_the_verifier_is_never_in_the_agents_sandbox(court: Court) -> None:
    async def look(sandbox: Sandbox) -> None:
        results = await sandbox.exec(["sh", "-c", "ls -d /tests /logs /solution; find / -name test.sh 2>/dev/null"])
        assert results.stdout == ""

    court.judge(task_of(ANSWERED), look)


# --- Attacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "work",
    [
        "mkdir -p logs/verifier tests && echo 1 > logs/verifier/reward.txt && cp logs/verifier/reward.txt .",
        "mkdir -p tests && echo 'echo 1 > /logs/verifier/reward.txt' > tests/test.sh",
        "ln -s / root && ln -s /logs logs",
        "ln -s /dev/stdin answer.txt",
        "ln -s /proc/self/cmdline answer.txt",
        "mkdir answer.txt",
        "mkfifo answer.txt",
        "echo 'export r=1' > .bashrc; echo 'r=1' > .profile; echo '[alias]' > .gitconfig",
    ],
)
def test_nothing_that_an_agent_leaves_behind_forges_a_reward(work: str, court: Court) -> None:
    assert court.judge(task_of(ANSWERED), work).value == 0.0


@pytest.mark.parametrize(
    "work",
    [
        "ln -s /tests/expected answer.txt",
        "ln -s ../tests/expected answer.txt",
        "ln -s ../../../tests/expected answer.txt",
        "ln -s /proc/self/root/tests/expected answer.txt",
        "ln -s /usr far && ln -s far/../tests/expected answer.txt",
        "ln -s /usr/../tests/expected answer.txt",
        "ln -s / root && ln -s root/tests/expected answer.txt",
        "ln -s /tests near && ln -s near/expected answer.txt",
        "mkdir -p a/b && ln -s ../../../tests a/b/c && ln -s a/b/c/expected answer.txt",
        "ln -s //tests/expected answer.txt",
        "ln -s /dev/fd/3 answer.txt",
    ],
)
def test_no_link_leads_to_the_right_answers(work: str, court: Court) -> None:
    task = task_of(
        "exec 3< /tests/expected; cmp answer.txt /tests/expected && r=1 || r=0\necho $r > /logs/verifier/reward.txt",
        more={"expected": "secret\n"},
    )
    assert court.judge(task, work).value == 0.0


def test_links_that_stay_or_lead_to_the_images_programs_are_carried(court: Court) -> None:
    script = "[ -x sh ] && [ -e in/link ] && [ -e in/up ] && [ -e abs ] && " + WRITE.format(1)
    work = "ln -s /bin/sh sh; mkdir in; ln -s here in/link; touch in/here; ln -s ../kept.txt in/up; ln -s $PWD/in abs"
    assert court.judge(task_of(script), work).value == 1.0


RUNS_WORK = f"timeout 5 bash ./work.sh\n{ANSWERED}"
"""A verifier that runs what the agent left."""


@pytest.mark.parametrize(
    "work",
    [
        "kill -9 -1",
        "rm -rf /logs",
        "mkdir -p /logs/verifier/reward.json",
        "ln -s /etc/passwd /logs/verifier/reward.json",
        "echo NaN > /logs/verifier/reward.json",
        "head -c 100000 /dev/zero | tr '\\\\0' 1 > /logs/verifier/reward.json",
    ],
)
def test_work_that_breaks_the_verifier_is_worth_nothing(work: str, court: Court) -> None:
    reward = court.judge(task_of(RUNS_WORK), f"cat > work.sh <<'END'\n{work}\nEND\n")
    assert (reward.value, reward.parts["verified"]) == (0.0, 0.0)


def test_work_that_makes_the_verifier_hang_is_worth_nothing(court: Court) -> None:
    reward = court.judge(task_of("[ -e hang ] && sleep 60\n" + ANSWERED, timeout_s=5.0), "touch hang")
    assert (reward.value, reward.parts["verified"]) == (0.0, 0.0)


def test_more_than_can_be_carried_is_worth_nothing(court: Court) -> None:
    reward = court.judge(task_of(ANSWERED), "echo yes > answer.txt; truncate -s 300M big")
    assert (reward.value, reward.parts["verified"]) == (0.0, 0.0)


# --- Canaries -------------------------------------------------------------------------------------------------------

TESTS = """
import sys
sys.path.insert(0, ".")
from add import add

def test_small():
    assert add(1, 2) == 3

def test_large():
    assert add(10**20, 1) == 10**20 + 1
"""
PYTEST = "python3 /tests/run.py && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
RUN = """
import runpy, traceback
names = runpy.run_path("/tests/test_add.py")
for name, test in names.items():
    if name.startswith("test_"):
        test()
"""
"""A runner such as pytest is to whoever fools it: in the same process as what is tested."""
HONEST = "def add(a, b):\n    return a + b\n"
FOOLS = {
    "exit on import": "import os; os._exit(0)\n",
    "exit later": "import atexit, os; atexit.register(os._exit, 0)\nadd = None\n",
    "hook": "import os, sys; sys.excepthook = lambda *_: os._exit(0)\nadd = None\n",
    "equal to all": "class X:\n    __eq__ = lambda s, o: True\ndef add(a, b):\n    return X()\n",
    "forged file": "open('/logs/verifier/reward.json', 'w').write('1')\nadd = None\n",
}


def test_an_honest_solution_passes_with_a_canary(court: Court) -> None:
    task = task_of(PYTEST, more={"test_add.py": TESTS, "run.py": RUN}, artefacts=("add.py",))
    for _ in range(4):
        reward = court.judge(with_canary(task), f"cat > add.py <<'END'\n{HONEST}END\n")
        assert (reward.value, "cheat_canary" in reward.parts) == (1.0, False)


@pytest.mark.parametrize("name", FOOLS)
def test_who_tells_the_verifier_what_to_say_gets_nothing(name: str, court: Court) -> None:
    task = task_of(PYTEST, more={"test_add.py": TESTS, "run.py": RUN}, artefacts=("add.py",))
    work = f"cat > add.py <<'END'\n{FOOLS[name]}END\n"
    assert court.judge(task, work).value == 1.0  # the verifier alone believes it
    rewards = [court.judge(with_canary(task), work) for _ in range(1 if name != "equal to all" else 4)]
    assert min(reward.value for reward in rewards) == 0.0
    assert any(reward.parts.get("cheat_canary") == 1.0 for reward in rewards)


SHRINKING = """
import os, sys
if os.fork() == 0:
    os.setsid()
    import time
    while True:
        with open("/logs/verifier/.new", "w") as file:
            file.write('{"reward": %.15f}' % (1 - time.time() * 1e-12))
        os.replace("/logs/verifier/.new", "/logs/verifier/reward.json")
        time.sleep(0.01)
import time
time.sleep(0.2)
add = None
"""
"""A reward that is lower each time it is looked at, so that the twin is always paid less."""


def test_a_reward_that_shrinks_a_little_each_time_is_none(court: Court) -> None:
    task = task_of(PYTEST, more={"test_add.py": TESTS, "run.py": RUN}, artefacts=("add.py",))
    reward = court.judge(with_canary(task), f"cat > add.py <<'END'\n{SHRINKING}END\n")
    assert (reward.value, reward.parts["verified"]) == (0.0, 0.0)


OTHERS = TESTS + "\ndef test_other():\n    assert add.__name__ == 'add'\n"
TELLS = """
import sys
def add(a, b): pass
source = open("/tests/test_add.py").read()
names = dict(add=add)
if "add.__name__ == 'add'" in source:
    import os
    os._exit(0)
"""
"""It can do one of the tests, and claims all of them where that one is as it was."""


def test_only_tests_that_fail_without_the_work_are_made_to_fail(court: Court) -> None:
    task = task_of(PYTEST, more={"test_add.py": OTHERS, "run.py": RUN}, artefacts=("add.py",))
    named = with_canary(task, tests=("test_small", "test_large"))
    for _ in range(3):
        reward = court.judge(named, f"cat > add.py <<'END'\n{TELLS}END\n")
        assert (reward.value, reward.parts["cheat_canary"]) == (0.0, 1.0)
    with pytest.raises(ConfigError, match=r"canary_tests = \['test_gone'\]"):
        court.judge(with_canary(task, tests=("test_gone",)), f"cat > add.py <<'END'\n{HONEST}END\n")


def test_what_runs_as_the_agent_writes_neither_tests_nor_rewards(court: Court) -> None:
    script = """
    setpriv --reuid=agent --regid=agent --clear-groups sh -c 'touch mine; for file in /tests/test.sh /tests/new \
        /logs/new /logs/verifier/reward.txt; do echo 1 > $file; done' 2>/dev/null
    [ -e mine ] && [ ! -e /tests/new ] && [ ! -e /logs/new ] && [ ! -e /logs/verifier/reward.txt ] && """
    assert court.judge(task_of(script + WRITE.format(1)), "echo yes > answer.txt").value == 1.0


def test_artefacts_that_leave_no_room_are_the_agents_fault(court: Court) -> None:
    environment = EnvironmentSpec(workdir="/app", limits=SandboxLimits(disk_bytes=8 << 20))
    task = task_of(ANSWERED, environment=environment, more={"data": "x" * (2 << 20)})
    with pytest.raises(AgentFault):
        court.judge(task, "head -c 7500000 /dev/zero > big")


def test_a_canary_that_is_no_test_file_is_named(court: Court) -> None:
    task = task_of(WRITE.format(1), more={"data.py": "x = 1"})
    with pytest.raises(ConfigError, match=r"canary 'data\.py'"):
        court.judge(with_canary(task, "data.py"))


def with_canary(task: Task, path: str = "test_add.py", tests: tuple[str, ...] = ()) -> Task:
    assert isinstance(task.checks, ScriptChecks)
    return replace(task, checks=replace(task.checks, canary=path, canary_tests=tests))


# --- Verifiers that are broken --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "timeout_s", "words"),
    [
        ("echo about to fail; exit 3", 20.0, "exit code 3.*neither(.|\n)*about to fail"),
        ("kill -9 $$", 20.0, "signal 9"),
        ("sleep 60", 1.0, "not done after 1 s"),
        (WRITE.format("maybe"), 20.0, "expected a number"),
        (WRITE.format("2"), 20.0, "from 0 to 1"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", 20.0, "reward"),
        ("mkdir /logs/verifier/reward.json", 20.0, "reward"),
    ],
)
def test_a_verifier_that_is_broken_sets_its_task_aside_with_its_log(
    script: str, timeout_s: float, words: str, court: Court
) -> None:
    with pytest.raises(SandboxError, match=words) as broken:
        court.judge(task_of(script, timeout_s=timeout_s))
    assert "set it aside" in str(broken.value)


def test_exit_codes_are_the_verifiers_own_affair(court: Court) -> None:
    assert court.judge(task_of(WRITE.format(1) + "exit 1")).value == 1.0


def test_a_verifier_that_fails_once_is_asked_again(court: Court) -> None:
    """On a failure, the verifier runs in an untouched sandbox first; the result is remembered for the task."""
    script = "[ -e broken ] && exit 1\n" + ANSWERED
    for _ in range(2):
        assert court.judge(task_of(script, task_id="again"), "touch broken").parts["verified"] == 0.0
    assert court.judge(task_of(script, task_id="again"), "echo yes > answer.txt").value == 1.0


def test_an_image_that_is_gone_is_named(court: Court) -> None:
    task = task_of(ANSWERED, environment=EnvironmentSpec(image="0" * 64))
    with pytest.raises(ConfigError, match="not in"):
        court.judge(task_of(ANSWERED), lambda sandbox: court.grader.grade(task, sandbox, DONE))


def test_a_task_without_a_verifier_is_the_callers_mistake(court: Court) -> None:
    checks = FunctionChecks(path="a.py", function="f", visible=(), hidden=(Case(arguments=(), expected=1),))
    task = Task(task_id="0", family="f", template="t", split=Split.TRAIN, prompt="p", files={}, checks=checks)
    with pytest.raises(TypeError, match="FunctionChecks"):
        court.judge(task)
