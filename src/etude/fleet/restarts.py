"""The rules for the restart of a process that ended or is silent. Pure: facts and ``now`` in, decisions out.

    ended with 0, and it was to end        done
    ended with USER_ERROR                  no restart repairs it: the run ends with its message
    ended with DISK_FULL                   started again after growing pauses, for as long as it takes
    ended otherwise, or vanished           started again, unless that happened too often in a short time
    silent for too long                    killed and started again, unless that comes again with each start

:mod:`etude.fleet.reconciler` owns the placement of processes and the notices for people.
"""

from enum import Enum, auto
from typing import final

from etude.backoff import Backoff
from etude.errors import ExitCode

MAX_DEATHS, DEATHS_WINDOW_S = 5, 120.0
"""More deaths of one process than this within this time are not bad luck."""
MAX_SILENCES, SILENCES_WINDOW = 3, 10.0
"""More silences of one process than this, within this many times what it may be silent, come again with each start."""
ROOM_PAUSES = Backoff(first_s=2.0, longest_s=60.0)
"""Before a process that found no room on a disk is started again."""
START_S = 3600.0
"""Longest silence before the first beat: a process loads a model, or tokenises what it will read."""
LONGEST_LOOK_S = 1.0
"""Most of the time between two looks that counts as silence: when the supervisor stood still, so did all others."""


class Outcome(Enum):
    """Consequences of the end of a process."""

    DONE = auto()
    USER_ERROR = auto()
    AWAIT_ROOM = auto()
    RESTART = auto()
    TOO_MANY_DEATHS = auto()


@final
class Silence:
    """The time since a process's last heartbeat, counted only while its supervisor watched. Pure."""

    def __init__(self, sign: int, now_s: float) -> None:
        """``sign`` is anything that changes with each beat."""
        self._sign = sign
        self._looked_s = now_s
        self._silent_s = 0.0
        self.begun = False
        """True if there was any beat."""

    def look(self, sign: int, now_s: float) -> float:
        """The silence in seconds, at monotonic seconds ``now_s``."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if sign != self._sign:
            self._sign, self._silent_s, self.begun = sign, 0.0, True
        else:
            self._silent_s += min(passed_s, LONGEST_LOOK_S)
        return self._silent_s

    def is_too_long(self, silent_s: float, timeout_s: float) -> bool:
        """True if a process that may be silent for ``timeout_s`` has to be killed."""
        return silent_s > (timeout_s if self.begun else max(timeout_s, START_S))


@final
class Restarts:
    """The deaths of one process, or of a group that restarts together, and what follows from each."""

    def __init__(self) -> None:
        self._deaths: list[float] = []
        self._silences: list[float] = []
        self._waits = 0

    @property
    def deaths(self) -> int:
        """Deaths within the window, at the time of the last one."""
        return len(self._deaths)

    @property
    def silences(self) -> int:
        """Silences within the window, at the time of the last one."""
        return len(self._silences)

    def ended(self, status: int | None, now_s: float, *, ends: bool) -> Outcome:
        """Decide about an end with ``status``, ``None`` where it is gone without one; to be told once of each."""
        if status == ExitCode.DONE and ends:
            return Outcome.DONE
        if status == ExitCode.USER_ERROR:
            return Outcome.USER_ERROR
        if status == ExitCode.DISK_FULL:
            return Outcome.AWAIT_ROOM
        self._deaths = [*(at_s for at_s in self._deaths if now_s - at_s < DEATHS_WINDOW_S), now_s]
        return Outcome.TOO_MANY_DEATHS if len(self._deaths) > MAX_DEATHS else Outcome.RESTART

    def silent(self, silent_s: float, now_s: float) -> bool:
        """Count a silence for which a process was killed; true if it comes again with each start."""
        window_s = SILENCES_WINDOW * silent_s
        self._silences = [*(at_s for at_s in self._silences if now_s - at_s < window_s), now_s]
        return len(self._silences) > MAX_SILENCES

    def room_pause_s(self, lived_s: float) -> float:
        """Seconds to wait for room on a disk, after a life of ``lived_s``; longer each time in a row."""
        self._waits = self._waits + 1 if lived_s < ROOM_PAUSES.longest_s else 1
        return ROOM_PAUSES.delay_s(self._waits)
