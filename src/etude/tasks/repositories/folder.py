"""A folder of tasks on disk: written by builds, read by runs.

    folder/
      images/               an etude.sandboxes.images.store.ImageStore
      NAME-VERSION/         one package
        tasks/ID.json       a task
        answers/ID.json     the original files: path → text; never part of any image
        log.jsonl           one line per candidate with its outcome, appended when it is decided
        survey.json         the package's tests and the code that they cover
        report.json         statistics of the build

An interrupted build resumes from the log. Owns the files' names and the log; :mod:`etude.ledger.records` owns the
format of a task.
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
    """``kept``, or the reason of a rejection: a :class:`~etude.taskgen.verdicts.Rejection`."""
    seconds: float
    detail: str = ""
    """Details for people, such as the place of a leak or the message of a sandbox."""
    task_id: str = ""
    tests: tuple[str, ...] = ()
    """Tests that the candidate makes fail; a second task about the same function must have other ones."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Statistics of an accepted candidate: ``about``, ``others``, ``visible``, ``probe_cases``."""


class PackageFolder:
    """Folder with all results of builds for one package."""

    def __init__(self, path: Path) -> None:
        """``path`` is created if it is missing."""
        self.path = path
        for name in ("tasks", "answers"):
            (path / name).mkdir(parents=True, exist_ok=True)

    @property
    def log(self) -> Path:
        """The log file: one JSON line per candidate."""
        return self.path / "log.jsonl"

    def verdicts(self) -> list[CandidateVerdict]:
        """The recorded outcomes of candidates, in order; skips a line that a crash truncated."""
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
        """Append the outcome of a candidate; it is on disk when this returns."""
        data = json.dumps(asdict(verdict)).encode()
        with self.log.open("ab") as file:
            file.write(b"\n" + data + b"\n")  # a line end before it, too: a crash may have truncated the last line
            file.flush()
            os.fsync(file.fileno())

    def add(self, task: Task, answer: Mapping[str, str]) -> None:
        """Write a task and the files (path → text) that solve it."""
        self.write(f"answers/{task.task_id}.json", json.dumps(dict(answer)).encode())
        self.write(f"tasks/{task.task_id}.json", encode_task(task))

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file atomically."""
        write_whole(self.path / name, data)

    def read(self, name: str) -> bytes | None:
        """A file of the folder; ``None`` if it does not exist."""
        file = self.path / name
        return file.read_bytes() if file.exists() else None


class RepositoryTasks:
    """The tasks of a folder as a family; implements :class:`~etude.protocols.TaskFamily`.

    Their order is fixed and mixed over packages; held-out tasks are in round-robin order over templates. A top-level
    name of a module is on one side of the hold-out with all its tasks, so that no function is on both.
    """

    def __init__(self, folder: Path) -> None:
        """Raises :class:`~etude.errors.ConfigError` if there is no task,
        :class:`~etude.errors.DamagedError` for a file without a valid task.
        """
        self.folder = folder
        files = sorted(folder.glob("*/tasks/*.json"))
        if not files:
            raise ConfigError(f"{folder} has no tasks: make some with `etude tasks build REPO --out {folder}`")
        self._tasks = [_read_task(file) for file in files]

    @property
    def images(self) -> Path:
        """The folder of the store of the tasks' images."""
        return self.folder / "images"

    @cached_property
    def _order(self) -> Mapping[Split, Sequence[Task]]:
        mixed = sorted(self._tasks, key=lambda task: task.task_id)
        Random(FAMILY).shuffle(mixed)
        sides = {split: [task for task in mixed if task.split is split] for split in Split}
        return sides | {Split.HELDOUT: in_turns(sides[Split.HELDOUT], lambda task: task.template)}

    @property
    def unprobed(self) -> Sequence[str]:
        """The ids of tasks without a probe, on both sides."""
        return [task.task_id for task in self._tasks if isinstance(task.checks, TestChecks) and not task.checks.probes]

    def answer(self, task: Task) -> Mapping[str, str]:
        """The files that solve a task: path → text. Raises :class:`~etude.errors.DamagedError` if they are missing."""
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
    """Read a task, which may come from another person: no build grants network access.

    Raises :class:`~etude.errors.ConfigError` for a task with network access, :class:`~etude.errors.DamagedError` for an
    invalid file.
    """
    task = decode_task(file.read_bytes())
    if task.environment is not None and task.environment.allow:
        raise ConfigError(
            f"{file}: environment.allow = {list(task.environment.allow)}: tasks of repositories have no network; take "
            f"it out, or write a task in Harbor's format"
        )
    return task


def split_of(template: str) -> Split:
    """The side of the hold-out of a template, by its hash."""
    number = int.from_bytes(hashlib.sha256(template.encode()).digest()[:8], "big")
    return Split.HELDOUT if number % HELDOUT_ONE_IN == 0 else Split.TRAIN
