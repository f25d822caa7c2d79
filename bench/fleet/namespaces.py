"""Namespaces as machines, by the process that keeps each open: entering one, and all that runs in it.

python -m bench.fleet.namespaces PID COMMAND...        become COMMAND on the machine of process PID
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bench.sync.router import enter_namespace
from bench.usage import command_line

ROUTER = "bench.sync.router"
"""The emulator's program, which stays in the namespace that it made last."""


def enter_command(init: int, command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` on the machine that process ``init`` keeps open."""
    return [sys.executable, "-m", "bench.fleet.namespaces", str(init), *command]


def processes_in(init: int) -> dict[int, list[str]]:
    """Process id → command line of all that runs on a machine; the emulator of links, which visits it, does not."""
    machine = _machine(init)
    running = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    there = {pid: command_line(pid) for pid in running if machine is not None and _machine(pid) == machine}
    return {pid: words for pid, words in there.items() if ROUTER not in words}


def kill_all(pids: Sequence[int]) -> None:
    """``kill -9`` processes at once, as with a machine that loses its power."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """True if a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][:1] not in ("Z", "X", "")
    except OSError:
        return False


def _machine(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None


if __name__ == "__main__":
    for kind in ("net", "mnt"):
        descriptor = os.open(f"/proc/{sys.argv[1]}/ns/{kind}", os.O_RDONLY)
        enter_namespace(descriptor)
        os.close(descriptor)
    os.execvp(sys.argv[2], sys.argv[2:])
