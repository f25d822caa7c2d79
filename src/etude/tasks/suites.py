"""Suites: tasks for evaluation only, never for training.

    suite.toml + tasks ──▶ a family of any kind ──▶ its tasks, all held out, except the retired ones

A suite is a folder with ``suite.toml``, or a bare folder of tasks in Harbor's format. Retired tasks stay in the folder,
and ``retired.json`` records their dates and reasons. Owns the contents of a suite; :mod:`etude.run.suite` runs its
tasks.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self, cast

from etude.config.loading import load_suite
from etude.config.section import Section
from etude.config.suite import SUITE_FILE, SuiteFile
from etude.config.tasks import FAMILIES, SandboxConfig, TaskConfig
from etude.errors import ConfigError, DamagedError
from etude.fsync import write_whole
from etude.ledger.records import encode_task
from etude.protocols import FamilyContext, TaskFamily
from etude.tasks.harbor.folder import SETTINGS
from etude.types import Split, Task

RETIRED_FILE = "retired.json"
"""File of a suite with the tasks that are no longer used."""
FAMILY, HARBOR = "suite", "harbor"
"""Family of suites, and family of the tasks in a bare folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """Date and reason of a task's retirement."""

    date: str
    """ISO 8601."""
    reason: str


class SuiteTasks:
    """The tasks of a suite that are in use, all on the held-out side; implements
    :class:`~etude.protocols.TaskFamily`.
    """

    @classmethod
    def open(cls, options: Section, context: FamilyContext) -> Self:
        """The family of a recipe with ``tasks.family = "suite"``."""
        suite = suite_of(context.folder)
        tasks = suite.tasks
        own = replace(context, folder=Path(tasks.folder), heldout_every=tasks.heldout_every)
        family = cast("TaskFamily", FAMILIES.make(tasks.family, tasks.options, own))
        return cls(family, split=suite.split, retired=read_retired(context.folder))

    def __init__(self, family: TaskFamily, *, split: str, retired: Mapping[str, Retirement]) -> None:
        """Raises :class:`~etude.errors.ConfigError` if ``split`` is ``all`` and the family is unlimited."""
        self._family = family
        self._size = family.size(Split.HELDOUT)
        if split == "all" and family.size(Split.TRAIN) is None:
            raise ConfigError(f"{SUITE_FILE}: split = 'all' of a family that has no end: set split = 'heldout'")
        self._tasks: Sequence[Task] | None = None
        if self._size is not None:
            sides = (Split.HELDOUT, Split.TRAIN) if split == "all" else (Split.HELDOUT,)
            self._tasks = [task for task in _tasks_of(family, sides) if task.task_id not in retired]

    def size(self, split: Split) -> int | None:
        """Number of tasks of a split; none of them is for training."""
        if split is Split.TRAIN:
            return 0
        return None if self._tasks is None else len(self._tasks)

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index``."""
        assert split is Split.HELDOUT, "a suite has no training task"
        return self._family.task(split, index) if self._tasks is None else self._tasks[index]


def is_suite(folder: Path) -> bool:
    """True for a suite: a folder with ``suite.toml``, or one with tasks in Harbor's format."""
    return (folder / SUITE_FILE).is_file() or _is_harbor(folder)


def suite_of(folder: Path) -> SuiteFile:
    """The ``suite.toml`` of a suite. Raises :class:`~etude.errors.ConfigError` for any other folder."""
    if not (folder / SUITE_FILE).is_file() and _is_harbor(folder):
        name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "harbor"
        return SuiteFile(name=name, tasks=TaskConfig(family=HARBOR, folder=str(folder)))
    return load_suite(folder)


def task_config(folder: Path) -> tuple[TaskConfig, SandboxConfig]:
    """``[tasks]`` and ``[sandboxes]`` of a recipe that runs a suite. Raises :class:`~etude.errors.ConfigError`."""
    suite = suite_of(folder)
    return TaskConfig(family=FAMILY, folder=str(folder), graders=suite.tasks.graders), suite.sandboxes


def read_retired(folder: Path) -> dict[str, Retirement]:
    """The retired tasks of a suite, by id. Raises :class:`~etude.errors.DamagedError` for an invalid file."""
    file = folder / RETIRED_FILE
    if not file.exists():
        return {}
    try:
        return {task_id: Retirement(**fields) for task_id, fields in json.loads(file.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{file} cannot be read: {error}; expected {{TASK: {{date, reason}}}}") from error


def write_retired(folder: Path, retired: Mapping[str, Retirement]) -> None:
    """Write the retired tasks of a suite atomically."""
    fields = {task_id: asdict(each) for task_id, each in sorted(retired.items())}
    write_whole(folder / RETIRED_FILE, (json.dumps(fields, indent=1) + "\n").encode())


def digest_of_tasks(tasks: Sequence[Task]) -> str:
    """SHA-256 over the prompts, sandboxes and checks of tasks."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(hashlib.sha256(encode_task(task)).digest())
    return digest.hexdigest()


def _tasks_of(family: TaskFamily, sides: Sequence[Split]) -> Iterator[Task]:
    """The tasks of some sides of a finite family, each as a held-out task."""
    for side in sides:
        for index in range(family.size(side) or 0):
            yield replace(family.task(side, index), split=Split.HELDOUT)


def _is_harbor(folder: Path) -> bool:
    return folder.is_dir() and ((folder / SETTINGS).is_file() or any(folder.glob(f"*/{SETTINGS}")))
