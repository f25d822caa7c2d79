"""At most one process of each kind per run folder, whoever started it."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator

from etude.errors import RunFolderError
from etude.run.folder import RunFolder

POLL_S = 0.1
"""How often a held lock is tried again."""


@contextlib.contextmanager
def exclusive(folder: RunFolder, process: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of one kind of process; the kernel frees it when this process dies, however it dies.

    Waits up to ``wait_s`` for a predecessor that is still cleaning up. Raises
    :class:`~etude.errors.RunFolderError` when another process holds it.
    """
    deadline_s = time.monotonic() + wait_s
    descriptor = os.open(folder.path / f".{process}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline_s:
                raise RunFolderError(f"{folder.path} is in use: its {process!r} process is running already")
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def holder(folder: RunFolder) -> str:
    """The name under which a process that is :func:`exclusive` in its folder takes leases (:mod:`etude.ledger.leases`):
    who had that name before is dead.
    """
    return f"{socket.gethostname()}:{folder.path.resolve()}"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
