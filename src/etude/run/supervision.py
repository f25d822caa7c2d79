"""Child processes of a run: started, watched, restarted, stopped.

Owns what happens when one dies. A process with an end that ends with 0 has done its work. One that ends with
``USER_ERROR`` (:class:`~etude.errors.ExitCode`) met something that no restart repairs, and ends the run. One that found
no room on a disk is started again after pauses, until there is room. Anything else (a crash,
``kill -9``) is restarted a bounded number of times; the ledger, the weight store and the checkpoints make that safe for
each of them. One that lives and gives no sign of it (:mod:`etude.run.heartbeat`) is killed, and then likewise. Each
restart is told at once, with its reason.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from etude.backoff import Backoff
from etude.errors import EtudeError, ExitCode, InfrastructureError
from etude.run.folder import RunFolder
from etude.run.heartbeat import HEARTBEAT_VARIABLE, START_S, Silence
from etude.run.process_name import ProcessName
from etude.run.serving import STOP_S, SUPERVISOR_VARIABLE
from etude.storage import fullest
from etude.telemetry.events import ProcessStarted
from etude.telemetry.log import EventLog

ROOM_PAUSES = Backoff(first_s=2.0, longest_s=60.0)
"""Before a process that found no room on a disk is started again."""
FINITE = frozenset({"midtrain", "sft", "parity", "train", "rollouts"})
"""Processes that end when their work is done; the others serve until they are stopped."""
MAX_DEATHS, DEATHS_WINDOW_S = 5, 120.0
"""More deaths of one process than this within this time are not bad luck."""
MAX_SILENCES, SILENCES_WINDOW = 3, 10.0
"""More silences of one process than this, within this many times what it may be silent, come again with each start."""
THREADING = {"GOMP_SPINCOUNT": "1000"}
"""Time that an OpenMP thread spins before it sleeps. By default it spins on for milliseconds; on a machine whose cores
are also wanted by others that made two-threaded training ten times slower, and this short spin costs 5 % when idle.
"""


class Child:
    """One process of the run, across its restarts; killed when it gives no sign of life for ``heartbeat_timeout_s``."""

    def __init__(
        self,
        name: ProcessName,
        folder: RunFolder,
        events: EventLog,
        notify: Callable[[str], None] = lambda _: None,
        *,
        heartbeat_timeout_s: float,
    ) -> None:
        """``notify`` tells people, at once and also when nothing can be written, that the process is started again."""
        self.name = name
        self._notify = notify
        self._waits = 0
        self._again_s: float | None = None
        self._folder = folder
        self._events = events
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._restarts = 0
        self._deaths: list[float] = []
        self._silences: list[float] = []
        self._heartbeat = folder.path / f".{name}.beat"
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Process id of the present incarnation."""
        return self._process.pid

    @property
    def log(self) -> Path:
        """File that the process prints to."""
        return self._folder.logs / f"{self.name}.log"

    def check(self) -> bool:
        """Return True if the process has done its work; restarts it if it died. Raises when a restart would not
        help.
        """
        status, now_s = self._process.poll(), time.monotonic()
        if status is None:
            self._check_alive()
        if status is None or (status == 0 and self.name.command in FINITE):
            return status == 0
        if status == ExitCode.USER_ERROR:
            raise EtudeError(f"{self.name} gave up: {self._last_line()}")
        if status == ExitCode.DISK_FULL:
            self._await_room(now_s)
            return False
        self._deaths = [*(at for at in self._deaths if now_s - at < DEATHS_WINDOW_S), now_s]
        if len(self._deaths) > MAX_DEATHS:
            raise InfrastructureError(
                f"{self.name} died {len(self._deaths)} times in {DEATHS_WINDOW_S:g} s, last with status {status}: "
                f"{self._lines()[-1]}; see {self.log}"
            )
        self._notify(f"{self.name} ended with status {status} and is started again: {self._last_line()}")
        self._restart()
        return False

    def _await_room(self, now_s: float) -> None:
        """Start the process again after a pause: what it needs is not étude's to give."""
        if self._again_s is None:
            self._waits = self._waits + 1 if now_s - self._started_s < ROOM_PAUSES.longest_s else 1
            pause_s = ROOM_PAUSES.delay_s(self._waits)
            self._again_s = now_s + pause_s
            folder, free_bytes = fullest([self._folder.path])
            self._notify(
                f"{self.name} waits for room on a disk: {folder} has {free_bytes:,} bytes free; nothing is lost, make "
                f"room there and it goes on (tried again in {pause_s:g} s)"
            )
        elif now_s >= self._again_s:
            self._restart()

    def _restart(self) -> None:
        self._again_s = None
        self._restarts += 1
        self._process = self._start()

    def _check_alive(self) -> None:
        """Kill the process if it was silent for too long; it is found dead the next time."""
        now_s = time.monotonic()
        silent_s = self._silence.look(self._sign(), now_s)
        timeout_s = self._heartbeat_timeout_s
        if silent_s <= (timeout_s if self._silence.begun else max(timeout_s, START_S)):
            return
        self._kill()
        message = f"{self.name} gave no sign of life for {silent_s:.0f} s and was killed"
        self._notify(message)
        window_s = SILENCES_WINDOW * silent_s
        self._silences = [*(at for at in self._silences if now_s - at < window_s), now_s]
        if len(self._silences) > MAX_SILENCES:
            raise InfrastructureError(
                f"{message}, for the {len(self._silences)}th time in {window_s:.0f} s; see {self.log}, or allow it "
                f"more with heartbeat_timeout_s"
            )

    def _sign(self) -> int:
        """Changes with each beat."""
        try:
            return self._heartbeat.stat().st_mtime_ns
        except OSError:
            return 0

    def memory_bytes(self) -> int:
        """Resident memory right now; 0 where the system does not say."""
        try:
            resident_pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return resident_pages * os.sysconf("SC_PAGE_SIZE")

    def ask_to_stop(self) -> None:
        """Send SIGTERM, if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()

    def make_sure(self, deadline_s: float) -> None:
        """Wait for the end until ``deadline_s`` (monotonic), then kill the whole process group."""
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        """``kill -9`` of the whole process group."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "etude", self.name.command, "--run", str(self._folder.path)]
        if self.name.replica:
            command += ["--replica", str(self.name.replica)]
        self._heartbeat.touch()
        self._silence = Silence(self._sign(), time.monotonic())
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches the supervisor alone, which stops the others in order.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **THREADING,
                    **os.environ,
                    SUPERVISOR_VARIABLE: str(os.getpid()),
                    HEARTBEAT_VARIABLE: str(self._heartbeat.absolute()),
                },
                start_new_session=True,
            )
        self._started_s = time.monotonic()
        self._events.write(ProcessStarted(process=str(self.name), pid=process.pid, restarts=self._restarts))
        return process

    def _last_line(self) -> str:
        """Its last line: its own, if there is one, and not that of a program that ran it."""
        lines = self._lines()
        own = [line.removeprefix("etude: ") for line in lines if line.startswith("etude: ")]
        return (own or lines)[-1]

    def _lines(self) -> list[str]:
        """All that it said."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines() or ["it said nothing"]


def stop_all(children: list[Child]) -> None:
    """Stop all processes at once: first by signal, then by kill."""
    for child in children:
        child.ask_to_stop()
    deadline_s = time.monotonic() + STOP_S
    for child in children:
        child.make_sure(deadline_s)
