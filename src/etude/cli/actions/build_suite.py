"""`etude suite build|fetch|refresh|contamination`: builds a suite from repository histories, and maintains it.

    histories ──build──▶ suite.toml, records.jsonl, tasks, images        records ──fetch──▶ tasks, images
              ──refresh──▶ those that came since, by histories.json
    results, training texts ──refresh──▶ retired.json, difficulties, a new version

Wiring only: what a task is and which changes become one is :mod:`etude.taskgen.history`'s. A build that is interrupted
goes on from its log.
"""

import asyncio
import datetime
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import tomli_w

from etude.config.suite import SUITE_FILE
from etude.dashboard.suite_results import SuiteResults
from etude.errors import ConfigError, DamagedError
from etude.protocols import HarnessResult, SandboxProvider
from etude.rewards.graders.answers import SUBMITTED
from etude.rewards.graders.hidden_tests import HiddenTestGrader
from etude.sandbox_spec import Image
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.services import sandbox_spec
from etude.taskgen.history.completions import LEAST_WORDS, HalfTest, half_tests
from etude.taskgen.history.contamination import Traces, find_traces
from etude.taskgen.history.progress import HistoryProgress, newest_tried, read_progress, write_progress
from etude.taskgen.history.records import HistoryRecord, read_records, write_records
from etude.taskgen.history.retirement import difficulty_of, gather_tries, reason_to_retire
from etude.taskgen.history.sources import Change, History, open_history
from etude.taskgen.history.validator import (
    ChangeTrees,
    ChangeValidator,
    Dependencies,
    Grading,
    add_image,
    read_change,
    task_of,
    texts_of,
)
from etude.taskgen.preparation import Preparation, Settings
from etude.taskgen.projects import bare_name, read_project
from etude.taskgen.sources import read_texts
from etude.taskgen.verdicts import Rejection
from etude.tasks.repositories.folder import PackageFolder, RepositoryTasks
from etude.tasks.suites import Retirement, read_retired, suite_of, write_retired
from etude.types import Split, Task, TestChecks

IMAGES, ARCHIVES = "images", "archives"
WORKERS = 2
"""Changes that are tried at a time."""
IGNORED = f"{IMAGES}/\n{ARCHIVES}/\n*/tasks/\n*/answers/\n"
"""``.gitignore`` of a suite: what `etude suite fetch` makes again."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteBuild:
    """Options of `etude suite build`."""

    references: Sequence[str]
    """Folders of git repositories, or ``pypi:NAME``."""
    out: Path
    name: str = ""
    """Name of a new suite; empty: that of its folder."""
    changes: int = 200
    """Newest changes of each history that are tried."""
    licence: str = ""
    settings: Settings = field(default_factory=Settings)


async def build(options: SuiteBuild, provider: SandboxProvider, *, say: Say) -> list[HistoryRecord]:
    """Make tasks of the changes of some histories, and return all records of the suite.

    Raises :class:`~etude.taskgen.failures.RepositoryError` for a history of which nothing can be installed.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    _write_suite_file(options)
    for reference in options.references:
        history = open_history(reference, options.out / ARCHIVES)
        changes = await asyncio.to_thread(history.changes, options.changes)
        if not changes:
            raise ConfigError(f"{reference!r} has no change: a history needs two commits, or two releases")
        await _follow(history, changes, options, provider, say)
    return read_records(options.out)


async def take_in(
    folder: Path, provider: SandboxProvider, *, changes: int | None = None, settings: Settings | None = None, say: Say
) -> None:
    """Make tasks from the changes that were added to a suite's histories since the last build, installing what was
    installed then; ``changes``: of so many of the newest ones instead, ``settings``: by these.

    Raises :class:`~etude.errors.ConfigError` for a history of which it is not known where its last build ended.
    """
    progress = read_progress(folder)
    for source in dict.fromkeys([*progress, *(record.source for record in read_records(folder))]):
        last = progress.get(source)
        if changes is None and (last is None or not last.newest):
            raise ConfigError(
                f"{folder} does not say where its last build of {source!r} ended: say once how many of its newest "
                f"changes are to be tried (--changes N)"
            )
        history = open_history(source, folder / ARCHIVES)
        since = last.newest if last is not None and changes is None else ""
        newer = await asyncio.to_thread(history.changes, changes, since)
        if not newer:
            say(f"{source}: no change since {since}" if since else f"{source}: no change is asked for")
            continue
        options = SuiteBuild(references=[source], out=folder, settings=settings or _settings_of(last))
        await _follow(history, newer, options, provider, say)


