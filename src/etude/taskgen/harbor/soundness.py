"""Soundness of tasks: doing nothing must fail and the reference solution must pass, each time.

    fresh sandbox ───────────────▶ grader ─▶ below 1        repeated; all of one kind must agree exactly
    fresh sandbox ─ solve.sh ────▶ grader ─▶ 1

Runs what a caller gives it and reports as data; a task that fails is set aside with its log, and the next one is
checked. Does not grade: any :class:`~etude.protocols.Grader` of :class:`~etude.types.ScriptChecks` will do.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from etude.aio import gather_or_cancel
from etude.errors import AgentFault, ConfigError, SandboxError
from etude.protocols import Grader, HarnessResult, Sandbox, SandboxProvider
from etude.sandbox_spec import EnvironmentSpec, Image, SandboxSpec
from etude.sandboxes.services import sandbox_spec
from etude.tasks.harbor.folder import SETTINGS, SOLVE_PROGRAM, HarborTask
from etude.tasks.harbor.images import Builds, plain_files
from etude.tasks.harbor.settings import TaskFolderError, fill_variables
from etude.types import Split, Task

SOLUTION_PLACE = "/solution"
"""Folder in which a solution is shown, read-only, while it is run; agents' sandboxes have no such folder."""
PASSES = 1.0
REPEATS = 3
"""Gradings of each side: enough to meet a test that fails every other time."""
SOLVE_TIMEOUT_S = 600.0
"""For a solution whose task does not say how long an agent may take."""
LOG_CHARACTERS = 2000
SUBMITTED = HarnessResult(reason="submit", counts={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Soundness:
    """Result of one task's soundness check."""

    name: str
    untouched: tuple[float, ...]
    """The reward of each untouched sandbox."""
    solved: tuple[float, ...]
    """The reward of each sandbox after the task's own solution."""
    faults: tuple[str, ...]
    """Fault of the task; empty, and it can be practised."""
    log: str
    """Log of the failure, for its repair."""
    seconds: float

    @property
    def is_sound(self) -> bool:
        """Return true if the task can be practised."""
        return not self.faults


class SoundnessCheck:
    """Checks the soundness of tasks."""

    def __init__(self, sandboxes: SandboxProvider, grader: Grader, *, repeats: int = REPEATS) -> None:
        """All arguments stay the caller's."""
        if repeats < 1:
            raise ValueError(f"repeats={repeats}: a task is graded at least once")
        self._sandboxes = sandboxes
        self._grader = grader
        self._repeats = repeats

    async def check_all(
        self, tasks: Sequence[HarborTask], builds: Builds, *, parallel: int = 2
    ) -> tuple[Soundness, ...]:
        """Check many tasks, ``parallel`` at a time, in their order; one that has no image is not sound."""
        gate = asyncio.Semaphore(parallel)

        async def one(task: HarborTask) -> Soundness:
            if task.name in builds.refused:
                return _unbuilt(task, builds.refused[task.name])
            async with gate:
                return await self.check(task, image=builds.images[task.name])

        return tuple(await gather_or_cancel(map(one, tasks)))

    async def check(self, source: HarborTask, *, image: Image) -> Soundness:
        """Grade the untouched sandbox and the solved one, several times each; never raises for what a task is like."""
        start = time.monotonic()
        task = source.task(Split.TRAIN, image=image, files=None if image.digest else plain_files(source))
        spec = sandbox_spec(task.environment or EnvironmentSpec(), image)
        untouched: list[float] = []
        solved: list[float] = []
        log = ""
        sides = [(untouched, None), *([(solved, source)] if source.solution else [])]
        try:
            for _ in range(self._repeats):
                for rewards, solution in sides:
                    rewards.append(await self._grade(task, spec, solution))
        except (SandboxError, AgentFault, ConfigError, TaskFolderError) as error:
            log = f"{type(error).__name__}: {error}"
        return Soundness(
            name=source.name,
            untouched=tuple(untouched),
            solved=tuple(solved),
            faults=faults_of(untouched, solved, has_solution=bool(source.solution), log=log),
            log=log,
            seconds=time.monotonic() - start,
        )

    async def _grade(self, task: Task, spec: SandboxSpec, source: HarborTask | None = None) -> float:
        """The reward of a fresh sandbox, in which the solution of ``source`` has been run if there is one."""
        with tempfile.TemporaryDirectory(prefix="etude-solution-") as folder:
            if source is not None:
                await asyncio.to_thread(_lay_out, source.solution, Path(folder))
                spec = replace(spec, mounts={SOLUTION_PLACE: Path(folder)})
            sandbox = await self._sandboxes.create(task.files, spec)
            try:
                if source is not None:
                    await _solve(sandbox, source)
                return (await self._grader.grade(task, sandbox, SUBMITTED)).value
            finally:
                await sandbox.close()


def faults_of(untouched: Sequence[float], solved: Sequence[float], *, has_solution: bool, log: str) -> tuple[str, ...]:
    """The faults of a task with these rewards; ``log`` is of the error that stopped the check, if any."""
    faults = []
    if log:
        faults.append(f"it could not be checked to the end: {log}")
    if any(reward >= PASSES for reward in untouched):
        faults.append(f"doing nothing passes: rewards {list(untouched)}")
    if not has_solution:
        faults.append(f"there is no solution/{SOLVE_PROGRAM}: nothing shows that it can be solved")
    if any(reward < PASSES for reward in solved):
        faults.append(f"its own solution fails: rewards {list(solved)}")
    if len(set(untouched)) > 1 or len(set(solved)) > 1:
        faults.append(f"equal sandboxes are graded unequally: {list(untouched)} untouched, {list(solved)} solved")
    return tuple(faults)


def _unbuilt(task: HarborTask, log: str) -> Soundness:
    return Soundness(name=task.name, untouched=(), solved=(), faults=(f"it has no image: {log}",), log=log, seconds=0.0)


async def _solve(sandbox: Sandbox, source: HarborTask) -> None:
    """Run the solution as an agent would work: as the same user, in the same place."""
    key, place = "solution.env", f"{source.folder / SETTINGS}"
    done = await sandbox.exec(
        ["bash", f"{SOLUTION_PLACE}/{SOLVE_PROGRAM}"],
        timeout_s=source.settings.agent.timeout_sec or SOLVE_TIMEOUT_S,
        environment=fill_variables(source.settings.solution.env, source=place, key=key),
    )
    if done.exit_code != 0 or done.timed_out:
        log = f"{done.stdout}\n{done.stderr}".strip()[-LOG_CHARACTERS:]
        end = f"was not done after {done.seconds:.0f} s" if done.timed_out else f"ended with exit code {done.exit_code}"
        raise TaskFolderError(f"{source.folder}/solution/{SOLVE_PROGRAM} {end}, as the agent\n{log}")


def _lay_out(files: Mapping[str, str], folder: Path) -> None:
    """Write files where any user may read and run them."""
    folder.chmod(0o755)
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755)
