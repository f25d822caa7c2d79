"""A process that forks the processes of a run, so that they need not import their code.

    launcher ──command line, environment, log──▶ fork server, which has imported PyTorch and étude ──fork──▶ process
             ◀──process id; later its exit status──┘

Imports take two to three seconds of a core and 200 MB in each process. A fork takes milliseconds and shares the memory.
The server only imports: it touches no GPU and opens no files, so a forked process starts afresh. It ends with its
launcher, and the processes that it forked end with it. This module is the launcher's side; :mod:`etude.cli.fork_server`
is the server.

Linux only: on other systems, libraries do not allow a fork after they were imported.
"""

import atexit
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import final

import orjson

from etude.closing import Closing
from etude.errors import InfrastructureError

SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1"}
"""Keeps NumPy's library from starting threads when it is imported: a fork has only the thread that forks."""
SERVER = "etude.cli.fork_server"
"""Module that the server runs."""
THREADING = {"GOMP_SPINCOUNT": "1000"}
"""Time that an OpenMP thread spins before it sleeps. The default is milliseconds, which made two-threaded training ten
times slower on a machine with busy cores; this short spin costs 5 % on an idle machine. It is read during imports.
"""
MESSAGE_BYTES = 1 << 20
"""Longest message in bytes, far above what a system allows for an environment."""
POLL_S = 0.01
"""Interval at which a process that was asked to stop is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """A command of étude to run in a forked process."""

    arguments: Sequence[str]
    """Command line after ``etude``."""
    environment: Mapping[str, str]
    folder: str
    """Working directory."""
    log: str
    """File to which its output is appended."""


@final
class ForkServer(Closing):
    """A running fork server, as its launcher sees it."""

    def __init__(self) -> None:
        """Start it; its imports go on while this process does other work."""
        self._messages, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**THREADING, **os.environ, **SINGLE_THREADED},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._exit_statuses: dict[int, int] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """End it, and with it all that it forked. It may still be importing."""
        self._messages.close()
        self._process.kill()
        self._process.wait()

    @property
    def has_ended(self) -> bool:
        """True once it has ended, and with it all that it forked."""
        return self._process.poll() is not None

    def fork(self, order: ForkOrder) -> "ForkedProcess":
        """Start a process, after the imports.

        Raises :class:`~etude.errors.InfrastructureError` if the server has ended, or the environment is too large.
        """
        try:
            with self._lock:
                self._messages.setblocking(True)
                self._messages.send(orjson.dumps(asdict(order)))
                while (pid := self._receive()) is None:
                    pass
        except OSError as error:
            raise InfrastructureError(f"the fork server cannot start `etude {order.arguments[0]}`: {error}") from error
        return ForkedProcess(self, pid)

    def exit_status(self, pid: int) -> int | None:
        """Exit status of a process, negative for a signal; ``None`` while it runs."""
        with self._lock, contextlib.suppress(BlockingIOError, ConnectionError):
            self._messages.setblocking(False)
            while pid not in self._exit_statuses:
                self._receive()
        return self._exit_statuses.get(pid, -signal.SIGKILL if self.has_ended else None)

    def _receive(self) -> int | None:
        """Read a message: returns the id of a started process, or remembers an exit status."""
        message = self._messages.recv(MESSAGE_BYTES)
        if not message:
            raise ConnectionResetError
        pid, exit_status = orjson.loads(message)
        if exit_status is None:
            self._exit_statuses.pop(pid, None)  # of an earlier process that had this id
            return int(pid)
        self._exit_statuses[pid] = exit_status
        return None


def fork_server() -> ForkServer | None:
    """The fork server of this process, for any number of runs; the first call starts it.

    A command that will start processes calls this early. ``None`` where a fork after imports is not safe.
    """
    if sys.platform != "linux":
        return None
    if _fork_server().has_ended:
        _fork_server.cache_clear()
    return _fork_server()


@functools.cache
def _fork_server() -> ForkServer:
    server = ForkServer()
    atexit.register(server.close)
    return server


@final
class ForkedProcess:
    """A process that a server forked, with the methods of :class:`subprocess.Popen` that a launcher needs."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        """Exit status once it has ended, negative for a signal; ``None`` while it runs."""
        return self._server.exit_status(self.pid)

    def terminate(self) -> None:
        """Send SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit status. Raises :class:`subprocess.TimeoutExpired`."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (exit_status := self.poll()) is None:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        return exit_status
