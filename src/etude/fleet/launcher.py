"""The protocol of launchers: three methods, independent of what the processes do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from etude.errors import InfrastructureError
from etude.fleet.specs import ProcessSpec, ProcessStatus


class LauncherUnavailable(InfrastructureError):
    """The machines of a launcher are temporarily unreachable; their processes continue."""


class ProcessLauncher(Protocol):
    """Manages the named processes of one run on machines. A second launcher of the same run sees the same processes,
    unless they end with their launcher.
    """

    @property
    def spans_regions(self) -> bool:
        """True if it reaches the machines of all regions; otherwise each region has its own launcher."""
        ...

    def place(self, spec: ProcessSpec) -> None:
        """Start a process unless it runs; restart one that ended.

        May return before a machine has resources for it. All three methods raise :class:`LauncherUnavailable` if the
        machines cannot be reached.
        """
        ...

    def remove(self, *names: str, grace_s: float) -> None:
        """Stop processes concurrently, each with its process group, and forget them; unknown names are ignored.

        Each gets SIGTERM, and SIGKILL after ``grace_s``; returns when all have ended.
        """
        ...

    def look(self) -> Mapping[str, ProcessStatus]:
        """All processes that were placed and not removed, including those that ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """Facts of a run for the construction of a launcher, in addition to its options."""

    run: str
    """Identifies the run among others on the same machines."""
    folder: Path
    """Working folder of the run on this machine: ``logs/`` for output, ``.NAME.beat`` for heartbeats."""
