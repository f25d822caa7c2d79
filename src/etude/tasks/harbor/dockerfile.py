"""Dockerfiles, as far as they can be built without Docker: text in, steps out. Pure.

    FROM python:3.12      WORKDIR /app      ENV A=b      ARG V=1      SHELL ["bash", "-c"]
    RUN pip install x     COPY src /app     ADD tree.tar /              …and LABEL, EXPOSE, CMD, which change no file

Every step carries the folder, the variables and the paths that hold for it, so a builder keeps no state
(:mod:`etude.tasks.harbor.images`). What is not in this list is refused by name and line: other stages, other
users, downloads, secrets, entry points.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import TypeAlias

from etude.tasks.harbor.settings import TaskFolderError

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""``PATH`` of the images that Dockerfiles begin with; ``ENV PATH=/x:$PATH`` means this one."""
NO_FILES_CHANGE = ("LABEL", "EXPOSE", "CMD", "MAINTAINER", "STOPSIGNAL")
"""Instructions about running a container; sandboxes run what the harness says."""
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "ENTRYPOINT": "nothing is started in a sandbox: put it into an image's files, and start it in the task",
        "HEALTHCHECK": "nothing is started in a sandbox that could be waited for",
        "ONBUILD": "write the instruction itself",
        "VOLUME": "a sandbox's files are all in its image: make the folder with RUN mkdir",
    }
)
COMMENT = re.compile(r"\s*#")
INSTRUCTION = re.compile(r"\s*([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)
VARIABLE = re.compile(r"\\(\$)|\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")
UNREADABLE_VARIABLE = re.compile(r"(?<!\\)\$\{\w+[^\w}:]|(?<!\\)\$\{\w+:[^-]")
"""``${NAME:+text}``, ``${NAME#pattern}`` and such."""
FLAG = re.compile(r"--([a-z-]+)(?:=(\S+))?\s+")
HEREDOC = re.compile(r"(?<!<)<<-?\s*([\"']?)([A-Za-z_]\w*)\1")
ARCHIVE = re.compile(r"\.(tar|tar\.gz|tgz|tar\.xz|tar\.bz2)$")
"""Names of what ADD unpacks."""
REMOTE = re.compile("://|^git@")
DROPPED_FLAGS = ("link", "network", "parents")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFolder:
    """Make a folder and those above it."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Put files and folders of the build context into the image."""

    line: int
    sources: tuple[str, ...]
    """Relative to the context; may have ``*``, ``?`` and ``[…]``."""
    target: str
    """Absolute; with a slash at its end it is a folder."""
    mode: str = ""
    """For ``chmod``; empty keeps the modes of the context."""
    unpack: bool = False
    """Archives are unpacked into ``target``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInstruction:
    """Run a command as root."""

    line: int
    argv: tuple[str, ...]
    workdir: str
    environment: Mapping[str, str]


Step: TypeAlias = ImageFolder | Copy | RunInstruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    """The build that one Dockerfile describes."""

    parent: str
    """The image it begins with."""
    steps: tuple[Step, ...]
    environment: Mapping[str, str]
    """Variables of every command in the image."""
    workdir: str


@dataclass(slots=True)
class _DockerfileState:
    """State at one line, while a Dockerfile is being read."""

    source: str
    parent: str = ""
    workdir: str = "/"
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def fault(self, line: int, text: str, fix: str) -> TaskFolderError:
        return TaskFolderError(f"{self.source}:{line}: {text[:120]!r}: {fix}")

    def fill(self, line: int, text: str) -> str:
        """``text`` with its variables filled in; one that is not set is empty."""
        if UNREADABLE_VARIABLE.search(text):
            raise self.fault(line, text, "of variables, only $NAME, ${NAME} and ${NAME:-default} are read")
        by_name = {"PATH": SEARCH_PATH} | self.arguments | self.environment
        return VARIABLE.sub(lambda match: match[1] or by_name.get(match[2] or match[3]) or match[4] or "", text)

    def resolve(self, line: int, path: str) -> str:
        """An absolute path; the slash at its end is kept."""
        whole = PurePosixPath(self.workdir) / path
        if ".." in whole.parts:
            raise self.fault(line, path, "write the path without '..'")
        return str(whole) + ("/" if path.endswith("/") and whole.name else "")


def parse_dockerfile(text: str, *, source: str) -> Dockerfile:
    """Read the text of a Dockerfile; ``source`` is its path, for messages.

    Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` with the line for what cannot be built here.
    """
    reading = _DockerfileState(source)
    for line, instruction in _instructions(text):
        match = INSTRUCTION.fullmatch(instruction)
        if match is None:
            raise reading.fault(line, instruction, "no instruction")
        _read(reading, line, match[1].upper(), (match[2] or "").strip())
    if not reading.parent:
        raise TaskFolderError(f"{source}: there is no FROM: name the image it begins with")
    return Dockerfile(
        parent=reading.parent,
        steps=tuple(reading.steps),
        environment=reading.environment,
        workdir=reading.workdir,
    )


def _read(reading: _DockerfileState, line: int, name: str, rest: str) -> None:
    if name in NO_FILES_CHANGE:
        return
    if name in REFUSED:
        raise reading.fault(line, f"{name} {rest}", REFUSED[name])
    readers = {
        "FROM": _from,
        "ARG": _arg,
        "ENV": _env,
        "WORKDIR": _workdir,
        "SHELL": _shell,
        "USER": _user,
        "RUN": _run,
        "COPY": _copy,
        "ADD": _add,
    }
    if name not in readers:
        raise reading.fault(line, f"{name} {rest}", "there is no such instruction")
    if not reading.parent and name not in ("FROM", "ARG"):
        raise reading.fault(line, f"{name} {rest}", "FROM comes first")
    readers[name](reading, line, rest)


def _from(reading: _DockerfileState, line: int, rest: str) -> None:
    words = FLAG.sub("", reading.fill(line, rest)).split()
    if reading.parent or not words:
        raise reading.fault(line, f"FROM {rest}", "an image of one stage can be built: install instead of copying")
    reading.parent = words[0]


def _arg(reading: _DockerfileState, line: int, rest: str) -> None:
    for word in _words(reading, line, rest):
        name, equals, value = word.partition("=")
        if not equals:
            raise reading.fault(line, f"ARG {rest}", f"{name} has no value: write a default")
        reading.arguments[name] = reading.fill(line, value)


def _env(reading: _DockerfileState, line: int, rest: str) -> None:
    name, _, value = rest.partition(" ")
    pairs = [f"{name}={value.strip()}"] if "=" not in name else _words(reading, line, rest)
    filled = [(key, reading.fill(line, text)) for key, _, text in (pair.partition("=") for pair in pairs)]
    reading.environment.update(filled)


def _workdir(reading: _DockerfileState, line: int, rest: str) -> None:
    reading.workdir = reading.resolve(line, reading.fill(line, rest)).rstrip("/") or "/"
    reading.steps.append(ImageFolder(path=reading.workdir))


def _shell(reading: _DockerfileState, line: int, rest: str) -> None:
    words = _json_words(rest)
    if not words:
        raise reading.fault(line, f"SHELL {rest}", 'expected a list such as ["/bin/bash", "-c"]')
    reading.shell = words


def _user(reading: _DockerfileState, line: int, rest: str) -> None:
    if rest.split(":")[0] not in ("root", "0"):
        raise reading.fault(line, f"USER {rest}", "images are built as root, and agents are always user 1000: drop it")


def _run(reading: _DockerfileState, line: int, rest: str) -> None:
    flags, command = _flags(reading, line, "RUN", rest)
    if any(name != "mount" or "type=cache" not in value.split(",") for name, value in flags):
        raise reading.fault(line, f"RUN {rest}", "of --mount, only caches are known")
    if not command.strip():
        raise reading.fault(line, "RUN", "there is no command")
    words = _json_words(command)
    reading.steps.append(
        RunInstruction(
            line=line,
            argv=words or (*reading.shell, _script(command)),
            workdir=reading.workdir,
            environment=reading.arguments | reading.environment,
        )
    )


def _copy(reading: _DockerfileState, line: int, rest: str) -> None:
    _copy_or_add(reading, line, "COPY", rest)


def _add(reading: _DockerfileState, line: int, rest: str) -> None:
    _copy_or_add(reading, line, "ADD", rest)


def _copy_or_add(reading: _DockerfileState, line: int, name: str, rest: str) -> None:
    flags, paths = _flags(reading, line, name, rest)
    modes = [value for flag, value in flags if flag == "chmod"]
    wrong = [flag for flag, _ in flags if flag != "chmod"]
    if wrong:
        raise reading.fault(line, f"{name} {rest}", f"--{wrong[0]} cannot be had: copy from the context, as root")
    if HEREDOC.search(paths):
        raise reading.fault(line, f"{name} {rest}", "put the text into a file of the context")
    words = _json_words(paths) or _words(reading, line, paths) or [""]
    *sources, target = [reading.fill(line, word) for word in words]
    outside = [path for path in sources if ".." in PurePosixPath(path).parts or REMOTE.search(path)]
    if outside or not sources:
        raise reading.fault(line, f"{name} {rest}", "expected files of the context and a target; nothing is downloaded")
    reading.steps.append(
        Copy(
            line=line,
            sources=tuple(path.lstrip("/") for path in sources),
            target=reading.resolve(line, target),
            mode=modes[0] if modes else "",
            unpack=name == "ADD" and any(ARCHIVE.search(path) for path in sources),
        )
    )


def _flags(reading: _DockerfileState, line: int, name: str, rest: str) -> tuple[list[tuple[str, str]], str]:
    """Leading ``--name=value``, those that make no difference here left out, and what follows."""
    flags = []
    while match := FLAG.match(rest):
        if match[1] not in DROPPED_FLAGS:
            if match[2] is None:
                raise reading.fault(line, f"{name} {rest}", f"--{match[1]} needs a value")
            flags.append((match[1], match[2]))
        rest = rest[match.end() :]
    return flags, rest


def _words(reading: _DockerfileState, line: int, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise reading.fault(line, text, f"{error}") from error


def _json_words(text: str) -> tuple[str, ...]:
    """The words of a JSON list of strings; none if ``text`` is no such list."""
    try:
        words = json.loads(text) if text.lstrip().startswith("[") else None
    except ValueError:
        return ()
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else ()


def _script(command: str) -> str:
    """The script for a shell: ``RUN <<END`` alone has its script in the lines that follow."""
    first, _, body = command.partition("\n")
    if HEREDOC.fullmatch(first.strip()):
        return body.rpartition("\n")[0] + "\n"
    return command


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Line number and whole text of each instruction; continued lines are joined, here-documents kept with theirs."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        start = index
        parts: list[str] = []
        while index < len(lines):
            line = lines[index]
            index += 1
            if COMMENT.match(line) or not line.strip():
                if parts:
                    continue  # inside of an instruction, comments and empty lines are skipped
                break
            parts.append(line.rstrip().removesuffix("\\"))
            if not line.rstrip().endswith("\\"):
                break
        instruction = " ".join(parts)
        if instruction.strip():
            body, index = _here_documents(instruction, lines, index)
            yield start + 1, instruction + body


def _here_documents(instruction: str, lines: Sequence[str], index: int) -> tuple[str, int]:
    if instruction.split(maxsplit=1)[0].upper() != "RUN":
        return "", index
    body = ""
    for match in HEREDOC.finditer(instruction):
        ends = [number for number in range(index, len(lines)) if lines[number].strip() == match[2]]
        if ends:  # else it is a shift, or the shell's to complain about
            body += "".join(f"\n{line}" for line in lines[index : ends[0] + 1])
            index = ends[0] + 1
    return body, index
