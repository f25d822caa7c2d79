"""What the processes of a fleet say of themselves, read from the event files on their machines' disks.

A machine's disk also has copies of what other machines sent to the run's URL: a line counts once. Owns finding and
reading; what it means is :mod:`bench.fleet.figures`'s.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

from bench.fleet.plan import HOME
from etude.run.process_name import ProcessName
from etude.telemetry.events import Logged
from etude.telemetry.log import EventReader


@final
class Observed:
    """The events of all processes so far, in the order of their times; :meth:`update` reads on."""

    def __init__(self, disks: Path) -> None:
        self._disks = disks
        self._readers: dict[Path, EventReader] = {}
        self._marks: set[tuple[float, str, str]] = set()
        self.events: list[Logged] = []

    def update(self) -> None:
        """Read new lines."""
        for folder in self._disks.glob("*/*/events"):
            for logged in self._readers.setdefault(folder, EventReader(folder)).new():
                mark = (logged.at_s, logged.process, type(logged.event).__name__)
                if mark not in self._marks:
                    self._marks.add(mark)
                    self.events.append(logged)
        self.events.sort(key=lambda logged: logged.at_s)


def region_of(process: str) -> str:
    """The region of a process by its name."""
    try:
        return ProcessName.parse(process).region or HOME
    except ValueError:
        return HOME


def of_kind(events: Iterable[Logged], kind: type) -> list[Logged]:
    """The events of one kind."""
    return [logged for logged in events if isinstance(logged.event, kind)]


def by_region(events: Iterable[Logged]) -> Mapping[str, list[Logged]]:
    """Region → its events."""
    regions: dict[str, list[Logged]] = {}
    for logged in events:
        regions.setdefault(region_of(logged.process), []).append(logged)
    return regions
