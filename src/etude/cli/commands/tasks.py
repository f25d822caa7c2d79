"""`etude tasks`: builds tasks from a repository; verifies, lists and exports tasks.

A task that cannot be made or verified is named with its reason and set aside; the rest goes on.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from etude.cli.commands.build_tasks import SOUND, BuildOptions, BuildReport, build, check
from etude.cli.commands.sandboxes import OUT, SandboxUrl, log, opened_provider, sandbox_config
from etude.cli.options import All, Json, Split, group
from etude.config.loading import is_recipe, load_recipe
from etude.config.recipe import RunConfig
from etude.config.tasks import MachineKind, SandboxConfig, TaskConfig
from etude.dashboard.formatting import visible
from etude.errors import ConfigError, ExitCode
from etude.protocols import TaskFamily
from etude.rewards.graders.script import ScriptGrader
from etude.run.task_families import open_family
from etude.run.task_sandboxes import image_store
from etude.sandboxes.images.store import ImageStore
from etude.taskgen.fidelity.audit import audit, render, to_json
from etude.taskgen.fidelity.sessions import read_sessions
from etude.taskgen.harbor.export import export_task, folder_of
from etude.taskgen.harbor.soundness import SoundnessCheck
from etude.taskgen.installer import InstallerOptions
from etude.taskgen.preparation import Settings
from etude.taskgen.verdicts import Rejection
from etude.tasks.harbor.family import HELDOUT_ONE_IN, read_tasks, side_of
from etude.tasks.harbor.features import markdown
from etude.tasks.harbor.folder import SETTINGS
from etude.tasks.harbor.images import build_images
from etude.tasks.harbor.settings import TaskFolderError
from etude.tasks.repositories.folder import RepositoryTasks
from etude.types import AnswerChecks, Checks, FunctionChecks, NamedChecks, QueryChecks, ScriptChecks, Task, TestChecks
from etude.types import Split as Side

SOLVE = """#!/bin/bash
cp -r "$(dirname "$0")/files/." .
"""
"""Script of a solution: runs in the working folder."""
UNLESS_SAID = f", with tasks.heldout_every = {HELDOUT_ONE_IN}"
"""Condition of the sides of Harbor's tasks, which a folder alone does not settle."""
Sandbox: TypeAlias = Annotated[MachineKind, typer.Option(help="Where commands run.")]

app = group()


@app.command("build")
def build_command(
    repository: Annotated[str, typer.Argument(help="A folder, a git URL, an archive, or pypi:NAME==VERSION.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of tasks; a second build continues it.")] = Path("tasks"),
    limit: Annotated[int, typer.Option(help="Tasks to make of it, at most.")] = 100,
    base: Annotated[str, typer.Option(help="Stored base system (default: the sandboxes' own).")] = "",
    before: Annotated[str, typer.Option(metavar="DATE", help="Install nothing that was published later.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of bugs and of the order of tests.")] = 0,
    unprobed: Annotated[bool, typer.Option("--unprobed", help="Also make tasks that have no probe.")] = False,
    installer: Annotated[
        str,
        typer.Option(metavar="URL", help="An OpenAI-compatible API; its model installs packages that need more work."),
    ] = "",
    model: Annotated[str, typer.Option(help="Model of the installer; its key is in ETUDE_INSTALLER_KEY.")] = "",
    sandbox: Sandbox = "ns",
    sandbox_url: SandboxUrl = "",
    as_json: Json = False,
) -> None:
    """Build tasks from a repository: deleted features and planted bugs."""
    if bool(installer) != bool(model):
        raise ConfigError("--installer and --model go together: give the URL of the API and the name of the model")
    key = os.environ.get("ETUDE_INSTALLER_KEY", "")
    options = BuildOptions(
        reference=repository,
        out=out,
        limit=limit,
        unprobed=unprobed,
        settings=Settings(base=base, before=before, seed=seed),
        installer=InstallerOptions(url=installer, model=model, api_key=key) if installer else None,
    )
    report = asyncio.run(_build(options, sandbox_config(sandbox, sandbox_url)))
    if as_json:
        OUT.out(json.dumps(asdict(report), indent=1))
        return
    OUT.out(f"{report.package} {report.version}: {report.kept} tasks of {report.tried} candidates")
    for outcome, count in report.outcomes.items():
        OUT.out(f"{count:>6} {outcome}{meaning_of(outcome)}")
    OUT.out(f'train on them with tasks.family = "repository" and tasks.folder = "{out}"')


