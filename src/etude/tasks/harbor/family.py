"""A folder of Harbor tasks as training tasks, with a hold-out that is independent of the seed.

Reads every task folder once. A broken task, or one whose image is missing, is set aside with the reason, and the others
are used; a folder without a usable task is refused. Builds no images (:mod:`etude.tasks.harbor.images`).
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.config.section import Section
from etude.protocols import FamilyContext
from etude.sandbox_spec import Image
from etude.sandboxes.images.store import ImageStore
from etude.tasks.harbor.folder import HarborTask, read_task, task_folders
from etude.tasks.harbor.images import find_image, plain_files
from etude.tasks.harbor.settings import TaskFolderError
from etude.tasks.heldout import in_turns
from etude.types import Split, Task

logger = logging.getLogger(__name__)

IMAGES = "images"
"""Folder of images in the folder of the tasks."""
HELDOUT_ONE_IN = 6
"""One in this many templates is held out, by the hash of the name, unless a task names its side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderContents:
    """Contents of a folder of task folders."""

    tasks: tuple[HarborTask, ...]
    """By name."""
    refused: Mapping[str, str]
    """Name of a task's folder → why it was set aside."""


class HarborTasks:
    """The tasks of one folder; implements :class:`~etude.protocols.TaskFamily`."""

    @classmethod
    def open(cls, options: Section, context: FamilyContext) -> "HarborTasks":
        """The family of a recipe; its images are in the folder of the tasks or in the folder of base systems."""
        beside = context.folder / IMAGES
        images = ImageStore(beside if beside.is_dir() else context.images)
        harbor = cls(context.folder, images=images, heldout_every=context.heldout_every)
        for name, reason in harbor.refused.items():
            logger.warning("task %s is set aside: %s", name, reason)
        return harbor

    def __init__(
        self,
        folder: Path,
        *,
        images: ImageStore | None = None,
        heldout_every: int = HELDOUT_ONE_IN,
        offline: bool = False,
    ) -> None:
        """Read the tasks whose images are in the store; without ``images``, those that need none.

        Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` if no task is usable.
        """
        reading = read_tasks(folder, offline=offline)
        built, unbuilt = _find_images(reading.tasks, images)
        self.refused: Mapping[str, str] = {**reading.refused, **unbuilt}
        """Name of each task that was set aside → reason."""
        ready = [task for task in reading.tasks if task.name in built]
        if not ready:
            reasons = "\n  ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            raise TaskFolderError(f"{folder}: none of its tasks can be used\n  {reasons}")
        self._tasks = {split: _on_side(ready, split, heldout_every) for split in Split}
        self._tasks[Split.HELDOUT] = in_turns(self._tasks[Split.HELDOUT], lambda task: task.template)
        self._images = built

    def sources(self, split: Split) -> Sequence[HarborTask]:
        """The task folders on one side of the hold-out."""
        return self._tasks[split]

    def size(self, split: Split) -> int | None:
        """Number of tasks of a split."""
        return len(self._tasks[split])

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split, ordered by name; held-out tasks are in round-robin order over templates."""
        task = self._tasks[split][index]
        image = self._images[task.name]
        return task.task(split, image=image, files=None if image.digest else plain_files(task))


def read_tasks(folder: Path, *, offline: bool = False) -> FolderContents:
    """Read every task folder in ``folder``; set aside broken tasks and those with a duplicate name.

    Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` if there is no task folder.
    """
    tasks: dict[str, HarborTask] = {}
    refused: dict[str, str] = {}
    for place in task_folders(folder):
        try:
            task = read_task(place, offline=offline)
            if task.name in tasks:
                raise TaskFolderError(f"{place}: {tasks[task.name].folder} has the name {task.name!r}, too: rename one")
            tasks[task.name] = task
        except TaskFolderError as error:
            refused[place.name] = str(error)
    return FolderContents(tasks=tuple(task for _, task in sorted(tasks.items())), refused=refused)


def side_of(task: HarborTask, one_in: int = HELDOUT_ONE_IN) -> Split:
    """The side of the hold-out of a task: the one that it names, else by the hash of its template."""
    if task.origin.split is not None:
        return task.origin.split
    number = int.from_bytes(hashlib.sha256(task.template.encode()).digest()[:8])
    return Split.HELDOUT if number % one_in == 0 else Split.TRAIN


def _on_side(tasks: Sequence[HarborTask], split: Split, one_in: int) -> list[HarborTask]:
    return [task for task in tasks if side_of(task, one_in) is split]


def _find_images(tasks: Sequence[HarborTask], store: ImageStore | None) -> tuple[dict[str, Image], dict[str, str]]:
    """The image of each task that has one or needs none, and the reasons for the others."""
    built: dict[str, Image] = {}
    missing: dict[str, str] = {}
    for task in tasks:
        try:
            image = find_image(task, store) if store else _needs_none(task)
            if image is not None:
                task.task(Split.TRAIN, image=image)
        except TaskFolderError as error:
            missing[task.name] = str(error)
            continue
        if image is None:
            missing[task.name] = (
                f"{task.folder}: it needs an image, and {store.folder if store else 'no folder'} has none for it: "
                "`etude tasks check` builds it, or set ETUDE_IMAGES to the folder that has it"
            )
        else:
            built[task.name] = image
    return built, missing


def _needs_none(task: HarborTask) -> Image | None:
    return Image() if plain_files(task) is not None else None
