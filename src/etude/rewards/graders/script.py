"""The grader of tasks that bring a verifier: a program that writes a reward file (Harbor).

    agent's sandbox ──export──▶ declared artefacts ──load──▶ fresh sandbox of the same image, as root     (for each run)
                                                            ├── reward files removed, /tests written
                                                            ├── verifier, with a time limit
                                                            ├── its remaining processes are killed
                                                            └── /logs/verifier/reward.json or reward.txt

The agent never enters the sandbox in which it is graded. The verifier sees only the artefacts of the agent's sandbox:
files that the agent deleted are deleted there, too, and links that lead elsewhere are left out. The verifier's output
is its log, never a verdict.

If a verifier crashes, hangs or writes no reward, the cause is found as follows: once per task the verifier runs in a
sandbox that no agent has touched. If it gives no verdict there, it is broken: :class:`~etude.errors.SandboxError` with
its log, and the task should be set aside. If it does, the agent's work is the cause: it is graded once more, and if
there is no verdict again, the reward is 0 with the part ``verified`` at 0. So no agent gains by breaking the verifier,
and none loses by a verifier that was already broken.

A verdict is only as good as its verifier: if it runs the agent's code as root or in its own process, that code can
forge the verdict. Only root can write ``/tests`` and ``/logs``, and the user ``agent`` owns the working folder, so a
verifier that runs the agent's code as ``agent`` is protected.

If the verifier runs tests, a task may name a test file as *canary*. Rewarded work is then verified again several times,
each time in a fresh sandbox, with the tests either unchanged or with one made to fail
(:mod:`etude.rewards.graders.canaries`), at random. It must get the same reward in the first case, and in the second one
at least one step of the task's rewards less. Code that cannot tell the cases apart, yet always forges a reward, passes
one time in 2^runs − 1; otherwise it gets 0. :class:`~etude.types.TestChecks` are the stronger form.
"""

import asyncio
import errno
import json
import math
import os
import random
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Literal

from etude.errors import AgentFault, ConfigError, SandboxError
from etude.protocols import ExecResult, Grade, HarnessResult, Images, Sandbox, SandboxProvider
from etude.rewards.graders.answers import SUBMITTED
from etude.rewards.graders.canaries import TestSource
from etude.sandbox_spec import EnvironmentSpec, ImageUser, SandboxSpec
from etude.sandboxes.images.archives import Entry, EntryKind, read_archive, write_archive
from etude.sandboxes.services import sandbox_spec
from etude.types import Json, ScriptChecks, Task

TESTS, LOGS = "/tests", "/logs/verifier"
REWARD_JSON, REWARD_TEXT = f"{LOGS}/reward.json", f"{LOGS}/reward.txt"
"""Files of a verifier's reward; JSON is looked for first."""
REWARD_LIMIT_CHARACTERS = 64 << 10
"""Limit of a reward file."""
PARTS_LIMIT, NAME_LIMIT_CHARACTERS = 64, 100
"""Limits of a reward's parts, and of the name of one."""
ARTEFACT_LIMIT_BYTES = 128 << 20
"""Limit of an export from a sandbox: the size that every provider supports, including virtual machines."""
PREPARE_TIMEOUT_S = 60.0
"""Time to prepare a sandbox; removing a large working folder takes a while."""
GRACE_S = 300.0
"""Life of a sandbox beyond its verifier."""
LOG_CHARACTERS = 2000
"""Limit of a verifier's output in an error."""
SIGNALS = range(129, 129 + 64)
"""Exit codes of a program that a signal ended."""
CANARY_RUNS = 4
"""Repeated runs of a verifier with a canary after a reward; :class:`~etude.types.ScriptChecks` reserves time for them.
"""
ROUNDING = 1e-6
"""Largest difference between a reward written as a decimal and the one that the task names."""
REMEMBERED_TASKS = 4096
"""Number of tasks for which the check of the verifier is cached."""
OPEN_GIT: Mapping[str, str] = MappingProxyType(
    {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
)
"""Lets git, run as root, work in the agent's folder; acceptable because the sandbox is closed after the verdict."""
IMAGE_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "opt", "etc")
"""Allowed targets of links among the artefacts, beside the working folder: the image's own files, which the agent could
read anyway. Not ``/tests``, which has the correct answers, nor ``/proc``, which has the verifier's command line.
"""
TEST = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)
"""A module-level test function."""
CLEAR = """
for path; do
    case "$path" in
        .) find . -mindepth 1 -maxdepth 1 -exec rm -rf -- {} + ;;
        *) rm -rf -- "$path" ;;
    esac || exit 1
done
"""
PREPARE = f"""
umask 022 && rm -rf {TESTS} {LOGS} && mkdir -p {TESTS} {LOGS} /logs/agent /logs/artifacts && chmod 755 /logs || exit 1
chown -R -h "$0" .
"""
"""Shell script: root owns the verifier's folders, and the agent owns its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierReward:
    """Reward that a verifier wrote."""

    value: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReward:
    """Reason why a verifier wrote no reward."""

    reason: str
    log: str = ""
    """The end of the verifier's output."""


