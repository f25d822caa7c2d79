"""Task folders in Harbor's format, read into memory and validated as a whole.

    NAME/
      task.toml           settings                          etude.tasks.harbor.settings
      instruction.md      the prompt of the agent
      environment/        Dockerfile and its build context  etude.tasks.harbor.dockerfile, .images
                          docker-compose.yaml               etude.tasks.harbor.compose
      tests/              test.sh and its files: the verifier, installed after the agent has ended
      solution/           solve.sh and its files: shows that the task can be solved

Owns the requirements of a folder and the object made from it. Writes nothing (:mod:`etude.taskgen.harbor.export`) and
starts nothing.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Annotated

from pydantic import Field, ValidationError

from etude.config.section import Section
from etude.sandbox_spec import PLACE, EnvironmentSpec, Image, SandboxLimits
from etude.sandboxes.egress import is_private
from etude.tasks.harbor.compose import ComposeServices, parse_compose
from etude.tasks.harbor.dockerfile import PlainDockerfile, plain_dockerfile
from etude.tasks.harbor.settings import (
    PROCESSES,
    ArtifactSettings,
    TaskFolderError,
    TaskSettings,
    fill_variables,
    parse_settings,
)
from etude.types import ScriptChecks, Split, Task

SETTINGS, INSTRUCTION, ENVIRONMENT, TESTS, SOLUTION = (
    "task.toml",
    "instruction.md",
    "environment",
    "tests",
    "solution",
)
COMPOSE = f"{ENVIRONMENT}/docker-compose.yaml"
TEST_PROGRAM, SOLVE_PROGRAM = "test.sh", "solve.sh"
FILES: Mapping[str, str] = MappingProxyType(
    {
        SETTINGS: "",
        INSTRUCTION: "",
        f"{ENVIRONMENT}/Dockerfile": "built by podman, unless it only puts text into a known base system",
        f"{ENVIRONMENT}/.dockerignore": "",
        COMPOSE: "in part: services with images of their own, or that of main, in one sandbox",
        f"{TESTS}/{TEST_PROGRAM}": "as root, in a sandbox where no agent was",
        f"{TESTS}/*": "in part: text, at most 16 MiB",
        f"{SOLUTION}/{SOLVE_PROGRAM}": "as the agent, of `etude tasks check`",
        f"{SOLUTION}/*": "in part: text, at most 16 MiB",
    }
)
"""Files that étude or podman reads → limits of the support."""
UNSUPPORTED_FILES = (
    ("trajectory.json", "agents begin with the instruction alone"),
    ("environment/singularity-compose.yaml", "a task has one sandbox: write a Dockerfile"),
    ("tests/Dockerfile", "the verifier has a fresh copy of the task's own image: install its programs there"),
    ("tests/test.bat", "sandboxes are Linux: write tests/test.sh"),
    ("solution/solve.bat", "sandboxes are Linux: write solution/solve.sh"),
)
"""Files that change the meaning of a task in an unsupported way, and the fix."""
LEFT_OUT = re.compile(r"(^|/)(\.git|\.DS_Store|__pycache__|\.pytest_cache|\.venv|node_modules)(/|$)|\.pyc$")
"""Files of development tools, which are not part of a task."""
FILES_LIMIT, BYTES_LIMIT = 20_000, 256 << 20
"""Largest number of files and of bytes of one task folder."""
TEXT_LIMIT_BYTES = 16 << 20
"""Limit of ``tests/``, and of ``solution/``: they are held in memory. Counted in characters."""
CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
"""Lines that mark a benchmark's files for collectors of training data; not part of the instruction."""
RESERVED = ("/tests", "/logs", "/solution", "/proc", "/sys", "/dev", "/usr", "/etc", "/bin", "/lib", "/tmp")
"""Folders that cannot be or contain the working folder, because the agent owns its working folder."""
UNKNOWN = "/unknown"
"""Placeholder for the working folder of an image that is not built yet."""
ID_LENGTH = 16
"""Hex digits of a task's id."""


