"""From a task's ``environment/`` to the image that its sandboxes are made from, without Docker.

    FROM ──mapped──▶ base system ──sandbox as root──▶ COPY, RUN … ──snapshot──▶ layers ──▶ ImageStore

The result is kept under a digest of all that decides it, so a folder is built once. A Dockerfile that only puts text
files into the working folder needs no image at all: they are the task's files. Owns the mapping, the recipe's steps in
a sandbox and the name of the result; what a Dockerfile may say is :mod:`etude.tasks.harbor.dockerfile`'s.
"""

import asyncio
import hashlib
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from etude.aio import gather_or_cancel
from etude.errors import ConfigError, SandboxError
from etude.protocols import Sandbox, SandboxProvider
from etude.sandbox_spec import Image, SandboxLimits, SandboxSpec
from etude.sandboxes.images.layers import HOME
from etude.sandboxes.images.store import ImageStore
from etude.tasks.harbor.dockerfile import Copy, Dockerfile, ImageFolder, RunInstruction, Step
from etude.tasks.harbor.folder import LEFT_OUT, HarborTask, digest_files, is_program
from etude.tasks.harbor.settings import TaskFolderError

OWN_BASE: Mapping[str, str] = MappingProxyType({"debian*": "", "ubuntu*": "", "python*": ""})
"""Images that the provider's own base system stands for. That it is near enough is for a task's solution to show."""
CONTEXT = "/mnt/etude-context"
"""Folder of a build's context, inside."""
BUILD_LIMITS = SandboxLimits(memory_bytes=4 << 30, disk_bytes=10 << 30, processes=512, cpus=2.0)
"""Compilers and package managers are larger than what is run afterwards."""
GRACE_S = 60.0
"""Seconds that a sandbox may live longer than its build."""
TAIL_CHARACTERS = 2000
"""Characters of a failed command's output, in the error."""
VERSION = "1"
"""Version of how images are built; part of their names."""
IN_FOLDER = 'mkdir -p -- "$0" && cd -- "$0" && exec "$@"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Builds:
    """Outcomes of building the images of many tasks."""

    images: Mapping[str, str]
    """Task name → digest of its image; empty for one that needs none."""
    refused: Mapping[str, str]
    """Task name → why there is no image."""


