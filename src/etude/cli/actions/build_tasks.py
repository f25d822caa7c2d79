"""`etude tasks build|check|ls`: builds a folder of tasks from repositories.

    fetch ──▶ prepare ──▶ propose ──▶ try, two at a time ──▶ tasks, log, report

Wiring only: what a task is and which candidates become one is :mod:`etude.taskgen`'s. A build that is
interrupted goes on from its log; a package that no tasks can be made of is an error with its log beside it.
"""

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import AgentFault, ConfigError, DamagedError, SandboxError
from etude.protocols import SandboxProvider
from etude.rewards.graders.hidden_tests import HiddenTestGrader
from etude.sandbox_spec import SandboxSpec
from etude.sandboxes.images.store import ImageStore
from etude.taskgen.candidates import Candidate, propose
from etude.taskgen.failures import RepositoryError
from etude.taskgen.hiding import place_of
from etude.taskgen.installer import Installer, InstallerOptions
from etude.taskgen.preparation import Preparation, Settings
from etude.taskgen.projects import read_project
from etude.taskgen.sources import fetch, read_texts
from etude.taskgen.survey import Survey
from etude.taskgen.testruns import RunObservation, TestRun, observe
from etude.taskgen.validator import ACCEPTED, CandidateValidator, PreparedRepository, failed
from etude.taskgen.verdicts import Rejection, prove
from etude.tasks.repositories.folder import CandidateVerdict, PackageFolder, RepositoryTasks
from etude.types import Split, Task, TestChecks

BATCH = 6
"""Candidates that one quick command tries."""
WORKERS = 2
"""Candidates that are tried at the same time."""
COMMAND_WORDS = 3
"""``python3 -m pytest``; options follow."""
SOUND = "sound"
MAX_FAILURES = 5
"""Sandboxes that may fail in a row before the build gives up."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options of `etude tasks build`."""

    reference: str
    """A folder, a git URL, an archive, or ``pypi:NAME==VERSION``."""
    out: Path
    limit: int = 100
    """Tasks to make of the package, at most; those of earlier builds count."""
    settings: Settings = field(default_factory=Settings)
    installer: InstallerOptions | None = None
    """A model that installs where reading the package's files is not enough."""
    unprobed: bool = False
    """Make tasks that have no probe, too."""
    workers: int = WORKERS


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """Counts of a build, summed over all calls that continued it."""

    package: str
    version: str
    tests: dict[str, int]
    outcomes: dict[str, int]
    """Candidates by outcome."""
    operators: dict[str, int]
    """Tasks kept, by what was done to the package."""
    splits: dict[str, int]
    candidates: int
    """Number of candidates to try."""
    tried: int
    kept: int
    seconds_per_candidate: float
    seconds: float
    """Candidates tried in this call."""
    verdicts: list[dict[str, Any]]


