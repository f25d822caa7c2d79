"""One process on this machine: start, status, stop. All launchers that start processes on a machine use it.

A process leads its own session and process group: Ctrl-C only reaches the supervisor, and the children of a process are
killed with it. The kernel ends the process when the thread that started it ends, so it never outlives its launcher.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import final

from etude.fleet.specs import ETUDE, ProcessSpec, ProcessStatus
from etude.run.heartbeat import HEARTBEAT_VARIABLE
from etude.run.parent import PR_SET_PDEATHSIG, SUPERVISOR_VARIABLE

THREADING = {"GOMP_SPINCOUNT": "1000"}
"""Time that an OpenMP thread spins before it sleeps. The default is milliseconds, which made two-threaded training ten
times slower on a machine with busy cores; this short spin costs 5 % on an idle machine.
"""
LOG_TAIL_BYTES = 64 * 1024
"""Bytes read from the end of a log to find its last line."""


@final
class HostProcess:
    """One incarnation of a process; its output is appended to ``log``, its heartbeats are the times of a file."""

    def __init__(self, spec: ProcessSpec, *, log: Path, heartbeat: Path, environment: Mapping[str, str]) -> None:
        """Start it; ``environment`` adds variables that are not in its spec."""
        self.log = log
        self._heartbeat = heartbeat
        heartbeat.touch()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command_line(spec),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **THREADING,
                    **os.environ,
                    **environment,
                    **spec.environment,
                    SUPERVISOR_VARIABLE: str(os.getpid()),
                    HEARTBEAT_VARIABLE: str(heartbeat.absolute()),
                },
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        self._incarnation = f"{os.uname().nodename}:{self._process.pid}:{time.time_ns()}"

    @property
    def has_ended(self) -> bool:
        """True once it has an exit status."""
        return self._process.poll() is not None

    def status(self) -> ProcessStatus:
        """Its current status."""
        exit_status = self._process.poll()
        return ProcessStatus(
            incarnation=self._incarnation,
            host=os.uname().nodename,
            pid=self._process.pid,
            exit_status=exit_status,
            beat=self._beat(),
            memory_bytes=self._memory_bytes() if exit_status is None else 0,
            log=str(self.log),
            last_line="" if exit_status is None else last_line(self.log),
        )

    def ask_to_stop(self) -> None:
        """Send SIGTERM if it is still running."""
        if not self.has_ended:
            self._process.terminate()

    def make_sure(self, deadline_s: float) -> None:
        """Wait for the end until ``deadline_s`` (monotonic), then kill the whole process group."""
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _beat(self) -> int:
        try:
            return self._heartbeat.stat().st_mtime_ns
        except OSError:
            return 0

    def _memory_bytes(self) -> int:
        """Resident memory; 0 if the system does not report it."""
        try:
            resident_pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return resident_pages * os.sysconf("SC_PAGE_SIZE")


def stop_all(processes: Collection[HostProcess], grace_s: float) -> None:
    """Stop all processes at once: with SIGTERM, and after ``grace_s`` with SIGKILL."""
    for process in processes:
        process.ask_to_stop()
    deadline_s = time.monotonic() + grace_s
    for process in processes:
        process.make_sure(deadline_s)


def host_process(spec: ProcessSpec, folder: Path, environment: Mapping[str, str]) -> HostProcess:
    """Start a process with its log and heartbeat file in a run's ``folder``."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    heartbeat = folder / f".{spec.name}.beat"
    return HostProcess(spec, log=logs / f"{spec.name}.log", heartbeat=heartbeat, environment=environment)


def command_line(spec: ProcessSpec) -> list[str]:
    """The command line of a process; étude's own commands use this interpreter."""
    program, *arguments = spec.command
    return [sys.executable, "-m", "etude", *arguments] if program == ETUDE else [program, *arguments]


def last_line(log: Path) -> str:
    """The last line of a log, preferably the process's own rather than one of a wrapper program."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    own = [line.removeprefix("etude: ") for line in lines if line.startswith("etude: ")]
    return (own or lines or [""])[-1]


def _die_with_parent() -> Callable[[], None]:
    """The function to call between fork and exec; its library is loaded before, since little is safe after a fork."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return (lambda: None) if prctl is None else lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