class HarborImages:
    """Builds images of tasks in sandboxes and finds them again."""

    def __init__(
        self,
        store: ImageStore,
        sandboxes: SandboxProvider,
        *,
        bases: Mapping[str, str] = OWN_BASE,
        allow: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``sandboxes`` stay the caller's to close, and must be capable of ``SNAPSHOT``.

        ``bases`` says which base system stands for which image of a registry (patterns as in shells, the first that
        fits; the empty name is the provider's own). ``allow`` and ``environment`` are a build's only: how it gets to
        package indices.
        """
        self._store = store
        self._sandboxes = sandboxes
        self._bases = dict(bases)
        self._allow = allow
        self._environment = dict(environment or {})

    async def build(self, task: HarborTask) -> str:
        """The digest of a task's image, built if need be; empty if it needs none.

        Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` with line, command and log of what failed,
        :class:`~etude.errors.ConfigError` for a base system that is not stored, and
        :class:`~etude.errors.SandboxError`.
        """
        matches = await asyncio.to_thread(find_image, task, self._store, self._bases)
        if matches is not None:
            return matches
        base = base_of(task, self._bases)
        if base and base not in self._store.bases:
            raise ConfigError(
                f"{task.folder} needs the base system {base!r}, {self._store.folder} has {list(self._store.bases)}: "
                f"build it with `etude images build {base}`"
            )
        if task.dockerfile is None or not task.dockerfile.steps:
            image = self._store.add((), base=base, workdir=task.workdir, name=image_name(task, base))
            return image.digest
        with tempfile.TemporaryDirectory(prefix="etude-context-") as folder:
            context = Path(folder) / "context"
            await asyncio.to_thread(stage_context, task.context, context)
            await asyncio.to_thread(Path(folder).chmod, 0o755)
            return await self._build(task, task.dockerfile, base, context)

    async def build_all(self, tasks: Sequence[HarborTask], *, parallel: int = 2) -> Builds:
        """Build the images of many tasks, equal ones once; a task whose image fails is set aside with the reason."""
        images: dict[str, str] = {}
        refused: dict[str, str] = {}
        gate = asyncio.Semaphore(parallel)
        locks: dict[str, asyncio.Lock] = {}

        async def one(task: HarborTask) -> None:
            try:
                lock = locks.setdefault(image_name(task, base_of(task, self._bases)), asyncio.Lock())
                async with lock, gate:
                    images[task.name] = await self.build(task)
            except (TaskFolderError, ConfigError, SandboxError) as error:
                refused[task.name] = f"{type(error).__name__}: {error}"

        await gather_or_cancel(map(one, tasks))
        return Builds(images=images, refused=refused)

    async def _build(self, task: HarborTask, dockerfile: Dockerfile, base: str, context: Path) -> str:
        timeout_s = task.settings.environment.build_timeout_sec
        spec = SandboxSpec(
            image=Image(base=base, workdir=task.workdir),
            limits=BUILD_LIMITS,
            allow=self._allow,
            mounts={CONTEXT: context},
            environment=self._environment,
            user="root",
            ttl_s=timeout_s + GRACE_S,
        )
        sandbox = await self._sandboxes.create({}, spec)
        try:
            left_s = timeout_s
            for step in (*dockerfile.steps, ImageFolder(path=task.workdir)):
                left_s -= await _play(step, sandbox, task, context, left_s)
            built = await sandbox.snapshot()
        finally:
            await sandbox.close()
        layers = [await asyncio.to_thread(self._add_layer, layer, task.workdir) for layer in built.layers]
        image = self._store.add(
            layers,
            base=base,
            environment=dockerfile.environment,
            workdir=task.workdir,
            name=image_name(task, base),
        )
        return image.digest

    def _add_layer(self, layer: Path, workdir: str) -> str:
        """Everything in the working folder becomes the agent's."""
        return self._store.add_layer(layer, owned=(workdir, HOME))


def find_image(task: HarborTask, store: ImageStore, bases: Mapping[str, str] = OWN_BASE) -> str | None:
    """The digest of a task's image in a store, empty if it needs none; ``None`` if it has not been built.

    Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` when nothing stands for what it begins with.
    """
    base = base_of(task, bases)
    if not base and plain_files(task) is not None:
        return ""
    try:
        return store.open(image_name(task, base)).digest
    except ConfigError:
        return None


def base_of(task: HarborTask, bases: Mapping[str, str]) -> str:
    """The base system that stands for the image that a task begins with."""
    parent = task.dockerfile.parent if task.dockerfile else task.settings.environment.docker_image
    assert parent is not None, "a folder was read with neither Dockerfile nor image"
    for pattern, base in bases.items():
        if fnmatchcase(parent, pattern):
            return base
    raise TaskFolderError(
        f"{task.folder}: its world begins with the image {parent!r}, for which no base system stands: "
        f"the ones that are mapped are {list(bases)}"
    )


def plain_files(task: HarborTask) -> Mapping[str, str] | None:
    """The task's files, if all that its Dockerfile does is to put text into the working folder; else ``None``."""
    files: dict[str, str] = {}
    for step in task.dockerfile.steps if task.dockerfile else ():
        if isinstance(step, ImageFolder) and step.path == task.workdir:
            continue
        texts = _plain_copy(step, task) if isinstance(step, Copy) else None
        if texts is None:
            return None
        files |= texts
    return files


def stage_context(context: Path, target: Path) -> None:
    """Copy a build context without what is no part of it, readable by anybody: a sandbox's root is nobody here."""
    target.mkdir(mode=0o755)
    for source in sorted(context.rglob("*")):
        path = source.relative_to(context)
        copy = target / path
        if LEFT_OUT.search(path.as_posix()):
            continue
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        elif source.is_dir():
            copy.mkdir(mode=0o755)
        elif source.is_file():
            shutil.copyfile(source, copy)
            copy.chmod(0o755 if is_program(source) else 0o644)


def copy_script(step: Copy, sources: Mapping[str, bool]) -> str:
    """The shell commands of one COPY or ADD. ``sources`` are relative to the context; true for a folder.

    As in Docker, of a folder its contents are copied, and a target with a slash at its end is a folder.
    """
    target = shlex.quote(step.target)
    is_folder = step.target.endswith("/") or len(sources) > 1
    parent = shlex.quote(str(PurePosixPath(step.target).parent))
    lines = ["set -e", f"mkdir -p -- {parent}"]
    for path, folder in sources.items():
        source = shlex.quote(f"{CONTEXT}/{path}")
        if step.unpack:
            lines.append(f"mkdir -p -- {target} && tar -xf {source} -C {target} --no-same-owner")
            continue
        if folder or is_folder:
            lines.append(f"mkdir -p -- {target}")
        lines.append(f"cp -RP --preserve=mode -- {source}{'/.' if folder else ''} {target}")
        if step.mode:
            lines.append(_chmod(step, path, folder=folder))
    return "\n".join(lines)


def _chmod(step: Copy, path: str, *, folder: bool) -> str:
    mode, target = shlex.quote(step.mode), shlex.quote(step.target)
    if folder:
        source = shlex.quote(f"{CONTEXT}/{path}")
        return f"(cd {source} && find . -mindepth 1 ! -type l -print0) | (cd {target} && xargs -0 -r chmod {mode} --)"
    inner = shlex.quote(str(PurePosixPath(step.target) / PurePosixPath(path).name))
    return f"if [ -d {target} ]; then chmod {mode} -- {inner}; else chmod {mode} -- {target}; fi"


async def _play(step: Step, sandbox: Sandbox, task: HarborTask, context: Path, left_s: float) -> float:
    """Carry out one step and say how many seconds it took."""
    place = f"{task.context / 'Dockerfile'}"
    if isinstance(step, RunInstruction):
        what = f"{place}:{step.line}: RUN {step.argv[-1]!r}"
        argv, workdir, environment = step.argv, step.workdir, step.environment
    elif isinstance(step, Copy):
        what = f"{place}:{step.line}: copying {list(step.sources)} to {step.target}"
        argv = ("sh", "-c", copy_script(step, _matches(step, context, what)))
        workdir, environment = "/", {}
    else:
        what = f"{place}: making {step.path}"
        argv, workdir, environment = ("true",), step.path, {}
    if left_s <= 0:
        raise TaskFolderError(f"{what}: no time was left; raise environment.build_timeout_sec")
    result = await sandbox.exec(["sh", "-c", IN_FOLDER, workdir, *argv], timeout_s=left_s, environment=environment)
    if result.timed_out:
        raise TaskFolderError(f"{what}: not done after {result.seconds:.0f} s; raise environment.build_timeout_sec")
    if result.exit_code != 0:
        log = f"{result.stdout}\n{result.stderr}".strip()[-TAIL_CHARACTERS:]
        raise TaskFolderError(f"{what}: exit code {result.exit_code}\n{log}")
    return result.seconds


def _matches(step: Copy, context: Path, what: str) -> dict[str, bool]:
    """The files and folders of the context that a copy means, each with whether it is a folder."""
    matches: dict[str, bool] = {}
    for pattern in step.sources:
        plain = pattern.strip("/")
        paths = sorted(context.glob(plain)) if plain not in ("", ".") else [context]
        if not paths:
            raise TaskFolderError(f"{what}: there is no {pattern!r} in {context.name}/")
        matches |= {path.relative_to(context).as_posix(): path.is_dir() for path in paths}
    return matches


def _plain_copy(step: Copy, task: HarborTask) -> dict[str, str] | None:
    """The files of one COPY, relative to the working folder; ``None`` if it does more than to put text there."""
    target = PurePosixPath(step.target)
    if step.mode or step.unpack or not target.is_relative_to(task.workdir):
        return None
    inner = target.relative_to(task.workdir)
    texts: dict[str, str] = {}
    for pattern in step.sources:
        source = task.context / pattern
        if any(sign in pattern for sign in "*?[") or not source.exists():
            return None
        single = len(step.sources) == 1 and not step.target.endswith("/") and inner.parts
        names = (
            {file: file.relative_to(source) for file in source.rglob("*")}
            if source.is_dir()
            else {source: PurePosixPath("" if single else source.name)}
        )
        for file, name in names.items():
            if LEFT_OUT.search(file.relative_to(task.context).as_posix()) or _is_folder(file):
                continue
            text = _plain_text(file)
            if text is None:
                return None
            texts[str(inner / name)] = text
    return texts


def _is_folder(file: Path) -> bool:
    return file.is_dir() and not file.is_symlink() and any(file.iterdir())


def _plain_text(file: Path) -> str | None:
    """A file's text, if that is all there is to it."""
    if file.is_symlink() or not file.is_file() or is_program(file):
        return None
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        return None


def image_name(task: HarborTask, base: str) -> str:
    """The name of the image that is built of a task over a base system: a digest of all that decides it."""
    parts = (VERSION, base, digest_files(task.context) if task.context.is_dir() else "", task.workdir)
    return f"harbor-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"
