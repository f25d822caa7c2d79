"""Resource use of processes, read from /proc. Linux and the standard library only."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_GONE = (FileNotFoundError, ProcessLookupError)


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    return [pid, *descendants(pid)]


def descendants(pid: int) -> list[int]:
    """Process ids of living children, theirs, and so on; what ends meanwhile may be left out."""
    result: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        result += children
        waiting += children
    return result


def threads(pid: int) -> list[int]:
    """Ids of a process's threads; none if it is gone."""
    try:
        return [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
    except _GONE:
        return []


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for thread in threads(pid):
        with suppress(*_GONE):
            children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="utf-8").split())
    return children


def command_line(pid: int) -> list[str]:
    """The words of a process's command line, between which a forked process writes spaces; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    except OSError:
        return []


def cpu_s(pids: Iterable[int]) -> float:
    """User and system seconds of processes that live, and of their children that ended."""
    ticks = 0
    for pid in pids:
        with suppress(*_GONE):
            ticks += sum(map(int, _stat(pid)[11:15]))  # its own, user and system, and those of its children that ended
    return ticks / _CLOCK_TICKS


def age_s(pid: int) -> float:
    """Seconds since a process was started. Raises ``FileNotFoundError`` or ``ProcessLookupError`` for none."""
    since_boot_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return since_boot_s - int(_stat(pid)[19]) / _CLOCK_TICKS


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` behind the name of the program, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()


def peak_bytes(pids: Iterable[int]) -> int:
    """Resident memory of processes, each at its highest."""
    peak = 0
    for pid in pids:
        with suppress(*_GONE):
            for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
                if line.startswith("VmHWM:"):
                    peak += int(line.split()[1]) * 1024
    return peak
