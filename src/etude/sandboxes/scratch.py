"""A private, locked directory for files that must not outlive their process.

Owns its lifetime, and that of the directories in it: a lock shows whether the owner is alive, so the next process
removes directories of killed owners. The content of a sandbox's directory is in :mod:`etude.sandboxes.folders`.
"""

import fcntl
import itertools
import os
import tempfile
from pathlib import Path
from typing import Self
from uuid import uuid4

from etude.errors import SandboxError

PREFIX = "etude-sandboxes-"
MEMORY = Path("/dev/shm")
"""A file system in memory: files there never reach a disk."""


class Scratch:
    """A locked directory with one numbered directory per sandbox."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._created = 0

    @classmethod
    def open(cls, parent: Path | None, *, passable: bool = False) -> Self:
        """Make one in ``parent`` (default: memory if available, else the temporary directory), and remove dead ones.

        Other users cannot enter it, because it may contain set-uid files of root from image layers. With ``passable``
        they can traverse it, but not list it, as far as its directories permit.

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
        path = unlocked.rename(parent / unlocked.name.removeprefix("new-"))  # from now on other processes may remove it
        if passable:
            path.chmod(0o711)
        for other in parent.glob(PREFIX + "*"):
            _remove_if_dead(other)
        return cls(path, lock)

    def create(self, *, reader: int | None) -> Path:
        """Make the directory of a new sandbox. Besides the owner, only the group ``reader`` may read it: the user of a
        sandbox has a group of the same number.
        """
        self._created += 1
        path = self.path / f"{self._created:06d}"
        os.mkdir(path, 0o700)  # noqa: PTH102 - the mode at birth is the point
        if reader is not None:
            os.chown(path, -1, reader)
            path.chmod(0o750)
        return path

    def remove(self, path: Path) -> None:
        """Remove a sandbox's directory with its content."""
        _remove_tree(path)

    def close(self) -> None:
        """Remove everything."""
        _remove_tree(self.path)
        os.close(self._lock)


def _remove_if_dead(path: Path) -> None:
    """Remove a scratch directory of this user whose lock is free."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # another user's, or just removed
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_tree(path)
    except OSError:
        pass  # its owner is alive, or removes it now, or another process does
    finally:
        os.close(lock)


def _remove_tree(path: Path) -> None:
    """Remove a tree of any depth and modes: inner folders are moved to the top, then emptied."""
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
                inner.chmod(0o700)  # moving a folder changes its "..", which needs write permission
                inner = inner.rename(next(lifted))
            waiting.append(inner)
        if folder != path:
            folder.rmdir()
    path.rmdir()
