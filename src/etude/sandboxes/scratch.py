"""The private directory under which a provider keeps its sandboxes, and safe access to the files in one.

Owns paths: nothing here follows a link or leaves a sandbox, whatever a program left there. A directory whose provider
was killed is removed by the next one: the lock on it tells whether somebody still lives there.
"""

import errno
import fcntl
import itertools
import os
import stat
import tempfile
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self
from uuid import uuid4

from etude.errors import SandboxError

PREFIX = "etude-sandboxes-"
MEMORY = Path("/dev/shm")
"""Files there never reach a disk."""
READ_LIMIT_BYTES = 8 << 20
"""Most that is read of one file; programs cannot write larger ones (``FILE_LIMIT_BYTES`` of the isolation)."""
UNFIT = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.ENAMETOOLONG)
"""What the system says of a path that does not name a plain file of ours."""


class Scratch:
    """A locked directory with one numbered directory per sandbox."""

    def __init__(self, path: Path, lock: int, owner: int | None) -> None:
        self.path = path
        self._lock = lock
        self._owner = owner
        self._created = 0

    @classmethod
    def open(cls, parent: Path | None, *, owner: int | None) -> Self:
        """Make one in ``parent`` (default: memory if there is any, else the temporary directory) and sweep dead ones.

        ``owner`` is the user that sandboxes belong to, ``None`` for this process's own.
        Raises :class:`~etude.errors.SandboxError` if ``parent`` cannot be written.
        """
        parent = parent or (MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir()))
        try:
            unlocked = Path(tempfile.mkdtemp(prefix="new-" + PREFIX, dir=parent))
        except OSError as error:
            raise SandboxError(
                f"no room for sandboxes in {parent}: {error.strerror}; choose another scratch"
            ) from error
        lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = unlocked.rename(parent / unlocked.name.removeprefix("new-"))  # from now on others may sweep it
        path.chmod(0o711)  # sandboxes of another user must be reachable, not listable
        for other in parent.glob(PREFIX + "*"):
            _remove_if_dead(other)
        return cls(path, lock, owner)

    def create(self) -> str:
        """Make the directory of a new sandbox and return its name."""
        self._created += 1
        name = f"{self._created:06d}"
        os.mkdir(self.path / name, 0o700)  # noqa: PTH102 - the mode at birth is the point
        if self._owner is not None:
            os.chown(self.path / name, self._owner, self._owner)
        return name

    def read(self, name: str, path: str) -> str | None:
        """The text of a file, ``None`` if there is none, ``ValueError`` for anything but a path to a plain file."""
        try:
            with self._open(name, path, os.O_RDONLY) as file:
                return file.read(READ_LIMIT_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _judge(error, path) from error

    def write(self, name: str, path: str, text: str) -> None:
        """Create or replace a file and the folders above it. Same errors as :meth:`read`."""
        data = text.encode()
        try:
            with self._open(name, path, os.O_WRONLY | os.O_CREAT) as file:
                file.truncate(0)
                file.write(data)
                self._give_away(file.fileno())
        except OSError as error:
            raise _judge(error, path) from error

    def remove(self, name: str) -> None:
        """Remove a sandbox's directory and all in it."""
        _remove_tree(self.path / name)

    def close(self) -> None:
        """Remove everything."""
        _remove_tree(self.path)
        os.close(self._lock)

    def _open(self, name: str, path: str, flags: int) -> BinaryIO:
        """Open a plain file without following a link or waiting for a pipe's other end."""
        folder = self._open_folder(name, path, create=bool(flags & os.O_CREAT))
        try:
            descriptor = os.open(_leaf(path), flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
        file = os.fdopen(descriptor, "wb" if flags & os.O_WRONLY else "rb")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.close()
            raise ValueError(f"{path!r} is not a file")
        return file

    def _open_folder(self, name: str, path: str, *, create: bool) -> int:
        """Descend folder by folder to the one that holds ``path``."""
        if not _leaf(path) or path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise ValueError(f"{path!r} does not stay inside the sandbox: use a relative path without '..'")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        folder = os.open(self.path / name, flags)
        for part in PurePosixPath(path).parts[:-1]:
            try:
                if create:
                    self._make_folder(folder, part)
                inner = os.open(part, flags, dir_fd=folder)
            finally:
                os.close(folder)
            folder = inner
        return folder

    def _make_folder(self, parent: int, part: str) -> None:
        try:
            os.mkdir(part, 0o700, dir_fd=parent)
        except FileExistsError:
            return
        made = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        self._give_away(made)
        os.close(made)

    def _give_away(self, descriptor: int) -> None:
        if self._owner is not None:
            os.fchown(descriptor, self._owner, self._owner)


def _leaf(path: str) -> str:
    return PurePosixPath(path).name


def _judge(error: OSError, path: str) -> Exception:
    """A path that is wrong is the caller's fault, anything else the machine's."""
    if error.errno in UNFIT:
        return ValueError(f"{path!r} is not a file in the sandbox: {error.strerror}")
    return SandboxError(f"file {path!r} of a sandbox: {error.strerror}")


def _remove_if_dead(path: Path) -> None:
    """Remove a scratch directory of ours whose lock nobody holds."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # somebody else's, or just gone
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_tree(path)
    except BlockingIOError:
        pass  # alive
    finally:
        os.close(lock)


def _remove_tree(path: Path) -> None:
    """Remove a tree, however deep, whatever its modes: inner folders are lifted to the top, then emptied."""
    lifted = (path / f"{uuid4().hex}-{number}" for number in itertools.count())
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        folder.chmod(0o700)
        for entry in list(os.scandir(folder)):
            inner = Path(entry.path)
            if not entry.is_dir(follow_symlinks=False):
                inner.unlink()
                continue
            if folder != path:
                inner.chmod(0o700)  # moving a folder changes its "..", which takes the right to write it
                inner = inner.rename(next(lifted))
            waiting.append(inner)
        if folder != path:
            folder.rmdir()
    path.rmdir()
