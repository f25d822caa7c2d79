"""What étude itself does inside of a namespace sandbox: files in and out, a snapshot, the end of a command.

A job runs in a fork of the launcher that has entered the sandbox and, but for a snapshot and an end, has become the
user that commands run as: it can do what a command could and nothing more, so a path that leads astray leads nowhere
that matters. It writes one :class:`Answer` to its output. Standard library and étude's own file handling alone.
"""

import json
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from etude.errors import SandboxError
from etude.sandboxes.folders import Folder, is_full
from etude.sandboxes.ns.root import AGENT, HOME, overlay_folders

MAX_DEPTH = 200
"""Folders inside folders in a snapshot; deeper ones are nobody's work but an attack's."""
OPAQUE = "user.overlay.opaque"
"""The attribute of a folder that hides what is below it in lower layers."""
COPY_BYTES = 1 << 20
END_ROUNDS, ROUND_S = 50, 0.02
"""How often a session is searched for processes that still live or were started meanwhile, and how long what was killed
has to go; then all of the sandbox's processes are ended.
"""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Verdict(IntEnum):
    """The first byte of an answer."""

    DONE = 0
    MISSING = 1
    """There is no such file."""
    REFUSED = 2
    """A ``ValueError``: what was asked for cannot be."""
    FAILED = 3
    FULL = 4
    """The sandbox's own disk has no room left, all of which was taken inside."""


class Answer(NamedTuple):
    """What a job says."""

    verdict: Verdict
    payload: bytes = b""
    """The result, or what went wrong."""


def run_job(request: Mapping[str, Any], source: int, target: int) -> Answer:
    """Do a job; ``source`` and ``target`` are descriptors whose meaning is the job's."""
    try:
        return JOBS[request["job"]](request, source, target)
    except ValueError as error:
        return Answer(Verdict.REFUSED, str(error).encode("utf-8", "backslashreplace"))
    except (SandboxError, OSError, RecursionError) as error:
        is_own_disk = request["job"] != "copy"  # which writes to the machine's
        verdict = Verdict.FULL if is_own_disk and is_full(error) else Verdict.FAILED
        return Answer(verdict, str(error).encode("utf-8", "backslashreplace"))


def runs_as_root(job: str) -> bool:
    """Whether a job keeps the powers of the sandbox's root."""
    return job in ("copy", "end", "settle")


def stays_outside(job: str) -> bool:
    """True if a job enters nothing but the sandbox's processes, of which none can reach it, not even root's."""
    return job == "kill"


def _read(request: Mapping[str, Any], source: int, target: int) -> Answer:
    text = _folder(request).read(request["path"])
    return Answer(Verdict.MISSING) if text is None else Answer(Verdict.DONE, text.encode("utf-8", "replace"))


def _write(request: Mapping[str, Any], source: int, target: int) -> Answer:
    folder = _folder(request)
    with _opened(source) as file:
        files: dict[str, str] = json.load(file)
    for path in files:
        folder.place(path)  # all of them, or nothing is written
    for path, text in files.items():
        folder.write(path, text)
    return Answer(Verdict.DONE)


def _export(request: Mapping[str, Any], source: int, target: int) -> Answer:
    return Answer(Verdict.DONE, _folder(request).pack(request["paths"], request["limit_bytes"]))


def _load(request: Mapping[str, Any], source: int, target: int) -> Answer:
    with _opened(source) as file:
        _folder(request).unpack(file.read())
    return Answer(Verdict.DONE)


def _copy(request: Mapping[str, Any], source: int, target: int) -> Answer:
    """Copy what was written, ``source``, into the empty layer ``target``, as overlayfs has it."""
    owned = (request["workdir"].strip("/"), HOME.strip("/"))
    copier = TreeCopier(owned if request["maps_range"] else None)
    for name, place in overlay_folders(request["overlays"]).items():
        into = os.open(".", DIRECTORY, dir_fd=target)  # a mount that is nowhere takes no changes itself
        for part in filter(None, place.split("/")):
            with suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=into)
            into, above = os.open(part, DIRECTORY, dir_fd=into), into
            os.close(above)
        written = os.open(name, DIRECTORY, dir_fd=source)
        try:
            copier.copy(written, into, place)
        finally:
            os.close(written)
            os.close(into)
    return Answer(Verdict.DONE)


def _settle(request: Mapping[str, Any], source: int, target: int) -> Answer:
    """Make the agent's folders the agent's, with all that an image has in them."""
    for place in (request["workdir"], HOME):
        _give_away(os.open(place, DIRECTORY))
    return Answer(Verdict.DONE)


