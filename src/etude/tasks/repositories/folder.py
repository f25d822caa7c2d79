"""A folder of tasks on disk: written by builds, read by runs.

    folder/
      images/               an etude.sandboxes.images.store.ImageStore
      NAME-VERSION/         one package
        tasks/ID.json       a task
        answers/ID.json     the files as they were: path → text; never part of any image
        log.jsonl           a line per candidate: what became of it, appended as it is known
        survey.json         what its tests are and reach
        report.json         the build in numbers

A build that was interrupted finds in the log what it has done. Owns the files' names and the log; a task's form is
:mod:`etude.ledger.records`'s.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random

from etude.errors import ConfigError, DamagedError
from etude.fsync import write_whole
from etude.ledger.records import decode_task, encode_task
from etude.tasks.heldout import in_turns
from etude.types import Split, Task, TestChecks

FAMILY = "repository"
HELDOUT_ONE_IN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateVerdict:
    """Stored outcome of one candidate."""

    candidate_id: str
    operator: str
    path: str
    target: str
    outcome: str
    """``kept``, or why not: a :class:`~etude.taskgen.verdicts.Rejection`."""
    seconds: float
    detail: str = ""
    """The place of a leak, what a sandbox said; for people."""
    task_id: str = ""
    tests: tuple[str, ...] = ()
    """Tests that fail with it; so that no second task about the same function has the same."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Facts of an accepted one: ``about``, ``others``, ``visible``, ``probe_cases``."""


class PackageFolder:
    """Folder of everything that builds made of one package."""

    def __init__(self, path: Path) -> None:
        """``path`` is made when it is missing."""
        self.path = path
        for name in ("tasks", "answers"):
            (path / name).mkdir(parents=True, exist_ok=True)

    @property
    def log(self) -> Path:
        """A line of JSON per candidate."""
        return self.path / "log.jsonl"

    def verdicts(self) -> list[CandidateVerdict]:
        """The recorded outcomes of candidates, in order; a line that was cut short by a crash is left out."""
        verdicts: list[CandidateVerdict] = []
        lines = self.log.read_bytes().split(b"\n") if self.log.exists() else []
        for line in lines:
            try:
                fields = json.loads(line)
                verdicts.append(CandidateVerdict(**{**fields, "tests": tuple(fields["tests"])}))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
        return verdicts

    def record(self, verdict: CandidateVerdict) -> None:
        """Append what became of a candidate; it is on disk when this returns."""
        data = json.dumps(asdict(verdict)).encode()
        with self.log.open("ab") as file:
            file.write(b"\n" + data + b"\n")  # an end before it, too: the last line may have been cut short
            file.flush()
            os.fsync(file.fileno())

    def add(self, task: Task, answer: Mapping[str, str]) -> None:
        """Write a task, and beside it the files (path → text) that solve it."""
        self.write(f"answers/{task.task_id}.json", json.dumps(dict(answer)).encode())
        self.write(f"tasks/{task.task_id}.json", encode_task(task))

    def write(self, name: str, data: bytes) -> None:
        """Make or replace a file, whole or not at all."""
        write_whole(self.path / name, data)

    def read(self, name: str) -> bytes | None:
        """A file of the folder, if it is there."""
        file = self.path / name
        return file.read_bytes() if file.exists() else None


class RepositoryTasks:
    """The tasks of a folder as a family; implements :class:`~etude.protocols.TaskFamily`.

    They come in a fixed order, mixed over packages; held-out templates take turns. A name at the top
    of a module is on one side of the hold-out with all that was made of it, so that no function is in both.
    """

    def __init__(self, folder: Path) -> None:
        """Raises :class:`~etude.errors.ConfigError` where there is no task,
        :class:`~etude.errors.DamagedError` for a file that holds none.
        """
        self.folder = folder
        files = sorted(folder.glob("*/tasks/*.json"))
        if not files:
            raise ConfigError(f"{folder} has no tasks: make some with `etude tasks build REPO --out {folder}`")
        self._tasks = [_read_task(file) for file in files]

    @property
    def images(self) -> Path:
        """The folder of the image store that the tasks' images are in."""
        return self.folder / "images"

    @cached_property
    def _order(self) -> Mapping[Split, Sequence[Task]]:
        mixed = sorted(self._tasks, key=lambda task: task.task_id)
        Random(FAMILY).shuffle(mixed)
        sides = {split: [task for task in mixed if task.split is split] for split in Split}
        return sides | {Split.HELDOUT: in_turns(sides[Split.HELDOUT], lambda task: task.template)}

    @property
    def unprobed(self) -> Sequence[str]:
        """The ids of tasks without a probe, of both sides."""
        return [task.task_id for task in self._tasks if isinstance(task.checks, TestChecks) and not task.checks.probes]

    def answer(self, task: Task) -> Mapping[str, str]:
        """The files that solve a task: path → text. Raises :class:`~etude.errors.DamagedError` when they are gone."""
        answers = sorted(self.folder.glob(f"*/answers/{task.task_id}.json"))
        try:
            answer: dict[str, str] = json.loads(answers[0].read_bytes())
        except (IndexError, ValueError, RecursionError) as error:
            raise DamagedError(f"the answer of task {task.task_id} in {self.folder} cannot be read: {error}") from error
        return answer

    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of one side, in order."""
        return self._order[split]

    def size(self, split: Split) -> int | None:
        """Number of tasks of a split."""
        return len(self._order[split])

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split."""
        return self._order[split][index]


def _read_task(file: Path) -> Task:
    """A task, which may be somebody else's work: no build grants one a place of the network.

    Raises :class:`~etude.errors.ConfigError` for one that asks for any, :class:`~etude.errors.DamagedError` for none.
    """
    task = decode_task(file.read_bytes())
    if task.environment is not None and task.environment.allow:
        raise ConfigError(
            f"{file}: environment.allow = {list(task.environment.allow)}: tasks of repositories have no network; take "
            f"it out, or write a task in Harbor's format"
        )
    return task


def split_of(template: str) -> Split:
    """The side of the hold-out that a template is on, by its hash."""
    number = int.from_bytes(hashlib.sha256(template.encode()).digest()[:8], "big")
    return Split.HELDOUT if number % HELDOUT_ONE_IN == 0 else Split.TRAIN