async def fetch(folder: Path, provider: SandboxProvider, *, say: Say) -> int:
    """Make the tasks of a suite again from its records; returns how many were made.

    Raises :class:`~etude.errors.DamagedError` for a history that has other files than when a task was validated.
    """
    store, made = ImageStore(folder / IMAGES), 0
    missing = [each for each in read_records(folder) if not _task_file(folder, each).exists()]
    missing.sort(key=lambda each: (each.source, each.before, each.after))
    for source, of_source in groupby(missing, key=lambda each: each.source):
        records, history = list(of_source), open_history(source, folder / ARCHIVES)
        await asyncio.to_thread(history.gather, (name for each in records for name in (each.before, each.after)))
        needs = await _prepare_again(history, records[0].package, folder, provider, say)
        for (before, after), group in groupby(records, key=lambda each: (each.before, each.after)):
            change, of_change = Change(before=before, after=after, subject="", day=records[0].day), list(group)
            with tempfile.TemporaryDirectory(prefix="etude-change-", ignore_cleanup_errors=True) as scratch:
                trees = await asyncio.to_thread(read_change, history, change, Path(scratch))
                image = await asyncio.to_thread(add_image, trees, store, needs)
                for record in of_change:
                    _make(record, trees, image, PackageFolder(folder / record.package))
            made += len(of_change)
            say(f"{source} {before}..{after}: {len(of_change)} tasks")
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """Effect of a refresh on the tasks that a suite had."""

    retired: Mapping[str, Retirement]
    """Tasks that are no longer tried."""
    difficulties: Mapping[str, tuple[str, str]]
    """Id → difficulty before and now, for tasks whose pass rate has changed it."""

    def lines(self) -> list[str]:
        """The changes in words, one line per task."""
        return [
            *(f"{task_id} retired: {each.reason}" for task_id, each in self.retired.items()),
            *(f"{task_id} is {now}, was {before}" for task_id, (before, now) in self.difficulties.items()),
        ]


def refresh(
    folder: Path, results: Sequence[SuiteResults], traces: Traces | None, *, max_share: float, day: str
) -> Upkeep:
    """Retire tasks that measure nothing any more, set the difficulty of the others, and give the suite a new version if
    any was retired; returns which.
    """
    tries: dict[str, list[bool]] = {}
    for each in (attempt for one in results for attempt in one.tries):
        tries.setdefault(each.task_id, []).append(each.passed)
    made, shares = gather_tries(tries), {each.task_id: each.share for each in (traces.tasks if traces else ())}
    records, retired = read_records(folder), read_retired(folder)
    ids = [record.task_id for record in records] or sorted({*made, *shares})
    reasons = {task_id: reason_to_retire(made.get(task_id), shares.get(task_id, 0.0), max_share) for task_id in ids}
    now = {
        task_id: Retirement(date=day, reason=reason)
        for task_id, reason in reasons.items()
        if reason and task_id not in retired
    }
    after = [replace(each, difficulty=difficulty_of(made.get(each.task_id), each.difficulty)) for each in records]
    if records and after != records:
        write_records(folder, after)
    if now:
        write_retired(folder, retired | now)
        set_version(folder, day)
    changed = zip(records, after, strict=True)
    levels = {old.task_id: (old.difficulty, new.difficulty) for old, new in changed if old.difficulty != new.difficulty}
    return Upkeep(retired=now, difficulties=levels)


def in_use(folder: Path) -> list[HistoryRecord]:
    """The records of a suite's tasks that are not retired."""
    retired = read_retired(folder)
    return [record for record in read_records(folder) if record.task_id not in retired]


