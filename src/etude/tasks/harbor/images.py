"""From a task's ``environment/`` to the image that its sandboxes are made from.

    Dockerfile ───────────▶ podman ─┐
    environment.docker_image ───────┤   images of services are added to the same image
    compose: services.*.image ──────┴─▶ ImageStore (:mod:`etude.sandboxes.images.containers`)

The image is stored under a digest of all its inputs, so a folder is built once; a tag that moves later is not looked up
again. A Dockerfile that only copies text files into the working folder needs no image: they become the task's files.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from etude.aio import gather_or_cancel
from etude.errors import ConfigError, SandboxError
from etude.sandbox_spec import Image
from etude.sandboxes.images.containers import add_image, add_services
from etude.sandboxes.images.layers import digest_tree
from etude.sandboxes.images.store import ImageStore
from etude.tasks.harbor.folder import LEFT_OUT, HarborTask, is_program
from etude.tasks.harbor.settings import TaskFolderError
from etude.types import Split

OWN_USERS = (None, "agent", 1000, "1000")
"""Users that agents may have in the provider's own base system."""
VERSION = "2"
"""Version of the build procedure; part of image names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builds:
    """Results of building the images of many tasks."""

    images: Mapping[str, Image]
    """Task name → its image, without a digest if the task needs none."""
    refused: Mapping[str, str]
    """Task name → reason why there is no image."""


def build_image(task: HarborTask, store: ImageStore) -> Image:
    """The image of a task, built or fetched if necessary; blocks, so do not call it in an event loop.

    Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` for an image that does not fit the task, and the
    errors of :func:`~etude.sandboxes.images.containers.add_image`.
    """
    image = find_image(task, store)
    if image is None:
        settings = task.settings.environment
        source = str(task.context) if (task.context / "Dockerfile").is_file() else f"docker://{settings.docker_image}"
        name, workdir, user = image_name(task), settings.workdir or "", str(task.settings.agent.user or "")
        timeout_s, services = settings.build_timeout_sec, task.services.orders
        try:
            own = "" if services else name
            image = add_image(store, source, name=own, workdir=workdir, user=user, timeout_s=timeout_s)
            if services:
                image = add_services(store, image, services, name=name, timeout_s=timeout_s)
        except TimeoutError as error:
            raise TaskFolderError(f"{error}; raise environment.build_timeout_sec") from error
    task.task(Split.TRAIN, image=image)  # validates the working folder
    return image


async def build_images(tasks: Sequence[HarborTask], store: ImageStore, *, parallel: int = 2) -> Builds:
    """Build the images of many tasks, equal ones once; a task whose build fails is set aside with the reason."""
    images: dict[str, Image] = {}
    refused: dict[str, str] = {}
    gate = asyncio.Semaphore(parallel)
    locks: dict[str, asyncio.Lock] = {}

    async def one(task: HarborTask) -> None:
        try:
            async with locks.setdefault(image_name(task), asyncio.Lock()), gate:
                images[task.name] = await asyncio.to_thread(build_image, task, store)
        except (TaskFolderError, ConfigError, SandboxError) as error:
            refused[task.name] = f"{type(error).__name__}: {error}"

    await gather_or_cancel(map(one, tasks))
    return Builds(images=images, refused=refused)


def find_image(task: HarborTask, store: ImageStore) -> Image | None:
    """A task's image in a store, without a digest if the task needs none; ``None`` if it is not built."""
    if plain_files(task) is not None:
        return Image()
    try:
        return store.open(image_name(task))
    except ConfigError:
        return None


def plain_files(task: HarborTask) -> Mapping[str, str] | None:
    """The task's files if its Dockerfile only copies text into the working folder; else ``None``."""
    files: dict[str, str] = {}
    for *sources, target in task.plain.copies if task.plain else ():
        texts = _plain_copy(task, sources, target)
        if texts is None:
            return None
        files |= texts
    is_plain = task.plain and task.settings.agent.user in OWN_USERS and not (task.context / ".dockerignore").exists()
    return files if is_plain and not task.services.orders else None


def image_name(task: HarborTask) -> str:
    """The name of a task's image: a digest of all its inputs."""
    settings = task.settings.environment
    context = digest_tree(task.context, owned=()) if task.context.is_dir() else ""
    parts = (VERSION, context, settings.docker_image, settings.workdir, task.settings.agent.user)
    return f"harbor-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def _plain_copy(task: HarborTask, sources: Sequence[str], target: str) -> dict[str, str] | None:
    """The files of one COPY, relative to the working folder; ``None`` if it does more than copy text there."""
    assert task.plain is not None, "only of a plain Dockerfile are single copies known"
    folder = PurePosixPath(task.plain.workdir)
    whole = folder / target
    if ".." in whole.parts or not whole.is_relative_to(folder):
        return None
    inner = whole.relative_to(folder)
    texts: dict[str, str] = {}
    for name in sources:
        source = task.context / name.lstrip("/")
        if ".." in PurePosixPath(name).parts or not source.exists():
            return None
        single = len(sources) == 1 and not target.endswith("/") and inner.parts
        names = (
            {file: file.relative_to(source) for file in source.rglob("*")}
            if source.is_dir()
            else {source: PurePosixPath("" if single else source.name)}
        )
        for file, path in names.items():
            if LEFT_OUT.search(file.relative_to(task.context).as_posix()) or _is_folder(file):
                continue
            text = _plain_text(file)
            if text is None:
                return None
            texts[str(inner / path)] = text
    return texts


def _is_folder(file: Path) -> bool:
    return file.is_dir() and not file.is_symlink() and any(file.iterdir())


def _plain_text(file: Path) -> str | None:
    """The text of a plain, non-executable UTF-8 file; else ``None``."""
    if file.is_symlink() or not file.is_file() or is_program(file):
        return None
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        return None