def _give_away(folder: int, depth: int = 0) -> None:
    """Make an open folder and all in it the agent's, and close it."""
    try:
        os.fchown(folder, AGENT, AGENT)
        for name in os.listdir(folder):
            os.chown(name, AGENT, AGENT, dir_fd=folder, follow_symlinks=False)
            if depth < MAX_DEPTH and stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                _give_away(os.open(name, DIRECTORY, dir_fd=folder), depth + 1)
    finally:
        os.close(folder)


def _end(request: Mapping[str, Any], source: int, target: int) -> Answer:
    """End every process of a command's session; if it goes on multiplying, everything in the sandbox but init."""
    for _ in range(END_ROUNDS):
        members = [process for process, session in _sessions() if session == request["session"]]
        for process in members:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not members:
            return Answer(Verdict.DONE)
        time.sleep(ROUND_S)
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # the kernel spares init and the caller
    return Answer(Verdict.DONE)


def _kill(request: Mapping[str, Any], source: int, target: int) -> Answer:
    """Kill every process of the sandbox but its first, until there is none: what is being forked is killed, too."""
    for _ in range(END_ROUNDS):
        try:
            os.kill(-1, signal.SIGKILL)  # the kernel spares init and the caller
        except ProcessLookupError:
            return Answer(Verdict.DONE)
        time.sleep(ROUND_S)
    return Answer(Verdict.FAILED, b"processes of a sandbox did not end when they were killed")


JOBS: Mapping[str, Callable[[Mapping[str, Any], int, int], Answer]] = MappingProxyType(
    {"read": _read, "write": _write, "export": _export, "load": _load, "copy": _copy, "end": _end, "settle": _settle}
    | {"kill": _kill}
)
"""What can be asked for."""


def _folder(request: Mapping[str, Any]) -> Folder:
    return Folder(Path("/"), owner=None, inside="/", workdir=request["workdir"])


def _opened(descriptor: int) -> BinaryIO:
    return os.fdopen(descriptor, "rb", closefd=False)


def _sessions() -> list[tuple[int, int]]:
    """Every living process of the sandbox and its session."""
    found = []
    for name in (path.name for path in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if fields[0] != "Z":
                found.append((int(name), int(fields[3])))
    return found


class TreeCopier:
    """Copies what a program wrote, through descriptors: no link is followed, whatever is swapped meanwhile."""

    def __init__(self, owned: Sequence[str] | None) -> None:
        """What is in the places ``owned`` becomes the agent's, all else keeps its owner; ``None`` sets no owners."""
        self._owned = owned

    def copy(self, source: int, target: int, path: str, depth: int = 0) -> None:
        """Copy the contents of an open folder, which is ``path`` in its layer, and what it says of itself.

        Sockets, pipes and devices are left out. ``ValueError`` for folders that no image could hold.
        """
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} folders inside each other: no image can hold that")
        for name in os.listdir(source):
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            inner = f"{path}/{name}".lstrip("/")
            if stat.S_ISDIR(status.st_mode):
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=target)
                folder, copy = os.open(name, DIRECTORY, dir_fd=source), os.open(name, DIRECTORY, dir_fd=target)
                try:
                    self.copy(folder, copy, inner, depth + 1)
                finally:
                    os.close(folder)
                    os.close(copy)
            elif stat.S_ISREG(status.st_mode):
                self._copy_file(source, target, name, inner)
            elif stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
                self._keep_link(target, name, status, inner)
            elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=target)  # a whiteout: what is below was removed
        with suppress(OSError):  # it has no such attribute
            os.setxattr(target, OPAQUE, os.getxattr(source, OPAQUE))
        self._keep(target, os.fstat(source), path)

    def _copy_file(self, source: int, target: int, name: str, path: str) -> None:
        flags = os.O_NOFOLLOW | os.O_CLOEXEC
        original = os.open(name, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=source)
        with os.fdopen(original, "rb") as read:
            if not stat.S_ISREG(os.fstat(original).st_mode):
                return
            made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600, dir_fd=target)
            with os.fdopen(made, "wb") as copy:
                while data := read.read(COPY_BYTES):
                    copy.write(data)
                copy.flush()
                self._keep(made, os.fstat(original), path)

    def _keep(self, copy: int, status: os.stat_result, path: str) -> None:
        """Give an open copy the owner, mode and time it had."""
        if self._owned is not None:
            os.fchown(copy, *self._owner(status, path))
        os.fchmod(copy, stat.S_IMODE(status.st_mode))
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _keep_link(self, folder: int, name: str, status: os.stat_result, path: str) -> None:
        if self._owned is not None:
            os.chown(name, *self._owner(status, path), dir_fd=folder, follow_symlinks=False)
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=folder, follow_symlinks=False)

    def _owner(self, status: os.stat_result, path: str) -> tuple[int, int]:
        if any(path == place or path.startswith(f"{place}/") for place in self._owned or ()):
            return AGENT, AGENT
        return status.st_uid, status.st_gid
