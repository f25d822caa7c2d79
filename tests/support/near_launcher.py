"""The launcher ``local`` for one region alone: each region's processes are children of its own supervisor."""

from collections.abc import Mapping
from typing import final

from etude.config.section import Section
from etude.fleet.launcher import LaunchContext
from etude.fleet.specs import ProcessSpec, ProcessStatus
from etude.run.launchers.local import LocalLauncher


@final
class NearLauncher:
    """The behaviour of :class:`~etude.run.launchers.local.LocalLauncher`, in one region."""

    spans_regions = False

    def __init__(self, options: Section, context: LaunchContext) -> None:
        self._local = LocalLauncher(options, context)

    def place(self, spec: ProcessSpec) -> None:
        """Start a process, unless it runs."""
        self._local.place(spec)

    def remove(self, *names: str, grace_s: float) -> None:
        """Stop processes."""
        self._local.remove(*names, grace_s=grace_s)

    def look(self) -> Mapping[str, ProcessStatus]:
        """Describe them right now."""
        return self._local.look()