class ScriptGrader:
    """Runs verifiers of :class:`~etude.types.ScriptChecks`; implements :class:`~etude.protocols.Grader`."""

    def __init__(self, sandboxes: SandboxProvider, images: Images, *, rng: random.Random | None = None) -> None:
        """The caller closes ``sandboxes``; they must be ``CONFINED``, because verifiers are in ``/tests``.

        ``rng`` draws canaries (default: the system's randomness).
        """
        self._sandboxes = sandboxes
        self._images = images
        self._rng = rng or random.SystemRandom()
        self._untouched_runs: OrderedDict[str, _UntouchedRun] = OrderedDict()

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """The verifier's verdict on the artefacts, whether or not the agent submitted them.

        Parts: ``verified``, 0 if the agent's work made the verifier fail; ``submitted``, 0 or 1; ``cheat_canary``, 1
        when a failing test made no difference; ``repeated``, 0 when the unchanged tests gave another reward; and the
        other entries of the reward file beside ``reward``. Raises :class:`~etude.errors.SandboxError` if the verifier
        does not work without the agent either, and :class:`~etude.errors.ConfigError` for a missing image or a canary
        file without a test.
        """
        checks = _script_checks(task)
        artefacts = await self._export(task, checks, sandbox)
        verdict = await self._verify(task, checks, artefacts)
        if isinstance(verdict, NoReward):
            await self._check_untouched(task, checks)
            verdict = await self._verify(task, checks, artefacts)
        submitted = float(result.reason == SUBMITTED)
        if isinstance(verdict, NoReward):
            return Grade(value=0.0, parts={"verified": 0.0, "submitted": submitted})
        parts = {**verdict.parts, "verified": 1.0, "submitted": submitted}
        doubt = await self._doubt(task, checks, artefacts, verdict.value) if verdict.value > 0 and checks.canary else {}
        return Grade(value=0.0 if doubt else verdict.value, parts={**parts, **doubt})

    async def _doubt(
        self, task: Task, checks: ScriptChecks, artefacts: bytes | NoReward, value: float
    ) -> Mapping[str, float]:
        """Parts with the reason why a verdict of ``value`` is rejected; empty if it is accepted."""
        twins = self._rng.randrange(1, 1 << CANARY_RUNS)  # at least one
        for run in range(CANARY_RUNS):
            is_twin = bool(twins >> run & 1)
            verifier = failing_twin(checks, self._rng) if is_twin else checks
            verdict = await self._verify(task, verifier, artefacts)
            reward = verdict.value if isinstance(verdict, VerifierReward) else 0.0
            if is_twin and reward >= value:
                return {"cheat_canary": 1.0}
            if not is_twin and reward != value:
                return {"repeated": 0.0}
        return {}

    async def _check_untouched(self, task: Task, checks: ScriptChecks) -> None:
        """Raise :class:`~etude.errors.SandboxError` unless the verifier works where no agent has been."""
        run = self._untouched_runs.setdefault(task.task_id, _UntouchedRun())
        self._untouched_runs.move_to_end(task.task_id)
        if len(self._untouched_runs) > REMEMBERED_TASKS:
            self._untouched_runs.popitem(last=False)
        async with run.lock:
            if run.verdict is None:
                untouched = await self._sandboxes.create(task.files, self._spec(task, checks, user="agent"))
                try:
                    artefacts = await self._export(task, checks, untouched)
                finally:
                    await untouched.close()
                try:
                    run.verdict = await self._verify(task, checks, artefacts)
                except AgentFault as fault:  # although no agent has been there
                    run.verdict = NoReward(reason=f"the sandbox is too small for it: {fault}")
        if isinstance(run.verdict, NoReward):
            raise SandboxError(
                f"the verifier of task {task.task_id} ({task.template}) gives no reward in an untouched "
                f"sandbox: {run.verdict.reason}; repair the task, or set it aside\n{run.verdict.log}"
            )

    async def _export(self, task: Task, checks: ScriptChecks, sandbox: Sandbox) -> bytes | NoReward:
        """The artefacts of ``sandbox``, exported once for all runs, so that it may close before they end."""
        try:
            tar = await sandbox.export(checks.artefacts, limit_bytes=ARTEFACT_LIMIT_BYTES)
            return await asyncio.to_thread(without_far_links, tar, (task.environment or EnvironmentSpec()).workdir)
        except ValueError as error:
            return NoReward(reason=f"the artefacts cannot be taken along: {error}")

    async def _verify(self, task: Task, checks: ScriptChecks, artefacts: bytes | NoReward) -> VerifierReward | NoReward:
        """Put the artefacts into a fresh sandbox and run the verifier there."""
        if isinstance(artefacts, NoReward):
            return artefacts
        spec = self._spec(task, checks, user="root")
        sandbox = await self._sandboxes.create(task.files, spec)
        try:
            await _prepare(sandbox, ["sh", "-c", CLEAR, "clear", *checks.artefacts])
            try:
                await sandbox.load(artefacts)
            except ValueError as error:
                return NoReward(reason=f"the artefacts cannot be unpacked: {error}")
            verdict = await _run(sandbox, checks, spec.image.user)
            return _paid(verdict, checks.rewards) if checks.canary else verdict
        finally:
            await sandbox.close()

    def _spec(self, task: Task, checks: ScriptChecks, *, user: Literal["agent", "root"]) -> SandboxSpec:
        environment = task.environment or EnvironmentSpec()
        image = self._images.open(environment.image) if environment.image else None
        return replace(sandbox_spec(environment, image), user=user, ttl_s=checks.timeout_s + GRACE_S)