@app.command("check")
def check_command(
    folder: Annotated[Path | None, typer.Argument(help="Tasks built from repositories, or in Harbor's format.")] = None,
    *,
    fidelity: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="PRODUCTION SIMULATED", help="Measure how well two files of sessions can be told apart."),
    ] = None,
    sandbox: Sandbox = "ns",
    sandbox_url: SandboxUrl = "",
    every: All = False,
    as_json: Json = False,
) -> int:
    """Verify tasks again, or compare simulated sessions with recorded ones of production."""
    if folder is not None and fidelity is None:
        checking = _check_harbor if _is_harbor(folder) else _check_repository
        return (
            0
            if asyncio.run(checking(folder, sandbox_config(sandbox, sandbox_url), every, as_json))
            else ExitCode.USER_ERROR
        )
    if fidelity is None or folder is not None:
        raise ConfigError("check what? give a folder of tasks, or --fidelity PRODUCTION SIMULATED")
    production, simulated = fidelity
    report = audit(read_sessions(production), read_sessions(simulated))
    OUT.out(json.dumps(to_json(report), indent=1) if as_json else render(report), highlight=False)
    return 0


@app.command("ls")
def list_tasks(
    source: Annotated[Path, typer.Argument(help="A recipe, or a folder of tasks.")],
    *,
    split: Split = "train",
    count: Annotated[int, typer.Option(help="Number of tasks.")] = 3,
) -> None:
    """Print some training or held-out tasks, and the number of both."""
    if is_recipe(source):
        lines = _task_lines(load_recipe(source), split, count)
    elif _is_harbor(source):
        lines = _harbor_lines(source, split, count)
    else:
        lines = _repository_lines(source, split, count)
    text = "\n".join(lines)
    print(visible(text) if sys.stdout.isatty() else text)


@app.command("features")
def list_features() -> None:
    """Print the features of Harbor's format, and whether étude supports each."""
    print(markdown(), end="")


@app.command("export")
def export_command(
    source: Annotated[Path, typer.Argument(help="A recipe, or a folder of tasks built from repositories.")],
    out: Annotated[Path, typer.Argument(help="Folder in which a folder is made for each task.")],
    *,
    split: Split = "train",
    count: Annotated[int, typer.Option(help="Number of tasks.")] = 10,
) -> int:
    """Write tasks in Harbor's format; a task built from a repository includes its solution in ``solution/``."""
    if is_recipe(source):
        config = load_recipe(source)
        family, images = open_family(config), image_store(config.sandboxes, config.tasks)
        tasks = list(_first(family, Side(split), count))
        answer = None
    else:
        repository = RepositoryTasks(source)
        tasks, images = list(repository.tasks(Side(split)))[:count], ImageStore(repository.images)
        answer = repository.answer
    refused = 0
    for task in {task.task_id: task for task in tasks}.values():
        try:
            export_task(task, folder_of(task, out), images=images, solution=_solution(answer(task)) if answer else None)
        except TaskFolderError as error:
            refused += 1
            log(f"{task.task_id}: set aside: {error}")
    log(f"{len(tasks) - refused} tasks in {out}")
    return ExitCode.USER_ERROR if refused else 0


def _harbor_lines(folder: Path, split: str, count: int) -> Iterator[str]:
    """The first ``count`` tasks of a side in a folder of Harbor's, by name, and those that cannot be read."""
    reading = read_tasks(folder)
    sides = {task.name: side_of(task) for task in reading.tasks}
    for task in [task for task in reading.tasks if sides[task.name] == split][:count]:
        yield f"{split} {task.name}: {task.instruction.splitlines()[0]}"
    yield from (f"set aside: {name}: {reason}" for name, reason in reading.refused.items())
    yield _sides(Counter(sides.values())) + UNLESS_SAID


def _repository_lines(folder: Path, split: str, count: int) -> Iterator[str]:
    """The first ``count`` tasks of a side in a folder that was built from repositories."""
    tasks = RepositoryTasks(folder)
    for task in tasks.tasks(Side(split))[:count]:
        yield f"── {split} {task.task_id} {task.template}\n{task.prompt}\n"
    yield _sides({side: len(tasks.tasks(side)) for side in Side})


def _sides(sizes: Mapping[Side, int | None]) -> str:
    """Number of tasks on each side of the hold-out."""
    train, heldout = (
        "no end of" if size is None else f"{size:,}"
        for size in (sizes.get(side, 0) for side in (Side.TRAIN, Side.HELDOUT))
    )
    return f"{train} training tasks, {heldout} held-out tasks"


