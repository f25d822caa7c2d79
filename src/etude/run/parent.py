"""Relation of a process to its supervisor: the process ends with it and leaves messages to users to it.

A module with few imports, since every start of a process waits for it.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""``prctl`` option: the kernel sends us a signal when our parent dies."""
SUPERVISOR_VARIABLE = "ETUDE_SUPERVISOR"
"""Environment variable that holds the process id of the supervisor that started a process of the run."""


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel end this process when the supervisor dies, however it dies (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor is not None and os.getppid() != int(supervisor):
        raise SystemExit("etude: the supervisor died while this process was starting")


def tell_person(line: str) -> None:
    """Print a line for a person who started this process by hand; nothing under a supervisor."""
    if SUPERVISOR_VARIABLE not in os.environ:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
