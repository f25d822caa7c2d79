"""At most one process of each kind per run folder, whoever started it."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from etude.errors import RunFolderError
from etude.run.folder import RunFolder


@contextlib.contextmanager
def exclusive(folder: RunFolder, process: str) -> Iterator[None]:
    """Hold the lock of one kind of process; the kernel frees it when this process dies, however it dies.

    Raises :class:`~etude.errors.RunFolderError` when another process holds it.
    """
    descriptor = os.open(folder.path / f".{process}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(f"{folder.path} is in use: its {process!r} process is running already") from None
        yield
    finally:
        os.close(descriptor)
