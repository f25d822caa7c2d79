"""The restart rules for a process that ended or sends no heartbeat. Pure: decisions from facts and ``now``.

    ended with 0, and it is finite         done
    ended with USER_ERROR                  a restart cannot help: the run ends with the process's message
    ended with DISK_FULL                   restarted after growing delays, without a limit on their number
    ended otherwise, or vanished           restarted, unless that happened too often in a short time
    no heartbeat for too long              killed and restarted, unless that recurs with each start

:mod:`etude.fleet.reconciler` owns the placement of processes and the notices for the user.
"""

from enum import Enum, auto
from typing import final

from etude.backoff import Backoff
from etude.errors import ExitCode

MAX_DEATHS, DEATHS_WINDOW_S = 5, 120.0
"""More ends of one process than this within this time are not bad luck."""
MAX_SILENCES, SILENCES_WINDOW = 3, 10.0
"""More missing heartbeats of one process than this, within this multiple of its heartbeat timeout, recur with each
start."""
ROOM_PAUSES = Backoff(first_s=2.0, longest_s=60.0)
"""Delays before a process that found a full disk is restarted."""
START_S = 3600.0
"""Longest time until the first heartbeat: a process loads a model or tokenises its data first."""
LONGEST_LOOK_S = 1.0
"""Longest time between two observations that counts as silence: if the supervisor was suspended, so were the others."""


class Outcome(Enum):
    """Consequences of the end of a process."""

    DONE = auto()
    USER_ERROR = auto()
    AWAIT_ROOM = auto()
    RESTART = auto()
    TOO_MANY_DEATHS = auto()


@final
class Silence:
    """The time since a process's last heartbeat, counted only while its supervisor observed it. Pure."""

    def __init__(self, sign: int, now_s: float) -> None:
        """``sign`` is any value that changes with each heartbeat."""
        self._sign = sign
        self._looked_s = now_s
        self._silent_s = 0.0
        self.begun = False
        """True if there was any heartbeat."""

    def look(self, sign: int, now_s: float) -> float:
        """The seconds without a heartbeat, at monotonic seconds ``now_s``."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if sign != self._sign:
            self._sign, self._silent_s, self.begun = sign, 0.0, True
        else:
            self._silent_s += min(passed_s, LONGEST_LOOK_S)
        return self._silent_s

    def is_too_long(self, silent_s: float, timeout_s: float) -> bool:
        """True if a process with a heartbeat timeout of ``timeout_s`` must be killed."""
        return silent_s > (timeout_s if self.begun else max(timeout_s, START_S))


@final
class Restarts:
    """The ends of one process, or of a group that restarts together, and their consequences."""

    def __init__(self) -> None:
        self._deaths: list[float] = []
        self._silences: list[float] = []
        self._waits = 0

    @property
    def deaths(self) -> int:
        """Ends within the window, at the time of the last one."""
        return len(self._deaths)

    @property
    def silences(self) -> int:
        """Missing heartbeats within the window, at the time of the last one."""
        return len(self._silences)

    def ended(self, status: int | None, now_s: float, *, ends: bool) -> Outcome:
        """Decide about an end with ``status``, or ``None`` if the process vanished; call once per end."""
        if status == ExitCode.DONE and ends:
            return Outcome.DONE
        if status == ExitCode.USER_ERROR:
            return Outcome.USER_ERROR
        if status == ExitCode.DISK_FULL:
            return Outcome.AWAIT_ROOM
        self._deaths = [*(at_s for at_s in self._deaths if now_s - at_s < DEATHS_WINDOW_S), now_s]
        return Outcome.TOO_MANY_DEATHS if len(self._deaths) > MAX_DEATHS else Outcome.RESTART

    def record_silence(self, silent_s: float, now_s: float) -> bool:
        """Count a missing heartbeat for which a process was killed; true if it recurs with each start."""
        window_s = SILENCES_WINDOW * silent_s
        self._silences = [*(at_s for at_s in self._silences if now_s - at_s < window_s), now_s]
        return len(self._silences) > MAX_SILENCES

    def room_pause_s(self, lived_s: float) -> float:
        """Seconds to wait for disk space after the process ran for ``lived_s``; longer each consecutive time."""
        self._waits = self._waits + 1 if lived_s < ROOM_PAUSES.longest_s else 1
        return ROOM_PAUSES.delay_s(self._waits)