def today() -> str:
    """The day, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def set_version(folder: Path, day: str) -> None:
    """Write a day, ISO 8601, as the version into ``suite.toml``, and nothing else."""
    file = folder / SUITE_FILE
    lines = [
        f'version = "{day.replace("-", ".")}"' if line.startswith("version =") else line
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")


def traces_in(folder: Path, texts: Path) -> Traces:
    """Traces of a suite of repository tasks in a folder of texts: of prompts, hidden tests and answers.

    Raises :class:`~etude.errors.ConfigError` for a folder that is not there.
    """
    if not texts.is_dir():
        raise ConfigError(f"no folder of texts at {str(texts)!r}")
    family = RepositoryTasks(folder)
    text_of: dict[str, str] = {}
    for task in _every_task(family):
        assert isinstance(task.checks, TestChecks)
        answer = family.answer(task)
        text_of[task.task_id] = "\n".join((task.prompt, *task.checks.files.values(), *answer.values()))
    return find_traces(text_of, suite_of(folder).canary, texts)


def halves_of(folder: Path) -> list[HalfTest]:
    """Hidden tests of a suite of repository tasks, cut in two.

    Raises :class:`~etude.errors.ConfigError` for a suite that has none of some length.
    """
    packages = {record.task_id: record.package for record in read_records(folder)}
    halves = half_tests(_every_task(RepositoryTasks(folder)), packages)
    if not halves:
        raise ConfigError(f"{folder} has no hidden test in Python with {LEAST_WORDS} words in its second half")
    return halves


def counted(records: Iterable[HistoryRecord]) -> str:
    """Some records in a line: tasks, behaviours, packages, difficulties."""
    every = list(records)
    levels = Counter(each.difficulty for each in every)
    return (
        f"{len(every)} tasks, {len({each.template for each in every})} behaviours of "
        f"{len({each.package for each in every})} packages: "
        + ", ".join(f"{levels[level]} {level}" for level in ("easy", "medium", "hard"))
    )


async def _follow(
    history: History, changes: Sequence[Change], options: SuiteBuild, provider: SandboxProvider, say: Say
) -> None:
    """Try some changes of a history, newest first, and note how far it was followed."""
    out, source, settings = options.out, history.reference, options.settings
    store = ImageStore(out / IMAGES)
    await asyncio.to_thread(history.gather, (name for each in changes for name in (each.after, each.before)))
    needs, folder = await _prepare(history, changes[0].after, store, options, provider, say)
    grader = HiddenTestGrader(provider, store)
    grading = Grading(guarded=grader.guarded, is_right=partial(_is_right, grader, provider, store))
    validator = ChangeValidator(history, provider, store, folder, needs=needs, grading=grading)
    await _try_changes(validator, changes, folder, out, say)
    progress = read_progress(out)
    last, outcomes = progress.get(source), {each.candidate_id: each.outcome for each in folder.verdicts()}
    failed = [change for change in changes if outcomes[change.candidate_id] == Rejection.FAILED]
    newest = newest_tried(changes, failed) or (last.newest if last else "")
    now = HistoryProgress(newest=newest, day=today(), base=settings.base, before=settings.before)
    write_progress(out, progress | {source: now})
    counts = Counter(outcomes[change.candidate_id] for change in changes)
    since = f", the last time up to {last.newest} on {last.day}" if last else ""
    verdicts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    say(f"{source}: {len(changes)} changes{since}: {verdicts}")


async def _is_right(
    grader: HiddenTestGrader, provider: SandboxProvider, store: ImageStore, task: Task, files: Mapping[str, str]
) -> bool:
    """True if an agent that writes some files and submits would be graded as right.

    Raises :class:`~etude.errors.SandboxError`.
    """
    assert task.environment is not None
    sandbox = await provider.create({}, sandbox_spec(task.environment, store.open(task.environment.image)))
    try:
        for path, text in files.items():
            await sandbox.write_file(path, text)
        grade = await grader.grade(task, sandbox, HarnessResult(reason=SUBMITTED, counts={}))
    finally:
        await sandbox.close()
    return grade.value == 1.0


async def _prepare(
    history: History, newest: str, store: ImageStore, options: SuiteBuild, provider: SandboxProvider, say: Say
) -> tuple[Dependencies, PackageFolder]:
    """The dependencies of a history's newest tree, and the folder of its package."""
    with tempfile.TemporaryDirectory(prefix="etude-build-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        tree = await asyncio.to_thread(history.tree, newest, scratch / "source")
        texts = await asyncio.to_thread(read_texts, tree)
        project = read_project(texts)
        folder = PackageFolder(options.out / bare_name(project.name))
        preparation = Preparation(provider, store, folder, options.settings)
        layer = await preparation.site(tree, project, texts, scratch, say=say)
        return Dependencies(layer=layer, base=options.settings.base), folder


async def _prepare_again(
    history: History, package: str, folder: Path, provider: SandboxProvider, say: Say
) -> Dependencies:
    """The dependencies that a history's tasks were proved with: those that its package's folder names; without that,
    what its newest tree needs today.
    """
    last, store = read_progress(folder).get(history.reference), ImageStore(folder / IMAGES)
    settings = _settings_of(last)
    newest = last.newest if last else (await asyncio.to_thread(history.changes, 1))[0].after
    with tempfile.TemporaryDirectory(prefix="etude-build-", ignore_cleanup_errors=True) as name:
        texts = read_texts(await asyncio.to_thread(history.tree, newest, Path(name) / "source"))
        preparation = Preparation(provider, store, PackageFolder(folder / package), settings)
        layer = await preparation.site_again(read_project(texts), texts, Path(name))
    if layer is not None:
        return Dependencies(layer=layer, base=settings.base)
    options = SuiteBuild(references=[history.reference], out=folder, settings=settings)
    return (await _prepare(history, newest, store, options, provider, say))[0]


async def _try_changes(
    validator: ChangeValidator, changes: Sequence[Change], folder: PackageFolder, out: Path, say: Say
) -> None:
    """Try the changes that have no verdict yet, two at a time."""
    canary = suite_of(out).canary
    done = {verdict.candidate_id for verdict in folder.verdicts() if verdict.outcome != Rejection.FAILED}
    waiting = [change for change in reversed(changes) if change.candidate_id not in done]

    async def work() -> None:
        while waiting:
            change = waiting.pop()
            verdicts, records = await validator.validate(change)
            if records:
                marked = [replace(record, canary=canary, added=today()) for record in records]
                write_records(out, [*read_records(out), *marked])
                set_version(out, today())
            for verdict in verdicts:  # behind the records: a change with verdicts is not tried again
                folder.record(verdict)
                say(f"{len(waiting)} wait · {verdict.candidate_id[-24:]} {verdict.path or verdict.target}: "
                    f"{verdict.outcome} {verdict.detail[:120]}".rstrip())  # fmt: skip

    async with asyncio.TaskGroup() as group:
        for _ in range(WORKERS):
            group.create_task(work())


def _settings_of(last: HistoryProgress | None) -> Settings:
    """The settings by which a history was tried last."""
    return Settings() if last is None else Settings(base=last.base, before=last.before)


def _every_task(family: RepositoryTasks) -> list[Task]:
    return [task for side in Split for task in family.tasks(side)]


def _task_file(folder: Path, record: HistoryRecord) -> Path:
    return folder / record.package / "tasks" / f"{record.task_id}.json"


def _make(record: HistoryRecord, trees: ChangeTrees, image: Image, package: PackageFolder) -> None:
    """Write the task of a record. Raises :class:`~etude.errors.DamagedError` for trees that it cannot be made of."""
    part = trees.slice(record.path, record.name)
    if part is None:
        raise DamagedError(
            f"task {record.task_id}: {record.name} cannot be cut out of {record.source} "
            f"{record.before}..{record.after} any more: take it out of the suite, or build it again"
        )
    package.add(task_of(record, trees, part, image), texts_of(part))


def _write_suite_file(options: SuiteBuild) -> None:
    """Write ``suite.toml`` where there is none."""
    file = options.out / SUITE_FILE
    if file.exists():
        return
    suite = {
        "name": options.name or options.out.resolve().name,
        "version": today().replace("-", "."),
        "description": f"Changes in the history of {', '.join(map(_short, options.references))}.",
        "licence": options.licence,
        "canary": f"etude-canary-{uuid.uuid4()}",
        "tasks": {"family": "repository", "options": {"unprobed": True}},
    }
    file.write_text(tomli_w.dumps(suite), encoding="utf-8")
    (options.out / ".gitignore").write_text(IGNORED, encoding="utf-8")
    suite_of(options.out)  # its name and the like are fit for one


def _short(reference: str) -> str:
    return reference if reference.startswith("pypi:") else Path(reference).resolve().name
