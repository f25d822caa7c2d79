"""One process on this machine: start, status, stop. All launchers that start processes on a machine use it.

A process leads its own session and process group: Ctrl-C only reaches the supervisor, and the children of a process are
killed with it. The kernel ends the process when the thread or the fork server that started it ends, so it never
outlives its launcher.
"""

import ctypes
import math
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
from etude.run.launchers.fork_server import THREADING, ForkedProcess, ForkOrder, ForkServer
from etude.run.parent import PR_SET_PDEATHSIG, SUPERVISOR_VARIABLE

MEMORY_S = 5.0
"""Interval at which the memory of a process is measured, which takes some milliseconds."""
LOG_TAIL_BYTES = 64 * 1024
"""Bytes read from the end of a log to find its last line."""


@final
class HostProcess:
    """One incarnation of a process; its output is appended to ``log``, its heartbeats are the times of a file."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        log: Path,
        heartbeat: Path,
        environment: Mapping[str, str],
        server: ForkServer | None = None,
    ) -> None:
        """Start it; ``environment`` adds variables that are not in its spec. A ``server`` forks étude's commands."""
        self.log = log
        self._heartbeat = heartbeat
        self._memory_bytes, self._measured_s = 0, -math.inf
        heartbeat.touch()
        variables = {
            **THREADING,
            **os.environ,
            **environment,
            **spec.environment,
            HEARTBEAT_VARIABLE: str(heartbeat.absolute()),
        }
        if server is not None and spec.command[0] == ETUDE:
            self._process: ForkedProcess | subprocess.Popen[bytes] = _forked(server, spec, variables, log)
        else:
            self._process = _started(spec, variables, log)
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
            memory_bytes=self._measured_memory() if exit_status is None else 0,
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

    def _measured_memory(self) -> int:
        """Its memory in bytes, as of the last measurement."""
        now_s = time.monotonic()
        if now_s - self._measured_s >= MEMORY_S:
            self._measured_s = now_s
            self._memory_bytes = proportional_memory(self._process.pid)
        return self._memory_bytes


def stop_all(processes: Collection[HostProcess], grace_s: float) -> None:
    """Stop all processes at once: with SIGTERM, and after ``grace_s`` with SIGKILL."""
    for process in processes:
        process.ask_to_stop()
    deadline_s = time.monotonic() + grace_s
    for process in processes:
        process.make_sure(deadline_s)


def host_process(
    spec: ProcessSpec, folder: Path, environment: Mapping[str, str], server: ForkServer | None = None
) -> HostProcess:
    """Start a process with its log and heartbeat file in a run's ``folder``; a ``server`` forks étude's commands."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log, heartbeat = logs / f"{spec.name}.log", folder / f".{spec.name}.beat"
    return HostProcess(spec, log=log, heartbeat=heartbeat, environment=environment, server=server)


def _forked(server: ForkServer, spec: ProcessSpec, environment: Mapping[str, str], log: Path) -> ForkedProcess:
    """Fork one of étude's own commands."""
    _, *arguments = spec.command
    return server.fork(
        ForkOrder(arguments=arguments, environment=environment, folder=str(Path.cwd()), log=str(log.absolute()))
    )


def _started(spec: ProcessSpec, environment: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a program."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command_line(spec),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, SUPERVISOR_VARIABLE: str(os.getpid())},
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )


def proportional_memory(pid: int) -> int:
    """Memory of a process in bytes, each shared page divided by the number of processes that share it.

    0 if the system does not report it.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


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
