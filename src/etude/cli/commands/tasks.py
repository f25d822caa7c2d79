"""What stands behind `etude tasks|images|sandboxes`: tasks made and proved, machines kept and lent.

Owns the order of things and what people read of it. A task that cannot be made or proved is told with its reason and
set aside; the rest goes on.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from etude.cli.commands.build_tasks import SOUND, BuildOptions, BuildReport, build, check
from etude.config.loading import is_recipe, load_recipe
from etude.config.tasks import SandboxConfig, TaskConfig
from etude.errors import ConfigError
from etude.protocols import SandboxProvider
from etude.rewards.graders.script import ScriptGrader
from etude.run.serving import listening, run_until_signal
from etude.run.task_families import open_family
from etude.run.task_sandboxes import KEY_VARIABLE, base_store, image_store, open_provider
from etude.sandboxes.images.debian import BaseRecipe, build_base, open_base, remove_base
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.remote.principals import SandboxClient, parse_client, read_clients
from etude.sandboxes.remote.server import SandboxServer
from etude.taskgen.fidelity.audit import audit, render, to_json
from etude.taskgen.fidelity.probes import diff, probe, render_diff
from etude.taskgen.fidelity.sessions import read_sessions
from etude.taskgen.harbor.export import export_task
from etude.taskgen.harbor.soundness import SoundnessCheck
from etude.tasks.harbor.family import read_tasks
from etude.tasks.harbor.folder import SETTINGS
from etude.tasks.harbor.images import HarborImages
from etude.tasks.harbor.settings import TaskFolderError
from etude.tasks.repositories.folder import RepositoryTasks
from etude.types import Split

SOLVE = """#!/bin/bash
cp -r "$(dirname "$0")/files/." .
"""
"""Of a solution: runs in the working folder."""
OUT, PROGRESS = Console(), Console(stderr=True)
"""Where results go, and what is said on the way."""


def build_tasks(options: BuildOptions, sandboxes: SandboxConfig, *, as_json: bool) -> None:
    """Make tasks of a repository, with progress on stderr; an interrupted build goes on where it was."""
    report = asyncio.run(_build(options, sandboxes))
    if as_json:
        OUT.out(json.dumps(asdict(report), indent=1))
        return
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items()))
    OUT.out(f"{report.package} {report.version}: {report.kept} tasks of {report.tried} candidates ({outcomes})")
    OUT.out(f'practise them with tasks.family = "repository" and tasks.folder = "{options.out}"')


def check_tasks(folder: Path, sandboxes: SandboxConfig, *, as_json: bool) -> bool:
    """Prove the tasks of a folder, Harbor's or ours; whether all of them are sound."""
    checking = _check_harbor if _is_harbor(folder) else _check_repository
    return asyncio.run(checking(folder, sandboxes, as_json))


def audit_fidelity(production: Path, simulated: Path, *, as_json: bool) -> None:
    """Say how well sessions recorded in production and simulated ones can be told apart."""
    report = audit(read_sessions(production), read_sessions(simulated))
    OUT.out(json.dumps(to_json(report), indent=1) if as_json else render(report), highlight=False)


def probe_world(sandboxes: SandboxConfig, against: Path | None) -> bool:
    """Print what a sandbox says of itself, as JSON, or how that differs from what another one said; whether it does."""
    answers = asyncio.run(_probe(sandboxes))
    if against is None:
        OUT.out(json.dumps(answers, indent=1))
        return False
    differences = diff(_read_answers(against), answers)
    OUT.out(render_diff(differences), highlight=False)
    return bool(differences)


def folder_lines(folder: Path, split: str, count: int) -> list[str]:
    """The tasks of a folder, for people."""
    if _is_harbor(folder):
        reading = read_tasks(folder)
        found = [f"{task.name}: {task.instruction.splitlines()[0]}" for task in reading.tasks]
        return found[:count] + [f"set aside: {name}: {reason}" for name, reason in reading.refused.items()]
    tasks = RepositoryTasks(folder).tasks(Split(split))
    return [f"── {task.task_id} {task.template}\n{task.prompt}\n" for task in tasks[:count]]


def export_tasks(source: Path, out: Path, split: str, count: int) -> bool:
    """Write tasks of a recipe, or of a folder of ours, in Harbor's format below ``out``; whether all could be.

    A task built from a repository brings its answer as ``solution/``.
    """
    if is_recipe(source):
        config = load_recipe(source)
        family, images = open_family(config), image_store(config.sandboxes, config.tasks)
        tasks = [family.task(Split(split), index) for index in range(count)]
        answer = None
    else:
        repository = RepositoryTasks(source)
        tasks, images = list(repository.tasks(Split(split)))[:count], ImageStore(repository.images)
        answer = repository.answer
    refused = 0
    for task in {task.task_id: task for task in tasks}.values():
        try:
            export_task(task, out / task.task_id, images=images, solution=_solution(answer(task)) if answer else None)
        except TaskFolderError as error:
            refused += 1
            _say(f"{task.task_id}: set aside: {error}")
    _say(f"{len(tasks) - refused} tasks in {out}")
    return not refused


def build_images(name: str, packages: Sequence[str]) -> None:
    """Build a base system from Debian's packages."""
    base = build_base(ImageStore(), BaseRecipe(name=name, packages=tuple(packages)))
    OUT.out(f"{base.name}: {len(base.packages)} packages in {base.folder}")