def _task_lines(config: RunConfig, split: str, count: int) -> Iterator[str]:
    """The first ``count`` tasks of a split: prompt, files, and in a line what is asked for."""
    family = open_family(config)
    for index, task in enumerate(_first(family, Side(split), count)):
        yield f"── {split} task {index}, {task.task_id}: {task.template}"
        yield task.prompt
        for path, text in task.files.items():
            yield f"{path}:"
            yield from (f"  {line}" for line in text.splitlines())
        yield _example(task.checks)
    yield _sides({side: family.size(side) for side in Side})


def _first(family: TaskFamily, side: Side, count: int) -> Iterator[Task]:
    """The first ``count`` tasks of a side, or all of fewer."""
    size = family.size(side)
    return (family.task(side, index) for index in range(count if size is None else min(count, size)))


def _example(checks: Checks) -> str:
    """A task in a line."""
    match checks:
        case FunctionChecks():
            case = checks.visible[0]
            return f"  {checks.function}{case.arguments} should be {case.expected!r}\n"
        case TestChecks():
            return f"  {checks.about} tests should pass, such as {checks.must_pass[0]}\n"
        case ScriptChecks():
            return f"  {' '.join(checks.command)} should give a reward\n"
        case QueryChecks():
            return f"  {checks.queries[0].sql} should give {[list(row) for row in checks.queries[0].rows]!r}\n"
        case AnswerChecks():
            return f"  the answer should be {checks.answer!r}\n"
        case NamedChecks():
            return f"  graded by {checks.grader} with {json.dumps(checks.options)}\n"


def _solution(answer: Mapping[str, str]) -> dict[str, str]:
    """The files below ``solution/``: those of an answer, and the script that puts them in their places."""
    return {"solve.sh": SOLVE} | {f"files/{path}": text for path, text in answer.items()}


async def _build(options: BuildOptions, sandboxes: SandboxConfig) -> BuildReport:
    async with opened_provider(sandboxes) as provider:
        return await build(options, provider, say=log)


async def _check_repository(folder: Path, sandboxes: SandboxConfig, every: bool, as_json: bool) -> bool:
    async with opened_provider(sandboxes) as provider:
        results = await check(folder, provider, say=log if every else lambda _: None)
    if as_json:
        OUT.out(json.dumps([asdict(result) for result in results], indent=1))
    sound = sum(result.outcome == SOUND for result in results)
    for result in [] if every else results:
        if result.outcome != SOUND:
            log(
                f"{result.split} {result.task_id} {result.template}: {result.outcome} {result.detail}"
                f"{meaning_of(result.outcome)}"
            )
    log(f"{sound} of {len(results)} tasks are sound; {_sides(Counter(result.split for result in results))}")
    return sound == len(results)


def meaning_of(outcome: str) -> str:
    """The meaning of a rejection behind its name; empty for what explains itself."""
    return next((f" ({rejection.meaning})" for rejection in Rejection if rejection == outcome), "")


async def _check_harbor(folder: Path, sandboxes: SandboxConfig, every: bool, as_json: bool) -> bool:
    store = image_store(sandboxes, TaskConfig(family="harbor", folder=str(folder)))
    reading = read_tasks(folder)
    async with opened_provider(sandboxes) as provider:
        builds = await build_images(reading.tasks, store)
        results = await SoundnessCheck(provider, ScriptGrader(provider, store)).check_all(reading.tasks, builds)
    if as_json:
        OUT.out(json.dumps([asdict(result) for result in results], indent=1))
    for name, reason in reading.refused.items():
        log(f"{name}: set aside: {reason}")
    sides = {task.name: side_of(task) for task in reading.tasks}
    for result in results:
        if every or not result.is_sound:
            log(f"{sides[result.name]} {result.name}: {'sound' if result.is_sound else '; '.join(result.faults)}")
    sound = Counter(sides[result.name] for result in results if result.is_sound)
    total = len(results) + len(reading.refused)
    log(f"{sound.total()} of {total} tasks are sound; {_sides(sound)}{UNLESS_SAID}")
    return not reading.refused and all(result.is_sound for result in results)


def _is_harbor(folder: Path) -> bool:
    return (folder / SETTINGS).is_file() or any(folder.glob(f"*/{SETTINGS}"))
