"""Requests of users, with the files that they have open but without tests; a judge grades the work.

    requests.jsonl   {"template": "…", "prompt": "…", "files": {"a.py": "…"}, "keep": ["a.py"], "history": […]}

A program cannot decide whether an agent understood a request, followed the instructions or did more than requested. The
rubrics of a suite's ``[judge]`` decide that. A program can check which files are unchanged: ``keep`` names those that
must be.

Owns the format of the file and the grader of kept files. All requests are held out: the grader's reward contains too
little information to train on.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from etude.config.section import Section, faults_of
from etude.errors import ConfigError
from etude.protocols import FamilyContext, Grade, GraderContext, HarnessResult, Sandbox
from etude.types import NamedChecks, PromptMessage, Split, Task

FILE = "requests.jsonl"
"""Name of the file in the folder of a suite."""
GRADER = "kept_files"
"""The grader's name, a row of ``config/tasks.py:GRADERS``."""


class EarlierMessage(Section):
    """One message of the conversation that a request continues."""

    role: str = Field(pattern="^(user|assistant)$")
    content: str = Field(min_length=1)


class UserRequest(Section):
    """One line of the file."""

    template: str = Field(min_length=1)
    """Kind of request; confidence intervals are over kinds."""
    prompt: str = Field(min_length=1)
    """Message of the user."""
    files: dict[str, str] = Field(default={})
    """Files in the agent's sandbox: path → text."""
    keep: tuple[str, ...] = ()
    """Files that the agent must leave unchanged."""
    history: tuple[EarlierMessage, ...] = ()
    """Earlier messages."""

    @model_validator(mode="after")
    def _effective(self) -> "UserRequest":
        for path in self.keep:
            if path not in self.files:
                raise ValueError(f"keep names {path!r}, which is none of its files: {', '.join(self.files) or 'none'}")
        return self

    def task(self) -> Task:
        """The request as a task."""
        digest = hashlib.sha256(self.model_dump_json().encode()).hexdigest()
        return Task(
            task_id=digest[:16],
            family="requests",
            template=self.template,
            split=Split.HELDOUT,
            prompt=self.prompt,
            files=self.files,
            checks=NamedChecks(grader=GRADER, options={"files": {path: self.files[path] for path in self.keep}}),
            history=tuple(PromptMessage(**message.model_dump()) for message in self.history),
        )


class RequestTasks:
    """The requests of a folder; implements :class:`~etude.protocols.TaskFamily`."""

    @classmethod
    def open(cls, options: Section, context: FamilyContext) -> "RequestTasks":
        """The family of a suite. Raises :class:`~etude.errors.ConfigError` for a line that cannot be used."""
        return cls(list(read_requests(context.folder / FILE)))

    def __init__(self, requests: list[UserRequest]) -> None:
        self._tasks = [request.task() for request in requests]

    def size(self, split: Split) -> int | None:
        """Number of requests; none of them is for training."""
        return len(self._tasks) if split is Split.HELDOUT else 0

    def task(self, split: Split, index: int) -> Task:
        """Request number ``index``."""
        assert split is Split.HELDOUT, "requests are measured with, and never trained on"
        return self._tasks[index]


def read_requests(file: Path) -> Iterator[UserRequest]:
    """The validated lines of a file. Raises :class:`~etude.errors.ConfigError` with the line and its error."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tasks.folder: {file} cannot be read: {error}") from error
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = UserRequest.model_validate_json(line)
        except ValidationError as error:
            raise ConfigError(f"{file}, line {number}: {faults_of(error)}") from error
        first = seen.setdefault(request.task().task_id, number)
        if first != number:
            raise ConfigError(f"{file}, line {number} is line {first} once more: take one of them out")
        yield request
    if not seen:
        raise ConfigError(f"{file} has no request: expected one JSON object in each line")


class KeptFilesOptions(Section):
    """The files that must be unchanged."""

    files: dict[str, str] = Field(default={})
    """Path → text."""


class KeptFilesGrader:
    """1 if all files that must stay unchanged did, else 0; implements :class:`~etude.protocols.Grader`."""

    Options = KeptFilesOptions

    def __init__(self, options: KeptFilesOptions, context: GraderContext) -> None:
        self._files = options.files

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Compare the files; ``changed_files`` counts differences. Raises :class:`~etude.errors.SandboxError`."""
        changed = [path for path, text in self._files.items() if await _read(sandbox, path) != text]
        return Grade(value=float(not changed), parts={"changed_files": float(len(changed))})


async def _read(sandbox: Sandbox, path: str) -> str | None:
    try:
        return await sandbox.read_file(path)
    except ValueError:  # it is no longer a plain file
        return None