class _UntouchedRun:
    """Result of one task's verifier in an untouched sandbox; ``None`` before it is run."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.verdict: VerifierReward | NoReward | None = None


def failing_twin(checks: ScriptChecks, rng: random.Random) -> ScriptChecks:
    """The verifier with one random canary test changed so that it must fail.

    Raises :class:`~etude.errors.ConfigError` if the file is missing or has no such test.
    """
    path = checks.canary
    text = checks.files.get(path, "")
    names = TEST.findall(text)
    if not names:
        raise ConfigError(f"canary {path!r} is not a file with tests: the verifier has {list(checks.files)}")
    if missing := sorted({*checks.canary_tests} - {*names}):
        raise ConfigError(f"canary_tests = {missing}: {path!r} has {names}")
    source = TestSource(text)
    name = rng.choice(checks.canary_tests or names)
    return replace(checks, files={**checks.files, path: source.altered([source.alteration(name, rng)])})


def _paid(verdict: VerifierReward | NoReward, rewards: Sequence[float]) -> VerifierReward | NoReward:
    """The verdict with its value set to the task's reward that equals it up to :data:`ROUNDING`.

    ``NoReward`` if no reward does; a ``NoReward`` is returned unchanged.
    """
    if isinstance(verdict, NoReward):
        return verdict
    nearest = min(rewards, key=lambda reward: abs(reward - verdict.value))
    if abs(nearest - verdict.value) > ROUNDING:
        reason = (
            f"its reward is {verdict.value!r}, and the task pays {list(rewards)}: name all in metadata.etude.rewards"
        )
        return NoReward(reason=reason)
    return replace(verdict, value=nearest)


def without_far_links(tar: bytes, workdir: str) -> bytes:
    """Drop links among the artefacts that lead to neither the working folder nor the image's own files.

    The parents of an archived link are real folders, so leading ``..`` are safe; elsewhere in a path they could leave a
    folder that is itself a link. Raises ``ValueError`` if ``tar`` is not a tar archive.
    """
    entries = read_archive(tar)
    near = [entry for entry in entries if entry.kind is not EntryKind.LINK or _leads_near(entry, workdir)]
    return tar if len(near) == len(entries) else write_archive(near, limit_bytes=len(tar))


def _leads_near(link: Entry, workdir: str) -> bool:
    target = PurePosixPath(link.target)
    place = PurePosixPath(workdir, link.name).parent
    parts = list(target.parts)
    while parts and parts[0] == "..":
        parts.pop(0)
        place = place.parent
    if ".." in parts:
        return False
    end = place.joinpath(*parts)
    return end.is_relative_to(workdir) or end.parts[1:2] in {(folder,) for folder in IMAGE_FOLDERS}


def read_reward(json_text: str | None, text: str | None) -> VerifierReward:
    """Parse a verifier's reward files; ``None`` stands for a missing one.

    A number from 0 to 1, or an object of such numbers: the value is ``reward`` or the only entry; other entries are
    parts. Raises ``ValueError`` with the reason for anything else.
    """
    written = text if json_text is None else json_text
    if written is None:
        raise ValueError(f"it wrote neither {REWARD_JSON} nor {REWARD_TEXT}")
    if len(written) > REWARD_LIMIT_CHARACTERS:
        raise ValueError(f"its reward file has {len(written)} characters, at most {REWARD_LIMIT_CHARACTERS}")
    if json_text is None:
        return VerifierReward(value=_reward("reward", _number(written.strip())), parts={})
    try:
        value: Json = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{REWARD_JSON} is not JSON: {error}") from error
    if not isinstance(value, dict):
        return VerifierReward(value=_reward("reward", value), parts={})
    if not value or len(value) > PARTS_LIMIT or max(map(len, value)) > NAME_LIMIT_CHARACTERS:
        raise ValueError(f"{REWARD_JSON} has {len(value)} parts, or one with a long name: expected 1 to {PARTS_LIMIT}")
    rewards = {name: _reward(name, part) for name, part in value.items()}
    if "reward" not in rewards and len(rewards) > 1:
        raise ValueError(f"{REWARD_JSON} has the parts {sorted(rewards)} and no 'reward': which one counts?")
    main = "reward" if "reward" in rewards else next(iter(rewards))
    return VerifierReward(value=rewards[main], parts={name: part for name, part in rewards.items() if name != "reward"})


async def _prepare(sandbox: Sandbox, argv: list[str]) -> None:
    done = await sandbox.exec(argv, timeout_s=PREPARE_TIMEOUT_S)
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise AgentFault(f"the artefacts leave a verifier's sandbox no room: {_log(done)}")
    if done.exit_code != 0 or done.timed_out:
        raise SandboxError(f"a verifier's sandbox could not be made ready: exit code {done.exit_code}: {_log(done)}")


async def _run(sandbox: Sandbox, checks: ScriptChecks, agent: ImageUser) -> VerifierReward | NoReward:
    """Write the verifier's files, run it and read its reward."""
    await _prepare(sandbox, ["sh", "-c", PREPARE, f"{agent.uid}:{agent.gid}"])
    for path, text in checks.files.items():
        await sandbox.write_file(f"{TESTS}/{path}", text)
    programs = [f"{TESTS}/{path}" for path, text in checks.files.items() if text.startswith("#!")]
    if programs:
        await _prepare(sandbox, ["chmod", "a+x", "--", *programs])
    done = await sandbox.exec(
        checks.command, timeout_s=checks.timeout_s, environment={**OPEN_GIT, **checks.environment}
    )
    await sandbox.kill_processes()
    if done.timed_out:
        return NoReward(reason=f"it was not done after {checks.timeout_s:g} s", log=_log(done))
    if done.exit_code in SIGNALS:
        return NoReward(reason=f"signal {done.exit_code - SIGNALS[0] + 1} ended it", log=_log(done))
    try:
        return read_reward(await sandbox.read_file(REWARD_JSON), await sandbox.read_file(REWARD_TEXT))
    except ValueError as error:
        return NoReward(reason=f"exit code {done.exit_code}, and {error}", log=_log(done))


def _script_checks(task: Task) -> ScriptChecks:
    if not isinstance(task.checks, ScriptChecks):
        raise TypeError(f"task {task.task_id} has {type(task.checks).__name__}, no verifier of its own")
    return task.checks


def _log(done: ExecResult) -> str:
    return f"{done.stdout}\n{done.stderr}".strip()[-LOG_CHARACTERS:]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{REWARD_TEXT} has {text[:60]!r}: expected a number") from None


def _reward(name: str, value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 or math.isnan(value):
        raise ValueError(f"its {name} is {str(value)[:60]}: expected a number from 0 to 1")
    return float(value)