class Origin(Section):
    """``[metadata.etude]``: settings of étude's own tasks that have no key in Harbor."""

    task_id: str | None = None
    family: str = "harbor"
    template: str | None = None
    split: Split | None = Field(default=None, strict=False)
    """Side of the hold-out, which overrides the hash."""
    processes: int = Field(default=PROCESSES, gt=0)
    canary: str | None = None
    """A file of ``tests/`` whose tests must all pass for a full reward. The grader makes one of them fail to check
    that the verifier notices (:mod:`etude.rewards.graders.script`).
    """
    canary_tests: tuple[str, ...] = Field(default=(), strict=False)
    """Tests that fail without the work, if some do not; the grader makes only these fail."""
    rewards: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(default=(0.0, 1.0), strict=False, min_length=2)
    """All valid rewards of a verifier with a canary."""
    allow: tuple[str, ...] | None = None
    """Allowed ``host:port``; replaces ``allowed_hosts``, which have no ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """The contents of one task folder."""

    name: str
    """``[task].name``, or else the folder's name."""
    folder: Path
    digest: str
    """SHA-256 over the paths, contents and execute bits of its files."""
    settings: TaskSettings
    origin: Origin
    instruction: str
    tests: Mapping[str, str]
    """The verifier's files, relative to ``tests/``."""
    solution: Mapping[str, str]
    """Path relative to ``solution/`` → text; empty if there is no solution."""
    plain: PlainDockerfile | None
    """The Dockerfile, if it is simple enough that the task may need no image."""
    services: ComposeServices

    @property
    def template(self) -> str:
        """The template of the task; by default its name."""
        return self.origin.template or self.name

    @property
    def context(self) -> Path:
        """The build context of the image."""
        return self.folder / ENVIRONMENT

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of every command, in addition to those of a built image."""
        own = fill_variables(self.settings.environment.env, source=f"{self.folder / SETTINGS}", key="environment.env")
        return {**(self.plain.environment if self.plain else {}), **self.services.environment, **own}

    def workdir(self, image: Image) -> str:
        """The working folder in a sandbox of ``image``, which has no digest if the task needs none.

        Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` for a folder that an agent cannot own.
        """
        own = self.plain.workdir if self.plain and not image.digest else image.workdir
        path = PurePosixPath(self.settings.environment.workdir or own)
        reserved = any(path.is_relative_to(place) for place in RESERVED)
        if not path.is_absolute() or ".." in path.parts or str(path) == "/" or reserved:
            raise TaskFolderError(
                f"{self.folder / SETTINGS}: the working folder is {str(path)!r}, and the agent owns its own: "
                "set WORKDIR, or environment.workdir, to one of its own, such as /app"
            )
        return str(path)

    def environment_spec(self, image: Image) -> EnvironmentSpec:
        """The sandbox spec for a built image."""
        limits = self.settings.environment.limits
        own = [self.settings.environment.healthcheck.check] if self.settings.environment.healthcheck else []
        return EnvironmentSpec(
            image=image.digest,
            workdir=self.workdir(image),
            allow=self.origin.allow if self.origin.allow is not None else self.settings.environment.allow,
            names=self.services.names,
            entrypoint=self.services.entrypoint,
            healthchecks=(*self.services.healthchecks, *own),
            variables=self.environment,
            limits=SandboxLimits(
                memory_bytes=limits.memory_bytes,
                disk_bytes=limits.disk_bytes,
                processes=self.origin.processes,
                cpus=limits.cpus,
            ),
        )

    def task(self, split: Split, *, image: Image, files: Mapping[str, str] | None = None) -> Task:
        """The folder as a task; ``files`` are the files of its sandbox in addition to the image.

        Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` for settings that do not fit the image.
        """
        verifier = self.settings.verifier
        return Task(
            task_id=self.origin.task_id or self.digest[:ID_LENGTH],
            family=self.origin.family,
            template=self.template,
            split=split,
            prompt=self.instruction,
            files=dict(files or {}),
            checks=ScriptChecks(
                files=self.tests,
                artefacts=_artefacts(self, self.workdir(image)),
                canary=self.origin.canary or "",
                canary_tests=self.origin.canary_tests,
                rewards=self.origin.rewards,
                environment=fill_variables(verifier.env, source=f"{self.folder / SETTINGS}", key="verifier.env"),
                timeout_s=verifier.timeout_sec,
            ),
            environment=self.environment_spec(image),
        )


def read_task(folder: Path, *, offline: bool = False) -> HarborTask:
    """Read and validate one task folder; ``offline`` as in :func:`~etude.tasks.harbor.settings.parse_settings`.

    Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` for the first invalid or missing part.
    """
    if not folder.is_dir():
        raise TaskFolderError(f"{folder} is not a folder: name one that has a {SETTINGS}")
    source = str(folder / SETTINGS)
    settings = parse_settings(_text(folder, SETTINGS), source=source, offline=offline)
    for path, fix in UNSUPPORTED_FILES:
        if (folder / path).exists():
            raise TaskFolderError(f"{folder / path} is there: {fix}")
    origin = _origin(settings, source)
    instruction = without_canary(_text(folder, INSTRUCTION)).strip("\n")
    if not instruction.strip():
        raise TaskFolderError(f"{folder / INSTRUCTION} is empty: say what the agent should do")
    task = HarborTask(
        name=_name(settings, folder, source),
        folder=folder,
        digest=digest_files(folder),
        settings=settings,
        origin=origin,
        instruction=instruction,
        tests=_texts(folder, TESTS, TEST_PROGRAM),
        solution=_texts(folder, SOLUTION, SOLVE_PROGRAM) if (folder / SOLUTION).is_dir() else {},
        plain=plain_dockerfile(_dockerfile(folder, settings)),
        services=_services(folder),
    )
    if origin.canary is not None and origin.canary not in task.tests:
        raise TaskFolderError(f"{source}: metadata.etude.canary = {origin.canary!r}: {TESTS}/ has {list(task.tests)}")
    if origin.canary is None and {"canary_tests", "rewards"} & origin.model_fields_set:
        raise TaskFolderError(
            f"{source}: metadata.etude.canary_tests and rewards do nothing without a canary: name one"
        )
    image = Image() if task.plain else Image(digest="later", workdir=settings.environment.workdir or UNKNOWN)
    task.task(Split.TRAIN, image=image)  # validates the remaining parts
    return task


def task_folders(folder: Path) -> list[Path]:
    """The task folders in ``folder``, by name; ``folder`` itself if it is one.

    Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` if there is none.
    """
    if (folder / SETTINGS).is_file():
        return [folder]
    task_folders = sorted(file.parent for file in folder.glob(f"*/{SETTINGS}")) if folder.is_dir() else []
    if not task_folders:
        raise TaskFolderError(f"{folder} has no task: expected folders with a {SETTINGS} in each")
    return task_folders


def digest_files(folder: Path) -> str:
    """SHA-256 over the paths, execute bits and contents of the files below ``folder``.

    Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` for links to outside, and for too many files or bytes.
    """
    digest = hashlib.sha256()
    size_bytes = 0
    for count, (path, file) in enumerate(files_below(folder)):
        size_bytes += file.stat().st_size
        if count >= FILES_LIMIT or size_bytes > BYTES_LIMIT:
            raise TaskFolderError(
                f"{folder} has more than {FILES_LIMIT} files or {BYTES_LIMIT >> 20} MiB, at {path}: "
                "fetch large files in the Dockerfile"
            )
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{path}\0{is_program(file):d}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Relative path and file of every file below ``folder`` that belongs to a task, in order."""
    root = folder.resolve()
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder).as_posix()
        if LEFT_OUT.search(path):
            continue
        if file.is_symlink() and not file.resolve().is_relative_to(root):
            raise TaskFolderError(f"{file} points outside of {folder}: copy its target instead")
        if file.is_file():
            yield path, file


def is_program(file: Path) -> bool:
    """True if the owner may execute the file."""
    return bool(file.stat().st_mode & 0o100)


def without_canary(text: str) -> str:
    """An instruction without the canary lines at its beginning."""
    lines = text.splitlines(keepends=True)
    while lines and (CANARY.match(lines[0].strip()) or not lines[0].strip()):
        lines.pop(0)
    return "".join(lines)


def _text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskFolderError(f"{folder / name} is missing: a task needs one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFolderError(f"{folder / name} cannot be read as UTF-8 text: {error}") from error


def _texts(folder: Path, part: str, program: str) -> dict[str, str]:
    """The files of ``tests/`` or ``solution/`` as text; other data belongs into the image."""
    if not (folder / part / program).is_file():
        raise TaskFolderError(f"{folder / part / program} is missing: {part}/ begins with it")
    texts = {path: _text(folder, f"{part}/{path}") for path, _ in files_below(folder / part)}
    if sum(map(len, texts.values())) > TEXT_LIMIT_BYTES:
        raise TaskFolderError(f"{folder / part} has more than {TEXT_LIMIT_BYTES >> 20} MiB: put data into the image")
    return texts


def _origin(settings: TaskSettings, source: str) -> Origin:
    try:
        origin = Origin.model_validate(settings.metadata.get("etude", {}))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, ("metadata", "etude", *fault["loc"])))
        raise TaskFolderError(f"{source}: {key} = {fault['input']!r}: {fault['msg']}") from error
    wrong = [place for place in origin.allow or () if not PLACE.fullmatch(place)]
    if wrong:
        raise TaskFolderError(f"{source}: metadata.etude.allow = {wrong}: a place is written host:port")
    allow = settings.environment.allow if origin.allow is None else origin.allow
    private = [place for place in allow if is_private(place.rpartition(":")[0])]
    if private:
        raise TaskFolderError(
            f"{source}: {private} is in the network of the machine that the task runs on: no task may ask for that; "
            "let its services run in its own image"
        )
    return origin


def _name(settings: TaskSettings, folder: Path, source: str) -> str:
    name = settings.task.get("name", folder.resolve().name)
    if not isinstance(name, str) or not name:
        raise TaskFolderError(f"{source}: task.name = {name!r}: expected a text such as 'organisation/task'")
    return name


def _dockerfile(folder: Path, settings: TaskSettings) -> str:
    """The text of the Dockerfile; without one, ``FROM`` with the image that the settings name."""
    path = folder / ENVIRONMENT / "Dockerfile"
    if path.is_file():
        return _text(folder, f"{ENVIRONMENT}/Dockerfile")
    if settings.environment.docker_image is None:
        raise TaskFolderError(f"{path} is missing, and environment.docker_image is not set: a world needs either")
    return f"FROM {settings.environment.docker_image}\n"


def _services(folder: Path) -> ComposeServices:
    if not (folder / COMPOSE).exists():
        return ComposeServices()
    return parse_compose(_text(folder, COMPOSE), source=str(folder / COMPOSE))


def _artefacts(task: HarborTask, workdir: str) -> tuple[str, ...]:
    """The part of the agent's work that the verifier sees: the declared files, or the whole working folder if the
    verifier was written to run in the agent's sandbox.
    """
    if task.settings.verifier.environment_mode != "separate":
        return (".",)
    source = task.folder / SETTINGS
    if not task.settings.artifacts:
        raise TaskFolderError(
            f"{source}: artifacts is empty: a separate verifier sees nothing but the files that are declared there"
        )
    return tuple(_artefact(entry, source, workdir) for entry in task.settings.artifacts)


def _artefact(entry: ArtifactSettings, source: Path, workdir: str) -> str:
    path = PurePosixPath(workdir) / entry.source
    if ".." in path.parts or (not path.is_relative_to(workdir) and workdir != UNKNOWN):
        raise TaskFolderError(
            f"{source}: artifacts has {entry.source!r}, outside of the working folder {workdir}: "
            "the agent can write nowhere else; ask for the file there"
        )
    return str(path.relative_to(workdir)) if path.is_relative_to(workdir) else str(path)
