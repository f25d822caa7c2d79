"""Safe access to the files of a sandbox that is a folder of this machine.

Owns paths: no function here follows a link or leaves the folder, whatever a program stored there or replaces during an
access. :mod:`etude.sandboxes.scratch` creates and removes the folder.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from etude.errors import SandboxError
from etude.sandboxes.images.archives import (
    MTIME_END_S,
    PERMISSIONS,
    ByteBudget,
    Entry,
    EntryKind,
    plain_name,
    read_archive,
    write_archive,
)

READ_LIMIT_BYTES = 8 << 20
"""Maximum size of a file that is read as text."""
COPY_LIMIT_BYTES = 1 << 30
"""Maximum size of a copy of a sandbox."""
MAX_DEPTH = 100
"""Maximum depth of exported folders; deeper ones are considered an attack."""
UNFIT = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.ENAMETOOLONG)
"""Error numbers of a path that does not name a plain file of the sandbox."""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    """A folder whose files belong to a sandbox."""

    def __init__(self, path: Path, *, owner: int | None, inside: str | None, workdir: str) -> None:
        """Commands see ``path`` as ``inside``, ``None`` if they see the machine's own paths; ``workdir`` is their
        working folder. ``owner`` is the user that they run as, ``None`` for this process's own.
        """
        self.path = path
        self.owner = owner
        self.inside = inside
        self.workdir = workdir
        self.work = path.joinpath(*PurePosixPath(workdir).relative_to(inside or "/").parts)
        """The working folder on this machine."""

    def place(self, path: str) -> str:
        """A command's path, relative to ``path``; ``ValueError`` for a path that leaves the sandbox."""
        whole = PurePosixPath(self.workdir, path)
        top = PurePosixPath(self.inside or "/")
        if ".." in whole.parts or (path.startswith("/") and (self.inside is None or not whole.is_relative_to(top))):
            raise ValueError(f"{path!r} does not stay inside the sandbox: use a path below {self.workdir} without '..'")
        return plain_name(str(whole.relative_to(top)))

    def read(self, path: str) -> str | None:
        """The text of a file, ``None`` if it does not exist; ``ValueError`` unless the path is one of a plain file."""
        try:
            with self._open(self.place(path), os.O_RDONLY) as file:
                return file.read(READ_LIMIT_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _judge(error, path) from error

    def write(self, path: str, text: str) -> None:
        """Create or replace a file and its parent folders. Same errors as :meth:`read`."""
        data = text.encode()
        try:
            with self._open(self.place(path), os.O_WRONLY | os.O_CREAT) as file:
                file.truncate(0)
                file.write(data)
                self._give_away(file.fileno())
        except OSError as error:
            raise _judge(error, path) from error

    def make(self, *paths: str) -> None:
        """Create folders, given by their paths inside, and their parents; the owner gets the last of each path."""
        for path in paths:
            folder = self.path / self.place(path)
            folder.mkdir(parents=True, exist_ok=True)
            if self.owner is not None:
                os.chown(folder, self.owner, self.owner)

    def pack(self, paths: Sequence[str], limit_bytes: int) -> bytes:
        """A tar of files and whole folders, without missing and unreadable ones. ``ValueError`` as for export."""
        budget = ByteBudget(limit_bytes)
        places = [(self.place(path), path) for path in paths]
        names = [(place, place if path.startswith("/") else plain_name(path)) for place, path in places]
        return write_archive(
            (entry for place, shown in names for entry in self._entries(place, shown, budget)), limit_bytes
        )

    def unpack(self, tar: bytes) -> None:
        """Unpack a tar into the working folder; if it is invalid, unpack nothing and raise ``ValueError``."""
        top = self.place(".")
        for entry in self.check(tar):
            try:
                self._put(f"{top}/{entry.name}".lstrip("/"), entry)
            except OSError as error:
                raise _judge(error, entry.name) from error

    def check(self, tar: bytes) -> Sequence[Entry]:
        """The entries of a tar; ``ValueError`` unless all of them can be unpacked into the working folder."""
        entries, top = read_archive(tar), self.place(".")
        for entry in entries:
            try:
                self._check_room(top, entry)
            except OSError as error:
                raise _judge(error, entry.name) from error
        return entries

    def copy_to(self, other: "Folder") -> None:
        """Copy all files into another folder. ``ValueError`` if they are too large for a copy."""
        for entry in self._entries("", "", ByteBudget(COPY_LIMIT_BYTES)):
            other._put(entry.name, entry)

    def _entries(self, place: str, shown: str, budget: ByteBudget) -> Iterator[Entry]:
        """Entries for ``place`` and everything below it, named as if it were ``shown``; none if it does not exist."""
        if not place:
            folder = os.open(self.path, DIRECTORY)
            try:
                yield from _walk(folder, "", budget)
            finally:
                os.close(folder)
            return
        try:
            folder = self._open_folder(place, create=False)
        except OSError:
            return
        try:
            name = PurePosixPath(place).name
            with suppress(FileNotFoundError):
                yield from _entry(folder, name, os.stat(name, dir_fd=folder, follow_symlinks=False), shown, budget)
        finally:
            os.close(folder)

    def _check_room(self, top: str, entry: Entry) -> None:
        """Raise ``ValueError`` for an entry that conflicts with an existing one, or whose path contains a link."""
        try:
            folder = self._open_folder(f"{top}/{entry.name}".lstrip("/"), create=False)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ValueError(f"{entry.name!r} would be written through what is not a folder") from error
        try:
            mode = os.stat(PurePosixPath(entry.name).name, dir_fd=folder, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        finally:
            os.close(folder)
        if stat.S_ISDIR(mode) != (entry.kind is EntryKind.FOLDER):
            raise ValueError(f"{entry.name!r} is a {entry.kind} in the archive and something else in the sandbox")

    def _put(self, place: str, entry: Entry) -> None:
        """Create or replace one file, folder or link, without writing through an existing link."""
        folder, name = self._open_folder(place, create=True), PurePosixPath(place).name
        try:
            if entry.kind is EntryKind.FOLDER:
                self._make_folder(folder, name, entry.mode | 0o700)
                return
            if _exists(folder, name):
                os.unlink(name, dir_fd=folder)
            if entry.kind is EntryKind.LINK:
                os.symlink(entry.target, name, dir_fd=folder)
                if self.owner is not None:
                    os.chown(name, self.owner, self.owner, dir_fd=folder, follow_symlinks=False)
                return
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(entry.data)
                file.flush()
                os.utime(descriptor, (entry.mtime_s, entry.mtime_s))
                os.fchmod(descriptor, entry.mode)
                self._give_away(descriptor)
        finally:
            os.close(folder)

    def _open(self, place: str, flags: int) -> BinaryIO:
        """Open a plain file without following a link or blocking on a named pipe."""
        folder = self._open_folder(place, create=bool(flags & os.O_CREAT))
        try:
            leaf = PurePosixPath(place).name
            descriptor = os.open(leaf, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=folder)
        finally:
            os.close(folder)
        file = os.fdopen(descriptor, "wb" if flags & os.O_WRONLY else "rb")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.close()
            raise ValueError(f"{place!r} is not a file")
        return file

    def _open_folder(self, place: str, *, create: bool) -> int:
        """Open the parent folder of ``place``, folder by folder."""
        if not place:
            raise ValueError("a sandbox's folder is not a file in it")
        folder = os.open(self.path, DIRECTORY)
        for part in PurePosixPath(place).parts[:-1]:
            try:
                if create:
                    self._make_folder(folder, part, 0o755)
                inner = os.open(part, DIRECTORY, dir_fd=folder)
            finally:
                os.close(folder)
            folder = inner
        return folder

    def _make_folder(self, parent: int, part: str, mode: int) -> None:
        try:
            os.mkdir(part, 0o700, dir_fd=parent)
        except FileExistsError:
            return
        made = os.open(part, DIRECTORY, dir_fd=parent)
        os.fchmod(made, mode & PERMISSIONS)
        self._give_away(made)
        os.close(made)

    def _give_away(self, descriptor: int) -> None:
        if self.owner is not None:
            os.fchown(descriptor, self.owner, self.owner)


def is_whole(text: str) -> bool:
    """True if a text that was read from a sandbox can be written back without loss.

    False if it may have been truncated or may contain replaced bytes: a file that contains U+FFFD itself cannot be
    distinguished from one whose invalid UTF-8 was replaced by it.
    """
    return "\N{REPLACEMENT CHARACTER}" not in text and len(text.encode()) < READ_LIMIT_BYTES


def tree_bytes(folder: Path) -> int:
    """Bytes on disk of all files below a folder."""
    total, waiting = 0, [os.fspath(folder)]
    while waiting:
        try:
            for inner in os.scandir(waiting.pop()):
                total += inner.stat(follow_symlinks=False).st_blocks * 512
                if inner.is_dir(follow_symlinks=False):
                    waiting.append(inner.path)
        except OSError:
            continue  # it was removed meanwhile, or is not readable
    return total


def _walk(folder: int, shown: str, budget: ByteBudget, depth: int = 0) -> Iterator[Entry]:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} folders inside each other, at {shown[:60]!r}…")
    device = os.fstat(folder).st_dev
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        with suppress(FileNotFoundError):  # it was removed meanwhile
            status = entry.stat(follow_symlinks=False)
            if not _is_mounted(folder, entry.name, status, device):
                yield from _entry(folder, entry.name, status, f"{shown}/{entry.name}".lstrip("/"), budget, depth)


def _is_mounted(folder: int, name: str, status: os.stat_result, device: int, depth: int = 0) -> bool:
    """True for a folder of another file system than ``device``, such as an external harness's, and for one that
    contains only such folders: it was created as a mount point, not by the agent.
    """
    if not stat.S_ISDIR(status.st_mode):
        return False
    if status.st_dev != device:
        return True
    try:
        inner = os.open(name, DIRECTORY, dir_fd=folder)
    except OSError:
        return False
    try:
        with os.scandir(inner) as scan:
            entries = [*scan] if depth < MAX_DEPTH else []
        return bool(entries) and all(
            _is_mounted(inner, one.name, one.stat(follow_symlinks=False), device, depth + 1) for one in entries
        )
    except OSError:
        return False
    finally:
        os.close(inner)


def _entry(
    folder: int, name: str, status: os.stat_result, shown: str, budget: ByteBudget, depth: int = 0
) -> Iterator[Entry]:
    """Entries for ``name`` in an open folder and everything below it; none if it is unsupported or was removed."""
    try:
        mode, mtime_s = stat.S_IMODE(status.st_mode) & PERMISSIONS, min(max(0, int(status.st_mtime)), MTIME_END_S - 1)
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(name, dir_fd=folder)
            yield Entry(name=shown, kind=EntryKind.LINK, target=target, mtime_s=mtime_s)
        elif stat.S_ISREG(status.st_mode):
            data = _read(folder, name, shown, budget)
            yield Entry(name=shown, kind=EntryKind.FILE, mode=mode, data=data, mtime_s=mtime_s)
        elif stat.S_ISDIR(status.st_mode):
            inner = os.open(name, DIRECTORY, dir_fd=folder)
            try:
                if shown:
                    yield Entry(name=shown, kind=EntryKind.FOLDER, mode=mode, mtime_s=mtime_s)
                yield from _walk(inner, shown, budget, depth + 1)
            finally:
                os.close(inner)
    except OSError:
        return


def _read(folder: int, name: str, shown: str, budget: ByteBudget) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        return budget.take(shown, file.read(budget.left_bytes + 1))


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def is_full(error: BaseException) -> bool:
    """True if an error means that a disk is full."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _judge(error: OSError, path: str) -> Exception:
    """The error for a path: ``ValueError`` if the path is wrong, otherwise an error of the machine."""
    if error.errno in UNFIT:
        return ValueError(f"{path!r} is not a file in the sandbox: {error.strerror}")
    return SandboxError(f"file {path!r} of a sandbox: {error.strerror}")
