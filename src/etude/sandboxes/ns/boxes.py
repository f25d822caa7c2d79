"""The launcher's records of a sandbox and of its processes. Pure, but for descriptors that it closes.

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
"""State → where it may go."""


def is_own_folder(path: str) -> bool:
    """True if a folder exists and is no link of an image, which could lead out to the host."""
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
        """Its first, by the machine's numbers, once it is started."""
        self.pidfd = -1
        self.upper = -1
        """The folder of all that was written."""
        self.close_asked = False
        self.may_run = False
        """True if anything of the agent's may run: a command was started since all processes were killed."""

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
        """Mount points of its overlays: the root, and ``/usr`` where that is the machine's and can change."""
        if self.creation["root"]:
            return [""]
        changes = self.as_root or any(is_own_folder(f"{layer}/usr") for layer in self.creation["layers"])
        return ["", "/usr"] if changes else [""]

    def is_dying(self) -> bool:
        """True while its first process is being killed, which kills all others before it is over."""
        if self.state is not BoxState.LIVE:
            return True
        with suppress(OSError):
            fields = Path(f"/proc/{self.process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            return bool(int(fields.split()[6]) & EXITING)
        return True

    def move(self, state: BoxState) -> None:
        """Go to another state; only moves in ``MOVES`` exist."""
        assert state in MOVES[self.state], f"sandbox {self.number} went from {self.state} to {state}"
        self.state = state

    def close(self) -> None:
        """Let go of everything it has open."""
        for descriptor in (self.pidfd, self.upper):
            if descriptor >= 0:
                os.close(descriptor)
        self.pidfd = self.upper = -1


class RunningCommand:
    """The launcher's record of a running command or job."""

    def __init__(self, number: int, box: SandboxRecord, process: int, *, is_job: bool) -> None:
        """``number`` is its provider's, negative for one that the launcher thought of itself."""
        self.number = number
        self.box = box
        self.process = process
        self.pidfd = os.pidfd_open(process)
        self.is_job = is_job
        self.code: int | None = None
        """Its end, if its program was not executed."""
        self.end: dict[str, Any] | None = None
        """Its end, for the provider, once there is one."""
        self.timed_out = self.was_stopped = False
        """True for a job that was killed for its time, and for one that stood still then."""
        self.ender: RunningCommand | None = None
        """The job that ends what else belongs to it: only then it is over."""

    def is_stopped(self) -> bool:
        """True if a signal made it stand still."""
        with suppress(OSError):
            text = Path(f"/proc/{self.process}/stat").read_text(encoding="utf-8", errors="replace")
            return text.rpartition(")")[2].split()[0] == "T"
        return False

    def number_inside(self) -> int:
        """The number of the process inside, and so of its session. ``ProcessLookupError`` if it has ended."""
        try:
            status = Path(f"/proc/{self.process}/status").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError as error:
            raise ProcessLookupError(f"process {self.process} has ended") from error
        numbers = next((line.split() for line in status.splitlines() if line.startswith("NSpid:")), [])
        if len(numbers) < 2:
            raise ProcessLookupError(f"process {self.process} is in no other namespace")
        return int(numbers[-1])