async def build(options: BuildOptions, provider: SandboxProvider, *, say: Say) -> BuildReport:
    """Make tasks of one repository. ``provider`` stays the caller's to close.

    Raises :class:`~etude.taskgen.failures.RepositoryError` when none can be made, its log being in
    the folder by then, and :class:`~etude.errors.SandboxError` when sandboxes keep failing.
    """
    started = time.monotonic()
    store = ImageStore(options.out / "images")
    with tempfile.TemporaryDirectory(prefix="etude-build-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        tree = await asyncio.to_thread(fetch, options.reference, scratch / "source")
        texts = await asyncio.to_thread(read_texts, tree)
        project = read_project(texts)
        folder = PackageFolder(options.out / f"{project.name}-{project.version}")
        say(f"{project.name} {project.version}: {len(texts)} files, sources {', '.join(project.sources)}")
        try:
            installer = None if options.installer is None else Installer(options.installer, provider)
            preparation = Preparation(provider, store, folder, options.settings, installer)
            bench = await preparation.bench(tree, project, texts, scratch, say=say)
        except RepositoryError as error:
            folder.write("failure.log", f"{error}\n\n{error.log}\n".encode())
            raise
        candidates = await asyncio.to_thread(propose, project, texts, bench.survey, seed=options.settings.seed)
        say(f"{len(candidates)} candidates")
        guarded = HiddenTestGrader(provider, store).guarded if options.unprobed else None
        validator = CandidateValidator(bench, provider, store, folder, guarded=guarded)
        await try_all(validator, candidates, folder, options, say)
    report = report_of(bench, folder, len(candidates), time.monotonic() - started)
    folder.write("report.json", json.dumps(asdict(report), indent=1).encode())
    return report


async def try_all(
    validator: CandidateValidator,
    candidates: Sequence[Candidate],
    folder: PackageFolder,
    options: BuildOptions,
    say: Say,
) -> None:
    """Try candidates that have no verdict yet until there are enough tasks.

    Raises :class:`~etude.errors.SandboxError` when sandboxes keep failing.
    """
    again = {Rejection.FAILED, *([Rejection.UNPROBED] if options.unprobed else ())}
    earlier = [verdict for verdict in folder.verdicts() if verdict.outcome not in again]
    line = _CandidateQueue(candidates, earlier, options.limit, say, folder)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(options.workers):
                group.create_task(_work(validator, line))
    except ExceptionGroup as failures:  # one worker's trouble ends all; the caller knows it by its own name
        raise failures.exceptions[0] from failures


class _CandidateQueue:
    """The candidates that wait, and the count of what became of the others; shared by workers of one event loop."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        earlier: Sequence[CandidateVerdict],
        limit: int,
        say: Say,
        folder: PackageFolder,
    ) -> None:
        done = {verdict.candidate_id for verdict in earlier}
        self._waiting = [candidate for candidate in reversed(candidates) if candidate.candidate_id not in done]
        self._accepted = sum(verdict.outcome == ACCEPTED for verdict in earlier)
        self._tried = len(earlier)
        self._limit = limit
        self._say = say
        self._folder = folder
        self._failures = 0
        self._busy = 0

    def take(self) -> list[Candidate]:
        """The next few candidates, or none when there are enough tasks."""
        return [self._waiting.pop() for _ in range(BATCH) if self._waiting] if self.open else []

    @property
    def open(self) -> bool:
        """True if more tasks are needed than there are, counting the candidates in progress as tasks."""
        return self._accepted + self._busy < self._limit

    def begin(self) -> None:
        """A candidate may become a task; :meth:`settle` says what it became."""
        self._busy += 1

    def settle(self, verdict: CandidateVerdict, *, was_begun: bool = False) -> None:
        """A candidate has its verdict. Raises :class:`~etude.errors.SandboxError` when too many sandboxes failed."""
        self._folder.record(verdict)
        self._tried += 1
        self._busy -= was_begun
        self._accepted += verdict.outcome == ACCEPTED
        self._failures = self._failures + 1 if verdict.outcome == Rejection.FAILED else 0
        words = f"{verdict.operator} {verdict.path}:{verdict.target}: {verdict.outcome} {verdict.detail}".rstrip()
        self._say(f"{self._accepted} kept of {self._tried}, {len(self._waiting)} wait · {words}")
        if self._failures >= MAX_FAILURES:
            raise SandboxError(f"{self._failures} sandboxes failed in a row, the last: {verdict.detail}")


async def _work(validator: CandidateValidator, line: _CandidateQueue) -> None:
    """Take batches until there are none: quick runs for all of it, then what is worth finishing, one by one."""
    while batch := line.take():
        try:
            async with validator.live() as sandbox:
                trials, verdicts = await validator.quick(batch, sandbox)
        except (SandboxError, AgentFault) as error:
            for candidate in batch:
                line.settle(failed(candidate, error))
            continue
        for verdict in verdicts:
            line.settle(verdict)
        for trial in trials:
            if not line.open:
                break
            line.begin()
            try:
                verdict = await validator.finish(trial)
            except (SandboxError, AgentFault) as error:
                verdict = failed(trial.candidate, error)
            line.settle(verdict, was_begun=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """True if a stored task still is one."""

    task_id: str
    template: str
    split: Split
    outcome: str
    """``sound``, or what is wrong with it: a :class:`~etude.taskgen.verdicts.Rejection`."""
    detail: str = ""


async def check(folder: Path, provider: SandboxProvider, *, say: Say, repeats: int = 2) -> list[CheckResult]:
    """Prove every task of a folder again: as given it fails, with its answer it passes, ``repeats`` times.

    A task that cannot be tried (its image is gone, its sandbox failed) is set aside with the reason. Raises
    :class:`~etude.errors.ConfigError` for a folder without tasks.
    """
    tasks = RepositoryTasks(folder)
    store = ImageStore(tasks.images)
    results: list[CheckResult] = []
    for task in (task for split in Split for task in tasks.tasks(split)):
        try:
            outcome, detail = await _check(task, tasks.answer(task), store, provider, repeats)
        except (ConfigError, DamagedError, SandboxError, AgentFault) as error:
            outcome, detail = str(Rejection.FAILED), str(error)
        results.append(
            CheckResult(task_id=task.task_id, template=task.template, split=task.split, outcome=outcome, detail=detail)
        )
        say(f"{task.split} {task.task_id} {task.template}: {outcome} {detail}".rstrip())
    return results


async def _check(
    task: Task, answer: Mapping[str, str], store: ImageStore, provider: SandboxProvider, repeats: int
) -> tuple[str, str]:
    checks = task.checks
    if not isinstance(checks, TestChecks) or task.environment is None:
        raise ConfigError(f"task {task.task_id} has no hidden tests in an image of its own: it is not of this family")
    about, others = checks.must_pass[: checks.about], checks.must_pass[checks.about :]
    files: Sequence[Mapping[str, str | None]] = ({**checks.files}, {**checks.files, **answer})
    targets = tuple(sorted({place_of(test)[0] for test in checks.must_pass}))
    seen: tuple[list[RunObservation], list[RunObservation]] = ([], [])
    for number in range(repeats):
        sandbox = await provider.create({}, SandboxSpec(image=store.open(task.environment.image)))
        try:
            steps = [
                TestRun(targets=targets, ids=checks.must_pass, seed=number + 1, files=each, timeout_s=checks.timeout_s)
                for each in files
            ]
            results = await observe(sandbox, steps, options=checks.command[COMMAND_WORDS:], hash_seed=number + 1)
        finally:
            await sandbox.close()
        for runs, observation in zip(seen, results, strict=True):
            runs.append(observation)
    proof = prove(about, others, *seen)
    if proof.rejection is None and not (checks.probes or await HiddenTestGrader(provider, store).guarded(task)):
        return str(Rejection.UNGUARDED), "no probe, and no test that can have a canary: delete it"
    lost = sorted({*about, *others} - {*proof.about, *proof.others})
    if proof.rejection is None and lost:
        return str(Rejection.FLAKY), f"not always as they should: {', '.join(lost[:3])}"
    return (SOUND, "") if proof.rejection is None else (str(proof.rejection), "")


def report_of(bench: PreparedRepository, folder: PackageFolder, candidates: int, seconds: float) -> BuildReport:
    """Summarise the log of a package in numbers."""
    latest = {verdict.candidate_id: verdict for verdict in folder.verdicts()}
    accepted = [verdict for verdict in latest.values() if verdict.outcome == ACCEPTED]
    timed = [verdict.seconds for verdict in latest.values() if verdict.seconds > 0]
    with_tasks = RepositoryTasks(folder.path.parent) if accepted else None
    mine = {verdict.task_id for verdict in accepted}
    splits = {
        str(split): sum(task.task_id in mine for task in with_tasks.tasks(split)) if with_tasks else 0
        for split in Split
    }
    return BuildReport(
        package=bench.project.name,
        version=bench.project.version,
        tests=_test_counts(bench.survey),
        outcomes=dict(Counter(verdict.outcome for verdict in latest.values()).most_common()),
        operators=dict(sorted(Counter(verdict.operator for verdict in accepted).items())),
        splits=splits,
        candidates=candidates,
        tried=len(latest),
        kept=len(accepted),
        seconds_per_candidate=round(sum(timed) / len(timed), 3) if timed else 0.0,
        seconds=round(seconds, 1),
        verdicts=[_verdict_fields(verdict) for verdict in latest.values()],
    )


def _test_counts(survey: Survey) -> dict[str, int]:
    return {
        "stable": len(survey.stable),
        "flaky": len(survey.flaky),
        "failing": len(survey.failing),
        "skipped": survey.skipped,
        "unfit": len(survey.unfit),
        "broken_files": len(survey.broken),
    }


def _verdict_fields(verdict: CandidateVerdict) -> dict[str, Any]:
    fields = asdict(verdict)
    fields["fails"] = len(fields.pop("tests"))
    return fields