def show_images() -> None:
    """List the base systems and images of this user."""
    store = ImageStore()
    table = Table("kind", "name", "digest", title=str(store.folder), title_justify="left")
    for name in store.bases:
        table.add_row("base", name, open_base(store, name).digest[:16])
    for stored in store.images:
        table.add_row("image", ", ".join(stored.names), stored.image.digest[:16])
    OUT.print(table)


def remove_images(name: str) -> None:
    """Remove a base system or an image, and layers that nothing stands on any more."""
    store = ImageStore()
    if name in store.bases:
        remove_base(store, name)
    else:
        store.remove(name)
    OUT.out(f"removed {name}, and {store.collect()} layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """How sandboxes are lent over HTTP."""

    sandboxes: SandboxConfig
    host: str
    port: int
    folders: tuple[Path, ...]
    """Folders below which clients may name mounts and layers."""
    allow: tuple[str, ...]
    """Places ``host:port`` that their sandboxes may reach."""
    clients: Path | None
    """A file that says who the clients are, and all of that for each; else there is one, with the key of the
    environment.
    """


def serve_sandboxes(lending: Lending) -> None:
    """Lend this machine's sandboxes until told to stop; without a key in the environment, one is made and shown."""
    run_until_signal(_serve(lending), cleanup_s=None)


def _solution(answer: Mapping[str, str]) -> dict[str, str]:
    """What goes below ``solution/``: the files of an answer, and the script that puts them in their places."""
    return {"solve.sh": SOLVE} | {f"files/{path}": text for path, text in answer.items()}


async def _probe(sandboxes: SandboxConfig) -> dict[str, str]:
    async with _provider(sandboxes) as provider:
        sandbox = await provider.create({})
        try:
            return await probe(sandbox)
        finally:
            await sandbox.close()


def _read_answers(file: Path) -> dict[str, str]:
    """What a world said. Raises :class:`~etude.errors.ConfigError` for a file that holds something else."""
    try:
        answers = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} holds no answers of `etude sandboxes probe`: {error}") from error
    if not isinstance(answers, dict) or not all(isinstance(answer, str) for answer in answers.values()):
        raise ConfigError(f"{str(file)!r} holds no answers of `etude sandboxes probe`: expected an object of strings")
    return answers


async def _build(options: BuildOptions, sandboxes: SandboxConfig) -> BuildReport:
    async with _provider(sandboxes) as provider:
        return await build(options, provider, say=_say)


async def _check_repository(folder: Path, sandboxes: SandboxConfig, as_json: bool) -> bool:
    async with _provider(sandboxes) as provider:
        results = await check(folder, provider, say=_say)
    if as_json:
        OUT.out(json.dumps([asdict(result) for result in results], indent=1))
    sound = sum(result.outcome == SOUND for result in results)
    _say(f"{sound} of {len(results)} tasks are sound")
    return sound == len(results)


async def _check_harbor(folder: Path, sandboxes: SandboxConfig, as_json: bool) -> bool:
    store = image_store(sandboxes, TaskConfig(family="harbor", folder=str(folder)))
    reading = read_tasks(folder)
    async with _provider(sandboxes) as provider:
        builds = await HarborImages(store, provider).build_all(reading.tasks)
        images = {digest: store.open(digest) for digest in builds.images.values() if digest}
        checking = SoundnessCheck(provider, ScriptGrader(provider, store), images=images)
        results = await checking.check_all(reading.tasks, builds)
    if as_json:
        OUT.out(json.dumps([asdict(result) for result in results], indent=1))
    for name, reason in reading.refused.items():
        _say(f"{name}: set aside: {reason}")
    for result in results:
        _say(f"{result.name}: {'sound' if result.is_sound else '; '.join(result.faults)}")
    return not reading.refused and all(result.is_sound for result in results)


async def _serve(lending: Lending) -> None:
    clients = _clients(lending)
    async with _provider(lending.sandboxes) as provider:
        server = SandboxServer(provider, clients)
        async with listening(server.app(), lending.port, host=lending.host) as port:
            _say(f"lending {lending.sandboxes.kind} sandboxes at http://{lending.host}:{port}")
            await asyncio.Event().wait()


def _clients(lending: Lending) -> dict[str, SandboxClient]:
    """The clients that may have sandboxes. Raises :class:`~etude.errors.ConfigError` for what cannot be meant."""
    images = ImageStore().open
    if lending.clients is not None:
        if lending.folders or lending.allow:
            raise ConfigError("--clients FILE says what each may name: write folders and allow there, or leave it out")
        return read_clients(lending.clients, images)
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    tree = {"key_sha256": digest, "allow": lending.allow, "folders": lending.folders}
    client = parse_client("etude sandboxes serve", tree, images)
    if not os.environ.get(KEY_VARIABLE):
        _say(f"{KEY_VARIABLE}={key}  (made for this server; set it to have your own)")
    return {"client": client}


@contextlib.asynccontextmanager
async def _provider(sandboxes: SandboxConfig) -> AsyncIterator[SandboxProvider]:
    provider = open_provider(sandboxes, base_store(sandboxes))
    try:
        yield provider
    finally:
        await provider.close()


def _is_harbor(folder: Path) -> bool:
    return (folder / SETTINGS).is_file() or any(folder.glob(f"*/{SETTINGS}"))


def _say(words: str) -> None:
    PROGRESS.out(words, highlight=False)
