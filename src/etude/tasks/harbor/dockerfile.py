"""Dockerfiles that need no image: they only copy text files into the working folder of the sandbox's base system. Pure.

    FROM debian:12     WORKDIR /app     ENV A=b     COPY src/ .     …and LABEL, EXPOSE, CMD, which change no file

So tasks that consist of a few files run anywhere, without podman and without root. podman builds any other Dockerfile
(:mod:`etude.sandboxes.images.containers`).
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

OWN_BASE = ("debian*", "ubuntu*", "python*")
"""Images that the provider's own base system replaces; a task's solution shows whether it is similar enough."""
NO_FILES_CHANGE = ("LABEL", "EXPOSE", "CMD", "MAINTAINER", "STOPSIGNAL")
"""Instructions that only affect how a container runs; in sandboxes the harness decides that."""
COMMENT = re.compile(r"\s*(#|$)")
NOT_PLAIN = re.compile(r"\$|<<|^--|[*?\[\]]")
"""In an argument: a variable, a here-document, a flag, a pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainDockerfile:
    """The text files of a task and their targets."""

    workdir: str
    environment: Mapping[str, str]
    copies: tuple[tuple[str, ...], ...]
    """For each COPY its sources, relative to the build context, and then its target."""


def plain_dockerfile(text: str) -> PlainDockerfile | None:
    """Read a Dockerfile; ``None`` if it does more than copy files into one folder of a known base system."""
    parent, workdir = "", ""
    environment: dict[str, str] = {}
    copies: list[tuple[str, ...]] = []
    for instruction in _instructions(text):
        name, _, rest = instruction.strip().partition(" ")
        if name.upper() in NO_FILES_CHANGE:
            continue
        try:
            words = shlex.split(rest)
        except ValueError:
            return None
        if not words or any(NOT_PLAIN.search(word) for word in words):
            return None
        match name.upper():
            case "FROM" if not parent and len(words) == 1 and any(fnmatchcase(words[0], base) for base in OWN_BASE):
                parent = words[0]
            case "WORKDIR" if workdir in ("", words[0]) and PurePosixPath(words[0]).is_absolute():
                workdir = words[0]
            case "ENV" if all("=" in word for word in words):
                environment |= dict(word.split("=", 1) for word in words)
            case "COPY" if len(words) > 1 and workdir:
                copies.append(tuple(words))
            case _:
                return None
    return PlainDockerfile(workdir=workdir or "/", environment=environment, copies=tuple(copies)) if parent else None


def _instructions(text: str) -> Iterator[str]:
    """The instructions, with continued lines joined."""
    joined = ""
    for line in text.splitlines():
        if COMMENT.match(line):
            continue
        joined += line.rstrip().removesuffix("\\")
        if not line.rstrip().endswith("\\"):
            yield joined
            joined = ""
    if joined:
        yield joined
