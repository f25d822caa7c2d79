"""The launcher's records of a sandbox and of its processes. Pure, except that it closes descriptors.

    LIVE ──its first process is killed or dies──▶ ENDING ──it is reaped──▶ GONE

Standard library alone.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

EXITING = 0x4
"""The kernel's mark of a process that is ending, in ``/proc/N/stat``."""


class BoxState(Enum):
    """The state of a sandbox in its launcher."""

    LIVE = "live"
    ENDING = "ending"
    GONE = "gone"


MOVES: Mapping[BoxState, frozenset[BoxState]] = MappingProxyType(
    {
        BoxState.LIVE: frozenset({BoxState.ENDING}),
        BoxState.ENDING: frozenset({BoxState.GONE}),
        BoxState.GONE: frozenset(),
    }
)
"""State → possible next states."""


def is_own_folder(path: str) -> bool:
    """True if a folder exists and is not a link of an image, which could lead to the host."""
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114


class SandboxRecord:
    """The launcher's record of one sandbox."""

    def __init__(self, creation: Mapping[str, Any], slot: int) -> None:
        """``creation`` has the fields of :class:`~etude.sandboxes.ns.wire.CreateOrder`."""
        self.number: int = creation["box"]
        self.creation = creation
        self.slot = slot
        """Number of its uid range."""
        self.state = BoxState.LIVE
        self.process = 0
        """Its first process, numbered by the host, once it is started."""
        self.pidfd = -1
        self.upper = -1
        """The folder with everything written."""
        self.close_asked = False
        self.may_run = False
        """True if processes of the agent may be running: a command was started since the last kill of all."""

    @property
    def name(self) -> str:
        """Name of its control group."""
        return f"{self.number:06d}"

    @property
    def as_root(self) -> bool:
        """True if its commands run as its root."""
        return bool(self.creation["as_root"])

    @property
    def overlays(self) -> list[str]:
        """Mount points of its overlays: the root, and ``/usr`` if that is the machine's and writable."""
        if self.creation["root"]:
            return [""]
        changes = self.as_root or any(is_own_folder(f"{layer}/usr") for layer in self.creation["layers"])
        return ["", "/usr"] if changes else [""]

    def is_dying(self) -> bool:
        """True while its first process is being killed, which first kills all others."""
        if self.state is not BoxState.LIVE:
            return True
        with suppress(OSError):
            fields = Path(f"/proc/{self.process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            return bool(int(fields.split()[6]) & EXITING)
        return True

    def move(self, state: BoxState) -> None:
        """Move to another state; only moves in ``MOVES`` are allowed."""
        assert state in MOVES[self.state], f"sandbox {self.number} went from {self.state} to {state}"
        self.state = state

    def close(self) -> None:
        """Close all its descriptors."""
        for descriptor in (self.pidfd, self.upper):
            if descriptor >= 0:
                os.close(descriptor)
        self.pidfd = self.upper = -1


class RunningCommand:
    """The launcher's record of a running command or job."""

    def __init__(self, number: int, box: SandboxRecord, process: int, *, is_job: bool) -> None:
        """``number`` is chosen by the provider; negative numbers are the launcher's own."""
        self.number = number
        self.box = box
        self.process = process
        self.pidfd = os.pidfd_open(process)
        self.is_job = is_job
        self.code: int | None = None
        """Its exit code, if its program was not executed."""
        self.end: dict[str, Any] | None = None
        """Its end, for the provider, once known."""
        self.timed_out = self.was_stopped = False
        """True for a job that was killed after its timeout, and for one that was stopped by a signal then."""
        self.ender: RunningCommand | None = None
        """The job that ends its remaining processes; only then has it ended itself."""

    def is_stopped(self) -> bool:
        """True if a signal has stopped it."""
        with suppress(OSError):
            text = Path(f"/proc/{self.process}/stat").read_text(encoding="utf-8", errors="replace")
            return text.rpartition(")")[2].split()[0] == "T"
        return False

    def number_inside(self) -> int:
        """The number of the process inside, which is also its session's. ``ProcessLookupError`` if it has ended."""
        try:
            status = Path(f"/proc/{self.process}/status").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError as error:
            raise ProcessLookupError(f"process {self.process} has ended") from error
        numbers = next((line.split() for line in status.splitlines() if line.startswith("NSpid:")), [])
        if len(numbers) < 2:
            raise ProcessLookupError(f"process {self.process} is in no other namespace")
        return int(numbers[-1])
