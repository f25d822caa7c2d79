"""The protocol of launchers: three verbs, and no word of what the processes do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from etude.errors import InfrastructureError
from etude.fleet.specs import ProcessSpec, ProcessStatus


class LauncherUnavailable(InfrastructureError):
    """The machines of a launcher cannot be reached for now; what runs there goes on."""


class ProcessLauncher(Protocol):
    """Keeps named processes of one run on machines; a second launcher of the same run sees the same ones, unless its
    processes end with it.
    """

    @property
    def spans_regions(self) -> bool:
        """True if it reaches the machines of all regions; otherwise each region has a launcher of its own."""
        ...

    def place(self, spec: ProcessSpec) -> None:
        """Make a process run: nothing happens if it does, and one that ended is started again.

        May return before a machine has room for it. All three raise :class:`LauncherUnavailable` where the machines
        cannot be reached.
        """
        ...

    def remove(self, *names: str, grace_s: float) -> None:
        """Stop processes at once, each with its process group, and forget them; names that are not there are fine.

        Each gets SIGTERM, and SIGKILL after ``grace_s``; returns when all are gone.
        """
        ...

    def look(self) -> Mapping[str, ProcessStatus]:
        """All processes that were placed and not removed, those that ended included."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """Facts of a run that a launcher is made with, besides its options."""

    run: str
    """Identifies the run among others on the same machines."""
    folder: Path
    """Working folder of the run on this machine: ``logs/`` for output, ``.NAME.beat`` for heartbeats."""
