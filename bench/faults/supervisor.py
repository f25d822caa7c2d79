"""``etude run --resume`` of a run under fire, from outside: started again and again on a machine that goes wrong.

Owns its process and what it prints. Nothing here is told to it but by signals.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from bench import programs
from bench.usage import descendants
from etude.run.folder import RunFolder
from etude.run.launchers.fork_server import THREADING

GONE_S = 60.0
"""Maximum time until processes of a run end after their supervisor was killed: longer than their cleanup."""
POLL_S = 0.02


@final
class Supervisor:
    """The supervisor of one run, across its incarnations; ``log`` receives their output."""

    def __init__(self, folder: RunFolder, log: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._run = folder.name  # which its folder tells only while there is one
        self._log = log
        self._environment = {**THREADING, **programs.environment(), **environment}
        self._printed = 0
        self.resumes = -1
        """Number of restarts."""
        self._process = self._launch()

    @property
    def pid(self) -> int:
        """Id of the current incarnation."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status; ``None`` while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """Output of the current incarnation."""
        return self._log.read_bytes()[self._printed :].decode(errors="replace")

    @property
    def starts(self) -> int:
        """Processes that all incarnations have started."""
        try:
            return (self._folder.events / "supervisor.jsonl").read_bytes().count(b'"ProcessStarted"')
        except FileNotFoundError:
            return 0

    def resume(self) -> None:
        """Start the next incarnation."""
        self._process = self._launch()

    def kill(self) -> list[int]:
        """``kill -9``; returns the processes that are left without it."""
        orphans = descendants(self.pid)
        self._process.kill()
        self._process.wait()
        return orphans

    def stop_all(self) -> None:
        """Leave no process behind, whatever state it is in."""
        if self.status is None:
            kill_all([self.pid, *descendants(self.pid)])  # itself first, or it would replace the others
        self._process.wait()

    def _launch(self) -> subprocess.Popen[bytes]:
        self.resumes += 1
        command = [sys.executable, "-m", "etude", "run", "--resume", self._run]
        with self._log.open("ab") as log:
            self._printed = log.tell()
            # A session of its own: Ctrl-C reaches the campaign alone.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )


def wait_for_end(pids: Sequence[int]) -> list[int]:
    """Wait until processes are gone; those that do not go in time are killed, and returned."""
    deadline_s = time.monotonic() + GONE_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline_s:
            kill_all(left)
            return left
        time.sleep(POLL_S)
    return []


def kill_all(pids: Sequence[int]) -> None:
    """``kill -9``, in that order, of those that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
